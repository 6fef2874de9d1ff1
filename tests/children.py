"""Processes below one, found by what they run."""

from contextlib import suppress

import psutil


def children(word: str, parent: psutil.Process | None = None) -> list[psutil.Process]:
    """All below `parent`, which is this process by default, with this word in the command line.

    A process that ends meanwhile has no command line any more.
    """
    found = []
    for child in (parent or psutil.Process()).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if word in " ".join(child.cmdline()):
                found.append(child)
    return found
