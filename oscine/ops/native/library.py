"""The C kernels of this folder as a shared library, compiled for this machine at their first use.

The library is kept in the user's cache, under a hash of the sources, the compiler and the processor. Without a
compiler it is one that was compiled ahead (ahead.py). If there is none, a CPU runs the reference ops.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oscine.ops.native.cache import NoLibrary, cached
from oscine.ops.native.levels import compiled_ahead, features

NATIVE = "-march=native"
FLAGS = ("-O3", NATIVE, "-std=gnu11", "-shared", "-fPIC", "-pthread", "-fno-math-errno", "-fno-trapping-math")
_COMPILERS = ("cc", "gcc", "clang")
_FOLDER = Path(__file__).parent
_POINTER, _SIZE, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
# Of each function: p is a pointer, i an int64, f a float. Those of a step return a status: see `check`.
OF_STEPS = {
    "oscine_prepare_step": "ppppppppppiiiiiiiipppppp",
    "oscine_embed": "ppipiii",
    "oscine_linear": "ppippiii",
    "oscine_int8_few": "ppppiii",
    "oscine_rms_norm": "pippfppii",
    "oscine_norm_route": "pippfppiippiipp",
    "oscine_norm_qkv": "pippfpiipipppppipiiii",
    "oscine_attention": "ppiiiipippipiip",
    "oscine_moe": "ppppppppiiiiiiifpp",
    "oscine_choose": "ppipppppipppppiiii",
    "oscine_accept": "ppppppiippp",
    "oscine_place": "ppiiii",
    "oscine_rope": "pppppiipiiii",
    "oscine_swiglu": "ppii",
    "oscine_hold": "pppppiiippp",
    "oscine_held": "pppii",
    "oscine_draft_sampling": "ppppippp",
    "oscine_put": "piippi",
    "oscine_low_rank_in": "pppiiipiiii",
    "oscine_low_rank_out": "pppiiippiiiiii",
}
OTHERS = {
    "oscine_set_num_threads": "i",
    "oscine_set_patience": "i",
    "oscine_host_moe": "p",
    "oscine_dense_bytes": "ii",
    "oscine_pack_dense": "ppii",
    "oscine_packed_bytes": "ii",
    "oscine_pack": "pppiii",
    "oscine_quantize": "piiippp",
    "oscine_screen": "pppii",
    "oscine_run": "pi",
    "oscine_fence": "i",
}
_TYPES = {"p": _POINTER, "i": _SIZE, "f": _FLOAT}
MAX_ARGUMENTS = max(map(len, OF_STEPS.values()))
_recorders = threading.local()  # .now: what stands for the library in this thread


def library() -> Any:
    """The library, or what records its calls in this thread. Raises NoLibrary."""
    return getattr(_recorders, "now", None) or _loaded()


@contextmanager
def recorded_by(recorder: Any) -> Iterator[None]:
    """Ops of this thread call functions of `recorder`, an object with those of the library."""
    _recorders.now = recorder
    try:
        yield
    finally:
        _recorders.now = None


@functools.cache
def _loaded() -> ctypes.CDLL:
    """Compiles the library if no earlier process has."""
    loaded = _found_or_compiled()
    for name, kinds in (OF_STEPS | OTHERS).items():
        function = getattr(loaded, name)
        function.argtypes = [_TYPES[kind] for kind in kinds]
        function.restype = _SIZE if name.endswith("_bytes") else ctypes.c_int
    loaded.oscine_set_num_threads(torch.get_num_threads())
    return loaded


@functools.cache
def unavailable() -> str | None:
    """Why there is no library here, in one line; None where there is one."""
    try:
        _loaded()
    except NoLibrary as error:
        return str(error)
    return None


def find_compiler() -> str:
    """Raises NoLibrary."""
    compiler = next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        raise NoLibrary(f"there is no C compiler ({', '.join(_COMPILERS)})")
    return compiler


def _found_or_compiled() -> ctypes.CDLL:
    """Raises NoLibrary."""
    try:
        compiler = find_compiler()
    except NoLibrary:
        if (ahead := compiled_ahead(features())) is None:
            raise
        return _load(ahead)
    state = "\n".join(
        (
            *FLAGS,
            _first_line(compiler),
            _processor(),
            *platform.libc_ver(),
            *(source.read_text() for source in _sources()),
            _runner(),
        )
    )
    digest = hashlib.blake2b(state.encode(), digest_size=12).hexdigest()
    return cached(digest, lambda folder: compile_library(compiler, folder))


def _load(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibrary(str(error)) from None


def _sources() -> list[Path]:
    return sorted(_FOLDER.glob("*.[ch]"))


def compile_library(compiler: str, folder: Path, flags: tuple[str, ...] = FLAGS) -> bytes:
    """The library. `folder`: for files of the compiler, which stay there. Raises NoLibrary."""
    built, runner = folder / "native.so", folder / "runner.c"
    runner.write_text(_runner())
    # First x86's vectors: all units include them, and reading them takes as long as compiling the kernels.
    header = folder / "vectors.h"
    header.write_text("#if defined(__AVX2__)\n#include <immintrin.h>\n#endif\n")
    units = [str(path) for path in (*_sources(), runner) if path.suffix == ".c"]
    for arguments in (
        ["-x", "c-header", str(header), "-o", f"{header}.gch"],
        ["-include", str(header), "-o", str(built), *units, "-lm"],
    ):
        _compile([compiler, *flags, *arguments], folder)
    return built.read_bytes()


def _compile(command: list[str], folder: Path) -> None:
    """Raises NoLibrary."""
    environment = os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line]
        raise NoLibrary(f"{command[0]} failed: {lines[0] if lines else f'exit status {done.returncode}'}")


def _runner() -> str:
    """C: a run of many calls, whose arguments lie in arrays, by a function for each function of a step."""
    types = {"p": "void *", "i": "int64_t", "f": "float"}
    lines = [
        "#include <stdint.h>",
        "union value { void *p; int64_t i; float f; };",
        "struct call { int (*run)(const union value *); union value arguments[%d]; };" % MAX_ARGUMENTS,  # noqa: UP031
        "int oscine_run(const struct call *calls, int64_t count) {",
        "    int status = 0;",
        "    for (int64_t i = 0; i < count && !status; i++) status = calls[i].run(calls[i].arguments);",
        "    return status;",
        "}",
    ]
    for name, kinds in OF_STEPS.items():
        values = ", ".join(f"a[{i}].{kind}" for i, kind in enumerate(kinds))
        lines.append(f"int {name}({', '.join(types[kind] for kind in kinds)});")
        lines.append(f"int run_{name}(const union value *a) {{ return {name}({values}); }}")
    return "\n".join(lines) + "\n"


def _first_line(compiler: str) -> str:
    done = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]


def _processor() -> str:
    """What -march=native depends on: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform()
    wanted = ("flags", "Features", "model name", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def check(status: int) -> None:
    """Raises MemoryError for a function that found no memory, IndexError for one that was given a wrong token."""
    if status == -2:
        raise IndexError("a token that the vocabulary lacks")
    if status:
        raise MemoryError("no memory for a step")
