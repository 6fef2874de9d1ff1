"""The notes about a Ray of this machine, with several commands at once. Sleeping processes stand in for Ray."""

import fcntl
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oscine.cluster.ray.local import ClusterError, LocalRay, alone, require_private

HOLD = """
import fcntl, sys, time
with open(sys.argv[1], "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print(flush=True)
    time.sleep(99)
"""
Start = Callable[[], LocalRay]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts what looks as a Ray does from outside: a process that holds the lock in its folder."""
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> LocalRay:
        folder = tmp_path / f"ray-{len(processes)}"
        folder.mkdir()
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder / "lock")], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return LocalRay("127.0.0.1:1", process.pid, str(folder), 2)

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_what_runs_is_found_and_ended(tmp_path: Path, start: Start) -> None:
    note, ray = tmp_path / "state" / "cluster.json", start()
    with alone(note):
        ray.save(note)
        assert LocalRay.load(note) == ray
        ray.end(note)
        assert LocalRay.load(note) is None
    assert not ray.alive
    assert not Path(ray.folder).exists()


def test_the_end_of_one_leaves_the_note_of_its_successor(tmp_path: Path, start: Start) -> None:
    note, first, second = tmp_path / "cluster.json", start(), start()
    second.save(note)
    first.end(note)
    assert LocalRay.load(note) == second


def test_one_process_at_a_time(tmp_path: Path) -> None:
    """So two that find no Ray do not start one each."""
    note = tmp_path / "cluster.json"
    with alone(note), note.with_suffix(".lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with note.with_suffix(".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("opened", ["", "token"])
def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path, opened: str) -> None:
    folder = tmp_path / "ray"
    folder.mkdir(mode=0o700)
    (folder / "token").touch(mode=0o600)
    require_private(folder)
    (folder / opened).chmod(0o755)
    with pytest.raises(ClusterError, match="open to other users"):
        require_private(folder)
