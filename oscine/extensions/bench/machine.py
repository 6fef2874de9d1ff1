"""Where and on what a measurement was made: device, versions, commit, date, and the age of this process."""

import datetime
import os
import subprocess
import time
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_REPOSITORY = Path(__file__).parents[3]
_IMPORTED_S = time.monotonic()


@dataclass(frozen=True, slots=True)
class Machine:
    gpu: str  # the driver's name for it; "cpu" if the model runs on a CPU
    torch: str
    triton: str | None
    commit: str
    date: str  # UTC


def describe(device: str, commit: str | None) -> Machine:
    """`device`: as for --device. `commit`: overrides the commit that git reports."""
    import torch

    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    gpu = torch.cuda.get_device_name(None if device == "auto" else device) if on_gpu else "cpu"
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    return Machine(gpu, torch.__version__, _version("triton"), commit or find_commit(), now)


def find_commit() -> str:
    """Short hash of the checkout that runs, with -dirty if its tracked files differ; "unknown" outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(command, cwd=_REPOSITORY, capture_output=True, text=True, check=False, env=environment)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def process_age_s() -> float:
    """Seconds since this process was started, the interpreter's own start included."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # not Linux: since this module was imported
        return time.monotonic() - _IMPORTED_S
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
