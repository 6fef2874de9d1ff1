"""Files of KV pages: what is written is read, anything else is found out, and no two engines share a folder."""

import fcntl
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from oscine.executor.kv.page_files import (
    HEADER_BYTES,
    MOST_PAGES,
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
    files, written = PageFiles(tmp_path, "m"), pages(MOST_PAGES)
    assert files.scan() == []
    files.write(7, written)
    size = file_bytes([len(data) for _, data in written])
    [path] = files.folder.glob("*.pages")
    assert path.stat().st_size == size
    positions = [MOST_PAGES - 1, 0, 5]
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

    monkeypatch.setattr("oscine.executor.kv.page_files.fcntl.flock", slow)
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
