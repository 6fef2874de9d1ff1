"""Bytes of main memory that this process may still take: the free memory, bounded by its control groups.

Read from Linux's /proc and /sys.
"""

from collections.abc import Iterator
from pathlib import Path

from oscine.system.control_groups import Hierarchy, groups_of, text_of

# Limit, usage, and the reclaimable part of the usage.
_V2 = Hierarchy("sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file"))
_V1 = Hierarchy("sys/fs/cgroup/memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes, or None if the system does not say. `root`: the folder with proc and sys."""
    machine = _table(root / "proc/meminfo").get("MemAvailable:")
    found = [] if machine is None else [machine * 1024]
    found += _left_by_groups(root)
    return min(found, default=None)


def _left_by_groups(root: Path) -> Iterator[int]:
    """The bytes left of each control group of this process, from its own to the outermost."""
    for group, names in groups_of(root, "memory", _V2, _V1):
        left = _left(group, *names)
        if left is not None:
            yield left


def _left(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    allowed, used = text_of(group / limit).strip(), text_of(group / usage).strip()
    if not (allowed.isdigit() and used.isdigit()):  # no such group, or "max"
        return None
    return max(int(allowed) - int(used) + _table(group / "memory.stat").get(reclaimable, 0), 0)


def _table(path: Path) -> dict[str, int]:
    """The numbers by name, from lines of a name and a number."""
    rows = (line.split() for line in text_of(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
