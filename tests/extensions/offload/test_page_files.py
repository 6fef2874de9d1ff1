"""Files of KV pages: what is written is read, anything else is found out, and no two engines share a folder."""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from oscine.extensions.offload import page_files
from oscine.extensions.offload.page_files import (
    HEADER_BYTES,
    MAX_PAGES,
    Bytes,
    Key,
    PageFileError,
    PageFiles,
    checksum,
    file_bytes,
    seed_of,
)


def pages(count: int, size: int = 3000) -> list[tuple[Key, Bytes]]:
    rng = np.random.default_rng(count)
    return [((i % 2, rng.bytes(16)), rng.integers(0, 256, size + i, np.uint8)) for i in range(count)]


def read(files: PageFiles, number: int, written: list[tuple[Key, Bytes]], positions: list[int]) -> list[Bytes]:
    out = [np.empty(len(written[i][1]), np.uint8) for i in positions]
    files.read(number, list(zip(positions, out, strict=True)))
    return out


def test_pages_are_read_as_they_were_written_also_by_the_next_engine(tmp_path: Path) -> None:
    files, written = PageFiles(tmp_path, "m"), pages(MAX_PAGES)
    assert files.scan() == []
    files.write(7, written)
    size = file_bytes([len(data) for _, data in written])
    [path] = files.folder.glob("*.pages")
    assert path.stat().st_size == size
    positions = [MAX_PAGES - 1, 0, 5]
    for _ in range(2):
        for i, out in zip(positions, read(files, 7, written, positions), strict=True):
            assert (out == written[i][1]).all()
        files.close()
        files = PageFiles(tmp_path, "m")
        assert files.scan() == [(7, size, [key for key, _ in written])]


@pytest.mark.parametrize("place", [HEADER_BYTES, HEADER_BYTES + 1500, -1])
def test_one_wrong_bit_is_found(tmp_path: Path, place: int) -> None:
    files, written = PageFiles(tmp_path, "m"), pages(1)
    files.write(1, written)
    [path] = files.folder.glob("*.pages")
    data = bytearray(path.read_bytes())
    data[place] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(PageFileError, match="is damaged"):
        read(files, 1, written, [0])


def test_checksums_see_bytes_that_change_move_or_are_missing() -> None:
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    moved = np.concatenate((data[512:1024], data[:512], data[1024:]))
    rolled = np.roll(data, 8)
    zeroed = data.copy()
    zeroed[1024:2048] = 0
    found = {checksum(some) for some in (data, moved, rolled, zeroed, data[:-1], np.append(data, np.uint8(0)))}
    assert len(found) == 6


def test_engines_do_not_share_a_folder_and_a_new_one_takes_that_of_one_that_is_gone(tmp_path: Path) -> None:
    first, second, other = PageFiles(tmp_path, "m"), PageFiles(tmp_path, "m"), PageFiles(tmp_path, "n")
    assert len({first.folder, second.folder, other.folder}) == 3
    assert first.folder.parent == second.folder.parent != other.folder.parent
    first.close()
    assert PageFiles(tmp_path, "m").folder == first.folder
    assert stat.S_IMODE(first.folder.stat().st_mode) == 0o700


def test_folders_that_no_engine_has_are_leftovers_until_one_takes_them(tmp_path: Path) -> None:
    for identity in ("old", "older"):
        gone = PageFiles(tmp_path, identity)
        gone.write(1, pages(3))
        gone.close()
    files = PageFiles(tmp_path, "m")
    files.scan()
    assert files.leftovers.num_bytes == 2 * file_bytes([3000, 3001, 3002])
    first, _ = files.leftovers.folders[0]
    taken = PageFiles(tmp_path, "old" if first.parent == gone.folder.parent else "older")
    assert taken.folder != first
    removals = [files.leftovers.take_oldest() for _ in range(2)]
    assert files.leftovers.num_bytes == 0
    for remove in removals:
        remove()
    assert not first.exists()
    assert taken.folder.exists()


