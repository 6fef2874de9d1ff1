"""The number of physical cores that this process may use, by its CPU affinity and its control groups.

Read from Linux's /proc and /sys. And the number of threads that follows.
"""

import os
from collections.abc import Collection, Iterator
from math import ceil
from pathlib import Path

from oscine.system.control_groups import Hierarchy, groups_of, text_of
from oscine.system.environment import Environment

_V2 = Hierarchy("sys/fs/cgroup", ("cpu.max",))  # microseconds per period, and the period
_V1 = Hierarchy("sys/fs/cgroup/cpu", ("cpu.cfs_quota_us", "cpu.cfs_period_us"))


def default_threads() -> int:
    """The first number in OMP_NUM_THREADS, or else the usable cores."""
    return _given_threads() or usable_cores()


def _given_threads() -> int:
    """0 if the variable is not set, or has no such number."""
    first = (Environment().omp_num_threads or "").partition(",")[0].strip()
    return int(first) if first.isdecimal() else 0


def usable_cores(root: Path = Path("/"), cpus: Collection[int] | None = None) -> int:
    """At least 1. `root`: the folder with proc and sys. `cpus`: numbers of logical CPUs; None: the affinity's."""
    cpus = os.sched_getaffinity(0) if cpus is None else cpus
    cores = {_siblings(root, cpu) for cpu in cpus}
    return max(1, min([len(cores), *_quotas(root)]))


def _siblings(root: Path, cpu: int) -> str:
    """Identifies the physical core of a logical CPU, by the list of its hyperthreads."""
    return text_of(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _quotas(root: Path) -> Iterator[int]:
    """The CPU quota of each control group of this process, in cores, rounded up."""
    for group, names in groups_of(root, "cpu", _V2, _V1):
        words = " ".join(text_of(group / name) for name in names).split()
        if len(words) == 2 and all(word.isdigit() for word in words):
            yield max(1, ceil(int(words[0]) / int(words[1])))
