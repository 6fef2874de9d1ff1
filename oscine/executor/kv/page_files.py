"""Files of KV pages: what a folder of them holds, and how a file is written, read and removed. See decision 24.

A file has a header in JSON, padded with spaces to HEADER_BYTES, and then its pages. It gets its name when it is
complete and is never changed. A file of another identity, or one that is cut or damaged, is removed when it is found.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES = 8192
MOST_PAGES = 64  # in a file: as many as a header has room for
_FORMAT = 1
_SUFFIX, _PART = ".pages", ".part"
_LOCK = "lock"
_SEED_BYTES = 16
_ROW = 64  # numbers of 8 bytes in a row of a checksum

Bytes = NDArray[np.uint8]
Key = tuple[int, bytes]  # group, and digest of the prefix that ends with the page


class FoundFile(NamedTuple):
    number: int
    num_bytes: int
    keys: list[Key]


class PageFileError(ValueError):
    """A file that is damaged, or of another identity."""


@dataclass(slots=True)
class _Place:
    """Where a page is in its file."""

    offset: int
    length: int
    checksum: int


@dataclass
class Leftovers:
    """Folders that earlier engines left behind, which no process has now; the oldest first."""

    folders: list[tuple[Path, int]] = field(default_factory=list)  # with their bytes

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.folders)

    def take_oldest(self) -> Callable[[], None]:
        """It counts no more. What is returned removes it, unless an engine has taken it meanwhile."""
        folder, _ = self.folders.pop(0)
        return partial(_remove_folder, folder)


def seed_of(folder: Path) -> str:
    """A random prefix seed, in hex, that stays the same as long as the folder exists. Raises ValueError."""
    path, drawn = folder / "seed", folder / f".seed-{secrets.token_hex(8)}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            with open(drawn, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(secrets.token_hex(_SEED_BYTES))
            with suppress(FileExistsError):  # another process was first
                os.link(drawn, path)
            drawn.unlink()
        seed = path.read_text()
    except OSError as error:
        raise ValueError(f"--kv-offload-dir: {error}") from None
    if len(seed) != 2 * _SEED_BYTES or not set(seed) <= set("0123456789abcdef"):
        raise ValueError(f"--kv-offload-dir: {path} holds no seed of {2 * _SEED_BYTES} hexadecimal digits; remove it")
    return seed


def file_bytes(lengths: Sequence[int]) -> int:
    """Of a file with pages of these lengths."""
    return HEADER_BYTES + sum(lengths)


class PageFiles:
    """The files of one engine. Holds a lock on their folder. Any thread may call; a file is removed by none that reads
    it."""

    def __init__(self, base: Path, identity: str) -> None:
        """Takes the first folder of this identity that no other engine has. Raises ValueError."""
        self._identity = identity
        self._places: dict[int, list[_Place]] = {}  # by number of the file
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.folder, self._lock = _take_folder(base / _short(identity))
        except OSError as error:
            raise ValueError(f"--kv-offload-dir: {error}") from None
        self.leftovers = Leftovers()
        self._base = base

    def scan(self) -> list[FoundFile]:
        """What earlier engines left for this one, the least recently used first. Removes what is of no use."""
        found: list[tuple[float, FoundFile]] = []
        for path in sorted(self.folder.iterdir()):
            if path.name == _LOCK:
                continue
            try:
                found.append((path.stat().st_mtime, self._open(path)))
            except (OSError, PageFileError):
                _remove(path)
        self.leftovers = _leftovers(self._base, self.folder)
        return [file for _, file in sorted(found)]

    def write(self, number: int, pages: Sequence[tuple[Key, Bytes]]) -> None:
        """Raises OSError, after which there is no such file."""
        places, rows, offset = [], [], HEADER_BYTES
        for (group, digest), data in pages:
            places.append(_Place(offset, len(data), checksum(data)))
            rows.append([group, digest.hex(), len(data), places[-1].checksum])
            offset += len(data)
        facts = {"format": _FORMAT, "identity": _short(self._identity), "checksum": _rows_checksum(rows), "pages": rows}
        header = json.dumps(facts).encode()
        assert len(header) <= HEADER_BYTES
        path = self._path(number)
        part = path.with_suffix(_PART)
        try:
            with open(part, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(header.ljust(HEADER_BYTES)))
                for _, data in pages:
                    _write_all(file.fileno(), data.data)
            part.rename(path)
        except OSError:
            _remove(part)
            raise
        self._places[number] = places

    def read(self, number: int, wanted: Sequence[tuple[int, Bytes]]) -> None:
        """Fills arrays with the pages at these positions of a file. Raises OSError or PageFileError."""
        path, places = self._path(number), self._places[number]
        with open(path, "rb", buffering=0) as file:
            for position, out in wanted:
                place = places[position]
                file.seek(place.offset)
                if _read_all(file.fileno(), out) != place.length or checksum(out) != place.checksum:
                    raise PageFileError(f"{path} is damaged")
        with suppress(OSError):
            os.utime(path)  # it is used now, for the next start

    def remove(self, number: int) -> None:
        self._places.pop(number, None)
        _remove(self._path(number))

    def close(self) -> None:
        os.close(self._lock)

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:016d}{_SUFFIX}"

    def _open(self, path: Path) -> FoundFile:
        """Raises OSError or PageFileError."""
        if path.suffix != _SUFFIX or not path.stem.isdecimal():
            raise PageFileError(f"{path} was not completed")
        with open(path, "rb") as file:
            head = file.read(HEADER_BYTES)
        try:
            header = json.loads(head)
            if (header["format"], header["identity"]) != (_FORMAT, _short(self._identity)):
                raise PageFileError(f"{path} is of another model")
            if header["checksum"] != _rows_checksum(header["pages"]):
                raise PageFileError(f"{path} is damaged")
            keys, places = _read_rows(header["pages"])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PageFileError(f"{path} is damaged: {error}") from None
        size = file_bytes([place.length for place in places])
        if path.stat().st_size != size:
            raise PageFileError(f"{path} is cut")
        number = int(path.stem)
        self._places[number] = places
        return FoundFile(number, size, keys)


def checksum(data: Bytes) -> int:
    """Of the sums of rows and of columns, which take a tenth of the time that CRC-32 of all bytes takes."""
    whole = len(data) // (8 * _ROW) * (8 * _ROW)
    rows_NR = data[:whole].view(np.uint64).reshape(-1, _ROW)
    value = zlib.crc32(data[whole:].data)
    for axis in (0, 1):
        value = zlib.crc32(rows_NR.sum(axis, dtype=np.uint64).data, value)
    return value


def _rows_checksum(rows: list[list[Any]]) -> int:
    return zlib.crc32(json.dumps(rows).encode())


def _read_rows(rows: list[list[Any]]) -> tuple[list[Key], list[_Place]]:
    keys, places, offset = [], [], HEADER_BYTES
    for group, digest, length, found in rows:
        keys.append((int(group), bytes.fromhex(digest)))
        places.append(_Place(offset, int(length), int(found)))
        offset += int(length)
    return keys, places


def _short(identity: str) -> str:
    return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


def _take_folder(parent: Path) -> tuple[Path, int]:
    number = 0
    while True:
        folder = parent / str(number)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = _locked(folder)
        if lock is not None:
            return folder, lock
        number += 1


def _locked(folder: Path) -> int | None:
    """The descriptor of the folder's lock; None if another process has it. The kernel frees it with the process."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    if not os.fstat(lock).st_nlink:  # the folder was removed meanwhile
        os.close(lock)
        return None
    return lock


def _leftovers(base: Path, own: Path) -> Leftovers:
    found = []
    for folder in base.glob("*/*"):
        lock = None
        with suppress(OSError):  # it belongs to another user
            lock = None if folder == own or not (folder / _LOCK).exists() else _locked(folder)
        if lock is not None:
            sizes = [entry.stat().st_size for entry in folder.iterdir()]
            found.append((folder.stat().st_mtime, folder, sum(sizes)))
            os.close(lock)
    return Leftovers([(folder, size) for _, folder, size in sorted(found)])


def _remove_folder(folder: Path) -> None:
    lock = _locked(folder)
    if lock is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _write_all(descriptor: int, left: memoryview) -> None:
    while len(left):
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int, out: Bytes) -> int:
    """Returns the number of bytes; fewer than asked for at the end of the file."""
    left = out.data
    while len(left) and (count := os.readv(descriptor, [left])):
        left = left[count:]
    return len(out) - len(left)
