"""The control groups of this process, read from Linux's /proc and /sys."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Hierarchy(NamedTuple):
    """Where the limits of a controller are, in version 2 of control groups or in version 1."""

    folder: str
    names: tuple[str, ...]  # of the files and keys with the limits


def groups_of(root: Path, controller: str, v2: Hierarchy, v1: Hierarchy) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """The folder of each group that bounds the process, from its own to the outermost, with the names of the hierarchy.

    `root`: the folder with proc and sys.
    """
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and controller not in controllers.split(","):
            continue
        folder, names = v2 if number == "0" else v1
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):  # a container often shows its own group as the outermost
            yield root.joinpath(folder, *parts[:depth]), names


def text_of(path: Path) -> str:
    """Empty if the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
