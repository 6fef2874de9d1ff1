"""The notes about a Ray of this machine, with several commands at once. Sleeping processes stand in for Ray."""

import fcntl
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oscine.extensions.cluster.ray.local import ClusterError, LocalRay, alone, require_private
from oscine.system.owned_folder import Kind, make_temporary

Start = Callable[[], LocalRay]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts what looks as a Ray does from outside: a process that holds the lock in its folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes: list[subprocess.Popen[bytes]] = []

    def start() -> LocalRay:
        folder = make_temporary(Kind("ray", None))
        processes.append(subprocess.Popen(["sleep", "99"], pass_fds=[folder.lock]))
        (folder.path / "ray" / "session").mkdir(parents=True)
        folder.close()
        return LocalRay("127.0.0.1:1", processes[-1].pid, str(folder.path), 2)

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


def test_a_note_that_names_another_folder_removes_nothing(tmp_path: Path) -> None:
    note, home = tmp_path / "cluster.json", tmp_path / "home"
    (home / "ray").mkdir(parents=True)
    (home / "lock").touch()
    LocalRay("127.0.0.1:1", 1, str(home), 2).save(note)
    assert LocalRay.load(note) is None
    assert sorted(path.name for path in home.iterdir()) == ["lock", "ray"]


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
