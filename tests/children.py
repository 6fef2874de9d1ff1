"""Descendants of a process, found by their command lines, and what processes keep in /dev/shm."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil


def children(word: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """All descendants of `parent` (default: this process) with this word in the command line.

    A process that ends meanwhile no longer has a command line.
    """
    found = []
    for child in (parent or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found


def shared_files(processes: Iterable[psutil.Process]) -> set[str]:
    """Names in /dev/shm of what these processes have open or mapped: they would outlive a process that is killed."""
    found: set[str] = set()
    for process in processes:
        folder = Path("/proc", str(process.pid))
        for descriptor in (folder / "fd").iterdir():
            with suppress(FileNotFoundError):  # closed meanwhile
                found.add(str(descriptor.readlink()))
        found |= {line.split(maxsplit=5)[-1] for line in (folder / "maps").read_text().splitlines()}
    return {path for path in found if path.startswith("/dev/shm/") and not path.endswith(" (deleted)")}
