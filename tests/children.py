"""Descendants of a process, found by their command lines."""

from contextlib import suppress

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
