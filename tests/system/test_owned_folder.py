"""Only marked folders are emptied, by the names of this program's files, and nothing is reached through a link."""

import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from oscine.system.owned_folder import (
    MARK,
    Kind,
    OwnedFolder,
    complete_file,
    make_temporary,
    open_below,
    open_file,
    open_folder,
    remove_parts,
    temporary_home,
)

DATA, WASTE = Kind("data", re.compile(r"[0-9]+\.data")), Kind("waste", None)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    folder = open_folder(path)
    try:
        yield folder
    finally:
        os.close(folder)


def made(path: Path, kind: Kind = DATA) -> OwnedFolder:
    with opened(path.parent) as parent:
        found = OwnedFolder.make(kind, parent, path)
    assert found is not None
    return found


def found(path: Path, kind: Kind = DATA) -> OwnedFolder | None:
    with opened(path.parent) as parent:
        return OwnedFolder.find(kind, parent, path)


def left(path: Path, kind: Kind = DATA) -> Path:
    """A folder whose owner is gone."""
    made(path, kind).close()
    return path


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_folder_is_found_when_its_owner_is_gone_and_not_before(tmp_path: Path) -> None:
    first = made(tmp_path / "a")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert found(tmp_path / "a") is None
    first.close()
    assert found(tmp_path / "a", WASTE) is None
    second = found(tmp_path / "a")
    assert second is not None
    assert second.path == tmp_path / "a"
    with opened(tmp_path) as parent:
        assert OwnedFolder.make(DATA, parent, tmp_path / "a") is None


@pytest.mark.parametrize("text", [b"", b"This folder was made by Oscine: dat", b"x" * 1000, None])
def test_a_folder_with_a_file_of_the_marks_name_is_not_ours(tmp_path: Path, text: bytes | None) -> None:
    path = tmp_path / "a"
    path.mkdir()
    if text is None:
        os.mkfifo(path / MARK)
    else:
        (path / MARK).write_bytes(text)
    assert found(path) is None


def test_links_are_not_ours_whatever_they_lead_to(tmp_path: Path) -> None:
    path = left(tmp_path / "a")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / MARK).symlink_to(path / MARK)
    assert found(tmp_path / "b") is None
    assert found(tmp_path / "c") is None


def test_what_another_user_has_made_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = left(tmp_path / "a")
    user = os.geteuid()
    with opened(tmp_path) as parent:
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
        assert OwnedFolder.find(DATA, parent, path) is None
        with pytest.raises(
            PermissionError, match=rf"a belongs to another user \({user}\): .*a local one if NFS maps users"
        ):
            open_below(parent, "a", path)


def test_only_files_with_names_of_the_program_are_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_text("kept")
    path, said = left(tmp_path / "a"), list[str]()
    for name in ("1.data", "22.data", "notes.txt"):
        (path / name).write_text(name)
    (path / "3.data").symlink_to(outside)
    (path / "4.data").mkdir()
    (path / "4.data" / "1.data").touch()
    again = found(path)
    assert again is not None
    assert again.num_bytes == len("1.data22.data")
    again.remove(said.append)
    assert sorted(os.listdir(path)) == ["3.data", "4.data", MARK, "notes.txt"]
    assert os.listdir(path / "4.data") == ["1.data"]
    assert outside.read_text() == "kept"
    assert said == [f"{path} is kept: '3.data' in it was not made by Oscine"]
    (path / "3.data").unlink()
    (path / "4.data" / "1.data").unlink()
    (path / "4.data").rmdir()
    (path / "notes.txt").unlink()
    again = found(path)
    assert again is not None
    again.remove(said.append)
    assert not path.exists()
    assert len(said) == 1


