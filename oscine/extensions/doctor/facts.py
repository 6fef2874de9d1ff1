"""What this machine is: processor, memory, GPUs, disk, versions. Read without torch."""

import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import oscine
from oscine.executor.start.host_memory import available_bytes
from oscine.extensions.bench.machine import find_commit
from oscine.extensions.timing.gpus import Machine, describe_gpus
from oscine.system.cores import usable_cores
from oscine.system.environment import Environment

_FEATURES = (  # that the C kernels use, as /proc/cpuinfo spells them
    *("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
_PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "tokenizers", "huggingface-hub", "llguidance", "msgspec", "pyzmq"),
    *("starlette", "uvicorn", "uvloop", "ray", "nixl"),
)
_QUERY = ("name", "memory.total", "memory.free", "compute_cap", "driver_version")
_ANSWER_S = 20.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuFacts:
    name: str
    total: int  # bytes
    free: int  # bytes
    capability: str
    driver: str
    unified: bool = False  # GPU and CPU share one memory


@dataclass(frozen=True, slots=True)
class Facts:
    system: str
    python: str
    oscine: str
    commit: str
    processor: str
    features: tuple[str, ...]
    cores: int  # physical ones that this process may use
    memory: int  # bytes
    available: int | None  # bytes that this process may take
    gpus: tuple[GpuFacts, ...]
    devices: int  # GPUs that the system has and this process may use, with or without a driver that answers
    compiler: str | None
    disk: dict[str, int]  # free bytes, by folder
    packages: dict[str, str]  # versions of those that are installed
    machine: Machine | None = None  # the GPUs and their links, if the driver describes them


def gather() -> Facts:
    lines = _text("/proc/cpuinfo").splitlines()
    environment = Environment()
    return Facts(
        system=platform.platform(),
        python=platform.python_version(),
        oscine=oscine.__version__,
        commit=find_commit(),
        processor=_field(lines, "model name") or platform.processor() or platform.machine(),
        features=_features(_field(lines, "flags") or _field(lines, "Features")),
        cores=usable_cores(),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available=available_bytes(),
        gpus=_gpus(environment.visible_gpus),
        devices=environment.num_gpus,
        compiler=next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
        disk={_short(folder): _free(folder) for folder in (_hub_cache(), environment.packed_folder)},
        packages=_versions(),
        machine=describe_gpus(None, environment.visible_gpus, peer_access=not environment.no_peer_access),
    )


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _field(lines: list[str], name: str) -> str:
    values = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in values if key.strip() == name), "")


def _features(flags: str) -> tuple[str, ...]:
    found = set(flags.split())
    return tuple(feature for feature in _FEATURES if feature in found)


def _gpus(visible: str | None) -> tuple[GpuFacts, ...]:
    """Those that nvidia-smi reports, of the numbers in CUDA_VISIBLE_DEVICES."""
    program = shutil.which("nvidia-smi")
    if program is None or visible in ("", "-1"):
        return ()
    command = [program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError):
        return ()
    gpus = [gpu for line in done.stdout.splitlines() if (gpu := _gpu(line)) is not None]
    numbers = [part for part in (visible or "").split(",") if part.isdigit() and int(part) < len(gpus)]
    return tuple(gpus[int(number)] for number in numbers) if numbers else tuple(gpus)


def _gpu(line: str) -> GpuFacts | None:
    """Unified memory is reported as "[N/A]"; such a GPU has the system's."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != len(_QUERY):
        return None
    name, total, free, capability, driver = parts
    return GpuFacts(name, _bytes(total), _bytes(free), capability, driver, unified=not total.isdigit())


def _bytes(mebibytes: str) -> int:
    return int(mebibytes) * _MIB if mebibytes.isdigit() else available_bytes() or 0


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _short(folder: Path) -> str:
    """Without the name of the user."""
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _free(folder: Path) -> int:
    """Of the nearest folder above that this user can see."""
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return shutil.disk_usage(there).free


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found
