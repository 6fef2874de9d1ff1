"""The cores that a process may use, from a /proc and a /sys of our own."""

from pathlib import Path

import pytest

from oscine.system.cores import default_threads, usable_cores


def machine(root: Path, num_cpus: int, threads_per_core: int) -> Path:
    for cpu in range(num_cpus):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        core = cpu % (num_cpus // threads_per_core)
        siblings = range(core, num_cpus, num_cpus // threads_per_core)
        (folder / "thread_siblings_list").write_text(f"{','.join(map(str, siblings))}\n")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("threads_per_core", "cpus", "cores"), [(1, 8, 8), (2, 8, 4), (2, 3, 3), (2, 1, 1)])
def test_hyperthreads_of_a_core_count_once(threads_per_core: int, cpus: int, cores: int, tmp_path: Path) -> None:
    assert usable_cores(machine(tmp_path, 8, threads_per_core), range(cpus)) == cores


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8), ("250000 100000", 3), ("1000 100000", 1)])
def test_a_control_group_bounds_them(quota: str, cores: int, tmp_path: Path) -> None:
    root = machine(tmp_path, 8, 1)
    write(root / "proc/self/cgroup", "0::/pod/container\n")
    write(root / "sys/fs/cgroup/pod/cpu.max", f"{quota}\n")
    assert usable_cores(root, range(8)) == cores


def test_a_control_group_of_version_1(tmp_path: Path) -> None:
    root = machine(tmp_path, 8, 1)
    write(root / "proc/self/cgroup", "4:cpu,cpuacct:/pod\n")
    write(root / "sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "200000\n")
    write(root / "sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n")
    assert usable_cores(root, range(8)) == 2


def test_a_machine_without_proc_and_sys(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, range(4)) == 4


@pytest.mark.parametrize(("given", "threads"), [("3", 3), (" 4,2", 4), ("", 5), ("all", 5), ("0", 5), (None, 5)])
def test_the_environment_says_how_many_threads_there_are(
    given: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscine.system.cores.usable_cores", lambda: 5)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    assert default_threads() == threads