def test_waste_is_removed_as_a_whole_and_links_in_it_lead_nowhere(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", left(tmp_path / "a", WASTE)
    outside.mkdir()
    (outside / "kept").touch()
    (path / "below").mkdir()
    (path / "link").symlink_to(outside)
    (path / "below" / "link").symlink_to(outside)
    again = found(path, WASTE)
    assert again is not None
    again.remove()
    assert not path.exists()
    assert os.listdir(outside) == ["kept"]


def test_a_folder_that_is_removed_between_its_opening_and_its_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, lock = left(tmp_path / "a"), fcntl.flock

    def slow(descriptor: int, operation: int) -> None:
        (path / MARK).unlink()
        path.rmdir()
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", slow)
    assert found(path) is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_a_file_system_without_locks_is_an_error_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = left(tmp_path / "a")

    def none(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(OSError, match=os.strerror(number)):
        found(path)
    with pytest.raises(OSError, match=os.strerror(number)):
        made(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    with opened(tmp_path) as folder, complete_file(folder, "file") as file:
        file.write(b"whole")
    assert (tmp_path / "file").read_bytes() == b"whole"


# ---- folders and files that others cannot change ----


@pytest.mark.parametrize(("mode", "accepted"), [(0o700, True), (0o775, True), (0o1777, True), (0o777, False)])
def test_a_folder_that_every_user_may_change_is_refused(tmp_path: Path, mode: int, accepted: bool) -> None:
    path = tmp_path / "a"
    path.mkdir()
    path.chmod(mode)
    if accepted:
        os.close(open_folder(path))
    else:
        with pytest.raises(PermissionError, match=f"every user may write to {path} "):
            open_folder(path)
        os.close(open_folder(path / "below"))


def test_a_volume_may_be_open_to_every_user_but_no_folder_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kubernetes makes an emptyDir with mode 0777."""
    monkeypatch.setattr(os.path, "ismount", lambda path: path == str(tmp_path))
    tmp_path.chmod(0o777)
    (tmp_path / "a").mkdir()
    (tmp_path / "a").chmod(0o777)
    with opened(tmp_path) as folder:
        for use in (lambda: open_folder(tmp_path / "a"), lambda: open_below(folder, "a", tmp_path / "a")):
            with pytest.raises(PermissionError, match=f"every user may write to {tmp_path}/a "):
                use()


def test_links_in_a_path_that_was_given_are_followed_and_the_folder_behind_them_is_judged(tmp_path: Path) -> None:
    (tmp_path / "private").mkdir()
    (tmp_path / "cache").symlink_to("private")
    os.close(open_folder(tmp_path / "cache"))
    os.close(open_folder(tmp_path / "cache" / "below" / "deep"))
    assert (tmp_path / "private" / "below" / "deep").is_dir()
    (tmp_path / "private").chmod(0o777)
    with pytest.raises(PermissionError, match=f"every user may write to {tmp_path}/private"):
        open_folder(tmp_path / "cache")
    with opened(tmp_path) as folder, pytest.raises(OSError, match="cache"):
        open_below(folder, "cache", tmp_path / "cache")


def test_a_link_that_another_user_planted_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").symlink_to(tmp_path)
    lstat = os.lstat

    def planted(path: Path) -> os.stat_result:
        found = lstat(path)
        return os.stat_result((*found[:4], os.geteuid() + 1, *found[5:]))

    monkeypatch.setattr(os, "lstat", planted)
    with pytest.raises(PermissionError, match=f"{tmp_path}/cache is a link of another user"):
        open_folder(tmp_path / "cache")


def test_what_is_no_file_of_this_user_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "open").touch()
    (tmp_path / "open").chmod(0o666)
    with opened(tmp_path) as folder:
        os.close(open_file(folder, "file"))
        for name in ("pipe", "folder", "link", "open", "missing"):
            with pytest.raises(OSError, match=name):
                open_file(folder, name)


def test_a_file_has_its_name_only_when_it_is_complete(tmp_path: Path) -> None:
    def fail(folder: int) -> None:
        with complete_file(folder, "a") as file:
            file.write(b"half")
            [part] = os.listdir(tmp_path)
            remove_parts(folder)  # as another process at its start
            assert os.listdir(tmp_path) == [part] != ["a"]
            raise ZeroDivisionError

    with opened(tmp_path) as folder:
        with pytest.raises(ZeroDivisionError):
            fail(folder)
        assert os.listdir(tmp_path) == []
        with complete_file(folder, "a") as file:
            file.write(b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_parts_of_processes_that_are_gone_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("a.01234567.part", "a.part", "a.0123456.part", "b"):
        (tmp_path / name).touch()
    (tmp_path / "c.01234567.part").symlink_to("b")
    (tmp_path / "d.01234567.part").mkdir()
    with opened(tmp_path) as folder:
        remove_parts(folder)
    kept = ["a.0123456.part", "a.part", "b", "c.01234567.part", "d.01234567.part"]
    assert sorted(os.listdir(tmp_path)) == kept


# ---- the temporary folder ----


def test_a_temporary_folder_ends_with_its_owner_or_at_the_next_start(temporary: Path) -> None:
    gone, living = make_temporary(DATA), make_temporary(DATA)
    (gone.path / "1.data").touch()
    gone.close()
    (temporary / "oscine-data-00000000").mkdir()  # of another program
    other = make_temporary(WASTE)
    assert gone.path.exists()
    assert make_temporary(DATA).path.exists()
    assert not gone.path.exists()
    assert living.path.exists()
    assert other.path.exists()
    assert (temporary / "oscine-data-00000000").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_temporary_folder_needs_no_locks_and_says_what_is_lost(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", none)
        first = make_temporary(DATA, said.append)
        second = make_temporary(DATA, said.append)
        with pytest.raises(OSError, match=rf"{os.strerror(number)}; TMPDIR names another place"):
            make_temporary(DATA, said.append, needs_lock=True)
    assert said == [f"{temporary} has no file locks, so what a killed process leaves in it stays"]
    assert sorted(os.listdir(temporary)) == sorted([first.path.name, second.path.name])
    with opened(temporary) as parent:  # locks work again, or do so in another container
        assert OwnedFolder.find(DATA, parent, first.path) is None
    for made in (first, second):
        (made.path / "1.data").touch()
        made.remove(said.append)
    assert os.listdir(temporary) == []


def test_a_temporary_folder_need_not_be_listed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with mode 1733. Root may list any folder, so the system call is replaced."""
    temporary.chmod(0o1733)
    real, said = os.open, list[str]()

    def forbidden(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if Path(path) == temporary and not flags & os.O_PATH:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", forbidden)
    for _ in range(2):
        made = make_temporary(DATA, said.append)
        (made.path / "1.data").touch()
        made.remove(said.append)
    assert said == [f"{temporary} cannot be listed, so what a killed process leaves in it stays"]
    assert temporary_home() == temporary_home() == temporary / f"oscine-{os.geteuid()}"
    temporary.chmod(0o700)
    assert os.listdir(temporary) == [f"oscine-{os.geteuid()}"]


def test_without_room_the_message_names_the_variable(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match=r"No space left on device; TMPDIR names another place"):
        make_temporary(DATA)


def test_the_home_in_the_temporary_folder_stays_also_if_another_user_took_the_name(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = temporary_home()
    assert first == temporary / f"oscine-{os.geteuid()}" == temporary_home()
    first.rmdir()
    first.symlink_to("/etc")
    second = temporary_home()
    assert second != first
    assert re.fullmatch(rf"oscine-{os.geteuid()}-[0-9a-f]{{8}}", second.name)
    assert temporary_home() == second


def test_a_folder_that_cannot_be_emptied_is_said_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that a model wrote may leave more nested folders than can be removed. The next run goes on."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    said: list[str] = []
    waste = make_temporary(Kind("waste", None), said.append)
    (waste.path / "nested").mkdir()

    def too_deep(name: str, dir_fd: int) -> None:
        raise RecursionError("nested too deeply")

    monkeypatch.setattr(shutil, "rmtree", too_deep)
    waste.remove(said.append)
    assert said == [f"{waste.path} is kept: nested too deeply"]
    make_temporary(Kind("waste", None), said.append).remove(said.append)
    assert said == 2 * said[:1]
    assert [path.name for path in tmp_path.iterdir()] == [waste.path.name]