def test_a_seed_stays_and_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    seed = seed_of(folder)
    assert seed_of(folder) == seed != seed_of(tmp_path / "another")
    assert os.listdir(folder) == ["seed"]
    assert stat.S_IMODE((folder / "seed").stat().st_mode) == 0o600
    (folder / "seed").write_text("mine")
    with pytest.raises(ValueError, match=r"--kv-offload-dir: .* holds no seed of 32 hexadecimal digits"):
        seed_of(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--kv-offload-dir: "):
        seed_of(tmp_path / "file")
    with pytest.raises(ValueError, match="--kv-offload-dir: "):
        PageFiles(tmp_path / "file", "m")


def test_a_wrong_bit_in_a_header_is_found(tmp_path: Path) -> None:
    """It would give a page to another group, or to another prefix."""
    files = PageFiles(tmp_path, "m")
    files.write(1, pages(1))
    [path] = files.folder.glob("*.pages")
    data = path.read_bytes()
    assert data.count(b'"pages": [[0, ') == 1
    path.write_bytes(data.replace(b'"pages": [[0, ', b'"pages": [[1, '))
    assert files.scan() == []
    assert not path.exists()


def test_a_folder_that_is_removed_while_it_is_locked_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, folders = fcntl.flock, list[Path]()

    def slow(descriptor: int, operation: int) -> None:
        if not folders:
            folders.extend(tmp_path.glob("*/0"))
            shutil.rmtree(folders[0])
        lock(descriptor, operation)

    monkeypatch.setattr("oscine.system.owned_folder.fcntl.flock", slow)
    files = PageFiles(tmp_path, "m")
    assert len(folders) == 1
    files.write(1, pages(1))
    assert len(files.scan()) == 1


def test_folders_that_cannot_be_locked_are_left_alone(tmp_path: Path) -> None:
    theirs = tmp_path / "another" / "0" / "lock"
    theirs.mkdir(parents=True)
    files = PageFiles(tmp_path, "m")
    assert files.scan() == []
    assert files.leftovers.folders == []
    assert theirs.exists()


def gone(folder: Path, identity: str = "old", count: int = 1) -> Path:
    """The folder of an engine that wrote and ended."""
    files = PageFiles(folder, identity)
    files.write(1, pages(count))
    files.close()
    return files.folder


def test_folders_of_other_programs_are_never_removed(tmp_path: Path) -> None:
    """They may look like ours: an empty lock, the right depth, the right names."""
    left = gone(tmp_path)
    for folder in (tmp_path / "project" / "0", left.parent / "7", tmp_path / ("0" * 32) / "0"):
        (folder / "deep").mkdir(parents=True)
        (folder / "lock").touch()
        (folder / "0000000000000001.pages").write_bytes(b"x" * 1000)
    (left.parent / "8").symlink_to(tmp_path / "project" / "0")
    (tmp_path / ("1" * 32)).symlink_to(left.parent)
    before = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(left))
    files = PageFiles(tmp_path, "m")
    files.scan()
    assert files.leftovers.folders == [(left, file_bytes([3000]))]
    files.leftovers.take_oldest()()
    assert not left.exists()
    after = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(files.folder.parent))
    assert after == before


def test_a_file_that_an_engine_did_not_write_stays_and_keeps_the_folder(tmp_path: Path) -> None:
    left, outside, said = gone(tmp_path), tmp_path / "outside", list[str]()
    outside.write_text("kept")
    (left / "0000000000000002.pages").symlink_to(outside)
    (left / "thesis.txt").touch()
    files = PageFiles(tmp_path, "m", said.append)
    files.scan()
    files.leftovers.take_oldest()()
    assert sorted(os.listdir(left)) == ["0000000000000002.pages", "lock", "thesis.txt"]
    assert outside.read_text() == "kept"
    assert said == [f"{left} is kept: '0000000000000002.pages' in it was not made by Oscine"]


def test_bad_files_are_left_out_with_one_line_and_the_others_are_used(tmp_path: Path) -> None:
    folder, said = gone(tmp_path, "m"), list[str]()
    header = (b'{"format": 1, "identity": ' + b"[" * 8000, b"[" * HEADER_BYTES, b"\xff\xfe", b"", b"{}", b"null")
    for number, data in enumerate(header, 2):
        (folder / f"{number:016d}.pages").write_bytes(data)
    os.mkfifo(folder / "0000000000000020.pages")
    (folder / "0000000000000021.pages").symlink_to("nowhere")
    (folder / "0000000000000022.pages").symlink_to("/dev/zero")
    (folder / "0000000000000023.pages").mkdir()
    (folder / "0000000000000024.part").touch()
    (folder / "notes").touch()
    files = PageFiles(tmp_path, "m", said.append)
    assert [file.number for file in files.scan()] == [1]
    assert len(said) == 1
    assert said[0].startswith(f"KV offload: files in {folder} are left out: 0000000000000002.pages is damaged: ")
    assert said[0].endswith(" (and 9 more)")
    kept = [f"00000000000000{number}.pages" for number in (20, 21, 22, 23)]
    assert sorted(os.listdir(folder)) == ["0000000000000001.pages", *kept, "lock", "notes"]
    assert files.next_number == 25
    files.write(25, pages(1))
    files.close()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.EIO])
def test_without_locks_the_start_ends_and_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def none(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(ValueError, match=rf"--kv-offload-dir: {tmp_path}: .*{os.strerror(number)}"):
        PageFiles(tmp_path, "m")
    [identity] = tmp_path.iterdir()
    assert os.listdir(identity) == []


def test_the_search_for_a_free_folder_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_files, "_MAX_ENGINES", 2)
    first, second = PageFiles(tmp_path, "m"), PageFiles(tmp_path, "m")
    with pytest.raises(ValueError, match=r"--kv-offload-dir: .* no folder that is free: all 2 are in use"):
        PageFiles(tmp_path, "m")
    for files in (first, second):
        files.close()


def test_a_shared_folder_that_every_user_may_change_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for use in (seed_of, lambda folder: PageFiles(folder, "m")):
        with pytest.raises(ValueError, match=rf"--kv-offload-dir: every user may write to {tmp_path}/open"):
            use(tmp_path / "open")
    seed_of(tmp_path / "open" / "own")


def test_a_shared_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    if user == 0:  # root's folders are trusted, but those below are of the engine's user
        with pytest.raises(ValueError, match=r"--kv-offload-dir: .* belongs to another user \(0\)"):
            PageFiles(tmp_path, "m")
    else:
        with pytest.raises(ValueError, match=rf"--kv-offload-dir: {tmp_path} belongs to another user \({user}\)"):
            seed_of(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_a_seed_that_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "seed")
    with pytest.raises(ValueError, match=r"--kv-offload-dir: .*seed"):
        seed_of(tmp_path)
