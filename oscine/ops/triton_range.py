"""The releases of Triton that the kernels were tested with. Only versions are read: Triton need not be installed."""

import re
from collections.abc import Callable
from functools import cache
from importlib import metadata

from oscine.system.environment import Environment

OLDEST = (3, 6)
UNTESTED = (3, 10)  # the first release that was not tested
# The first release with all of Gluon that the kernels for 10.x use; on 12.x it compiles tl.dot_scaled of e4m3 to
# mma.sync with block scales.
OLDEST_FOR_BLACKWELL = (3, 9)
TORCH = ">=2.11,<2.16"  # the releases of torch that come with these, as pip spells a range


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


TRITON = f">={_text(OLDEST)},<{_text(UNTESTED)}"
REMEDY = f"pip install 'torch{TORCH}' 'triton{TRITON}'"
# pip takes an installed torch for CPUs for one of the range, so it must be told to replace it.
CUDA_REMEDY = f"on Linux, `pip install --force-reinstall 'torch{TORCH}'` from PyPI installs a build with CUDA"
TESTED = f"{_text(OLDEST)} to {UNTESTED[0]}.{UNTESTED[1] - 1}"


@cache
def installed() -> str | None:
    """The installed version of Triton, or None. Cached, as kernels are chosen with it at each call."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def release_of(version: str) -> tuple[int, int]:
    """(0, 0) for a text that is no version."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (0, 0) if found is None else (int(found[1]), int(found[2]))


def is_tested(version: str) -> bool:
    return OLDEST <= release_of(version) < UNTESTED


def lacking_for_blackwell() -> str | None:
    """What the Blackwell kernels need that the installed Triton is not, in words; None if it is new enough."""
    version = installed() or "none"
    if release_of(version) >= OLDEST_FOR_BLACKWELL:
        return None
    return f"Triton {_text(OLDEST_FOR_BLACKWELL)} or newer on this GPU, not {version}"


def check_triton(warn: Callable[[str], None]) -> None:
    """Raises ValueError for an untested release. With OSCINE_UNTESTED_TRITON it calls `warn` instead."""
    version = installed()
    if version is None or is_tested(version):  # a missing Triton is an error where it is imported
        return
    tested = f"Oscine was tested with {TESTED}"
    if not Environment().untested_triton:
        remedies = f"`{REMEDY}` installs one of them; OSCINE_UNTESTED_TRITON=1 tries this one"
        raise ValueError(f"Triton {version} is not supported: {tested}. {remedies}")
    warn(f"warning: Triton {version} is used, as OSCINE_UNTESTED_TRITON is set: {tested}")
