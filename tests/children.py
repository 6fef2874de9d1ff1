"""Descendants of a process, found by their command lines; what processes keep in /dev/shm, and say to a terminal."""

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


def said_to(terminal: int) -> str:
    """All that was written to the other end of this one of pty.openpty, which has been closed. Closes this one.

    One read may return a part of it.
    """
    pieces = []
    with open(terminal, "rb", buffering=0) as reader, suppress(OSError):  # the end is an error: EIO
        while piece := reader.read(65536):
            pieces.append(piece)
    return b"".join(pieces).decode()
