"""The number of physical cores that this process may use, by its CPU affinity and its control groups.

Read from Linux's /proc and /sys.
"""

import os
from collections.abc import Collection, Iterator
from math import ceil
from pathlib import Path

_QUOTA = "sys/fs/cgroup", "cpu.max"  # version 2: microseconds per period, and the period
_QUOTA_V1 = "sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """At least 1. `root`: the folder with proc and sys. `cpus`: numbers of logical CPUs; None: the affinity's."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    cores = {_siblings(root, cpu) for cpu in cpus}
    return max(1, min([len(cores), *_quotas(root)]))


def _siblings(root: Path, cpu: int) -> str:
    """Identifies the physical core of a logical CPU, by the list of its hyperthreads."""
    return _text(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _quotas(root: Path) -> Iterator[int]:
    """The CPU quota of each control group of this process, in cores, rounded up."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number != "0" and "cpu" not in controllers.split(","):
            continue
        folder, *names = _QUOTA if number == "0" else _QUOTA_V1
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):  # a container often shows its own group as the outermost
            group = root.joinpath(folder, *parts[:depth])
            words = " ".join(_text(group / name) for name in names).split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                yield max(1, ceil(int(words[0]) / int(words[1])))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
