"""Levels of instructions for which the library is compiled ahead, and the best one that this processor has.

Files compiled ahead are for machines without a C compiler, such as a container. They lie in the package.
"""

from collections.abc import Collection
from pathlib import Path
from platform import machine
from typing import NamedTuple

BUILT = Path(__file__).parent / "built"


class Level(NamedTuple):
    name: str
    flags: tuple[str, ...]  # of the compiler
    needs: frozenset[str]  # features, as /proc/cpuinfo writes them

    @property
    def file(self) -> str:
        return f"{self.name}.so"


_AVX2 = frozenset(["avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"])
_AVX512 = _AVX2 | frozenset(["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"])
_LEVELS = {  # the best one first
    "x86_64": (
        Level("x86-64-avx512-vnni", ("-march=x86-64-v4", "-mavx512vnni"), _AVX512 | {"avx512_vnni"}),
        Level("x86-64-avx-vnni", ("-march=x86-64-v3", "-mavxvnni"), _AVX2 | {"avx_vnni"}),
        Level("x86-64-avx2", ("-march=x86-64-v3",), _AVX2),
    ),
    "aarch64": (Level("aarch64-dotprod", ("-march=armv8.2-a+dotprod",), frozenset({"asimd", "asimddp"})),),
}


def levels() -> tuple[Level, ...]:
    """Those of processors of this machine's kind."""
    return _LEVELS.get(machine(), ())


def features() -> frozenset[str]:
    """Of this machine's processor; none where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    listed = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(listed.partition(":")[2].split())


def compiled_ahead(has: Collection[str], folder: Path = BUILT) -> Path | None:
    """The file for a processor with these features."""
    fitting = (folder / level.file for level in levels() if level.needs <= frozenset(has))
    return next((path for path in fitting if path.exists()), None)
