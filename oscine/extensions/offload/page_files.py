"""Files of KV pages: what a folder of them holds, and how a file is written, read and removed. See decision 24.

A file has a header in JSON, padded with spaces to HEADER_BYTES, and then its pages. It gets its name when it is
complete and is never changed. A file of another identity, or one that is cut or damaged, is removed when it is found.
What Oscine did not make is left alone: see oscine/system/owned_folder.py.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from oscine.system.owned_folder import Kind, OwnedFolder, Report, open_below, open_file, open_folder, opened, say

HEADER_BYTES = 8192
MAX_PAGES = 64  # in a file: as many as a header has room for
_FORMAT = 1
_SUFFIX, _PART = ".pages", ".part"
_NAMES = re.compile(r"0[0-9]{15}\.(pages|part)")  # less than 16 digits, so that there is always a next one
_KIND = Kind("kv-pages", _NAMES)
_MALFORMED = ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError
_IDENTITY, _NUMBER = re.compile("[0-9a-f]{32}"), re.compile("[0-9]{1,4}")
_MAX_ENGINES = 1024  # of one identity
_SEED, _SEED_BYTES = "seed", 16
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

    base: int  # descriptor of the folder that holds all of them
    folders: list[tuple[Path, int]]  # with their bytes
    report: Report = say

    @classmethod
    def below(cls, base: int, path: Path, report: Report) -> "Leftovers":
        """`path`: of the base."""
        found = []
        for identity in filter(_IDENTITY.fullmatch, os.listdir(base)):
            with suppress(OSError):
                found += _left_of(base, path / identity)
        return cls(base, [(folder, size) for _, folder, size in sorted(found)], report)

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.folders)

    def take_oldest(self) -> Callable[[], None]:
        """It counts no more. What is returned removes it, unless an engine has taken it meanwhile."""
        folder, _ = self.folders.pop(0)
        return partial(self._remove, folder)

    def _remove(self, folder: Path) -> None:
        with suppress(OSError), _of_identity(self.base, folder.parent) as parent:
            if (left := OwnedFolder.find(_KIND, parent, folder)) is not None:
                left.remove(self.report)


def _left_of(base: int, path: Path) -> list[tuple[float, Path, int]]:
    """Time of the last change, path and bytes of the folders of one identity that no process has."""
    found = []
    with _of_identity(base, path) as parent:
        for name in filter(_NUMBER.fullmatch, os.listdir(parent)):
            with suppress(OSError):
                if (left := OwnedFolder.find(_KIND, parent, path / name)) is not None:
                    found.append((os.fstat(left.descriptor).st_mtime, left.path, left.num_bytes))
                    left.close()
    return found


@contextmanager
def _of_identity(base: int, path: Path) -> Iterator[int]:
    """The folder of an identity. Raises OSError."""
    folder = open_below(base, path.name, path, make=False)
    try:
        yield folder
    finally:
        os.close(folder)


def seed_of(folder: Path) -> str:
    """A random prefix seed, in hex, that stays the same as long as the folder exists. Raises ValueError."""
    try:
        with opened(folder) as base:
            seed = _seed_in(base)
    except OSError as error:
        raise _unusable(folder, error) from None
    if not re.fullmatch(rb"[0-9a-f]{%d}" % (2 * _SEED_BYTES), seed):
        path = folder / _SEED
        raise ValueError(f"--kv-offload-dir: {path} holds no seed of {2 * _SEED_BYTES} hexadecimal digits; remove it")
    return seed.decode()


def _unusable(base: Path, error: OSError) -> ValueError:
    text = str(error)
    return ValueError(f"--kv-offload-dir: {text if str(base) in text else f'{base}: {text}'}")


def _seed_in(base: int) -> bytes:
    """Written aside and linked: of several processes the first one counts."""
    with suppress(FileNotFoundError):
        return _read_seed(base)
    drawn = f".seed-{secrets.token_hex(8)}"
    file = os.open(drawn, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=base)
    try:
        _write_all(file, memoryview(secrets.token_hex(_SEED_BYTES).encode()))
        with suppress(FileExistsError):
            os.link(drawn, _SEED, src_dir_fd=base, dst_dir_fd=base)
    finally:
        os.close(file)
        os.unlink(drawn, dir_fd=base)
    return _read_seed(base)


def _read_seed(base: int) -> bytes:
    file = open_file(base, _SEED)
    try:
        return os.read(file, 2 * _SEED_BYTES + 1)
    finally:
        os.close(file)


def file_bytes(lengths: Sequence[int]) -> int:
    """Of a file with pages of these lengths."""
    return HEADER_BYTES + sum(lengths)


class PageFiles:
    """The files of one engine. Holds a lock on their folder. Any thread may call; a file is removed by none that reads
    it."""

    def __init__(self, base: Path, identity: str, report: Report = say) -> None:
        """Takes the first folder of this identity that no other engine has. Raises ValueError."""
        self._identity, self._report = identity, report
        self._places: dict[int, list[_Place]] = {}  # by number of the file
        self.next_number = 1  # of a file that has never been there
        try:
            self._base = open_folder(base)
            try:
                self._owned = _take_folder(self._base, base / _short(identity))
            except OSError:
                os.close(self._base)
                raise
        except OSError as error:
            raise _unusable(base, error) from None
        self.folder = self._owned.path
        self.leftovers = Leftovers(self._base, [], report)

    def scan(self) -> list[FoundFile]:
        """What earlier engines left for this one, the least recently used first. Removes what is of no use.

        Reports in one line what of it cannot be used.
        """
        found: list[tuple[float, FoundFile]] = []
        unusable: list[str] = []
        for name in sorted(filter(_NAMES.fullmatch, os.listdir(self._folder))):
            self.next_number = max(self.next_number, int(name[:16]) + 1)
            try:
                found.append(self._open(name))
            except (OSError, PageFileError) as error:
                self._remove(name)
                if name.endswith(_SUFFIX):
                    unusable.append(str(error))
        if unusable:
            others = f" (and {len(unusable) - 1} more)" if unusable[1:] else ""
            self._report(f"KV offload: files in {self.folder} are left out: {unusable[0]}{others}")
        self.leftovers = Leftovers.below(self._base, self.folder.parents[1], self._report)
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
        name = _name(number)
        part = name.removesuffix(_SUFFIX) + _PART
        try:
            file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._folder)
            try:
                _write_all(file, memoryview(header.ljust(HEADER_BYTES)))
                for _, data in pages:
                    _write_all(file, data.data)
            finally:
                os.close(file)
            os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        except OSError:
            self._remove(part)
            raise
        self._places[number] = places

    def read(self, number: int, wanted: Sequence[tuple[int, Bytes]]) -> None:
        """Fills arrays with the pages at these positions of a file. Raises OSError or PageFileError."""
        name, places = _name(number), self._places[number]
        file = open_file(self._folder, name)
        try:
            for position, out in wanted:
                place = places[position]
                os.lseek(file, place.offset, os.SEEK_SET)
                if _read_all(file, out) != place.length or checksum(out) != place.checksum:
                    raise PageFileError(f"{self.folder / name} is damaged")
            with suppress(OSError):
                os.utime(file)  # it is used now, for the next start
        finally:
            os.close(file)

    def remove(self, number: int) -> None:
        self._places.pop(number, None)
        self._remove(_name(number))

    def close(self) -> None:
        self._owned.close()
        os.close(self._base)

    @property
    def _folder(self) -> int:
        return self._owned.descriptor

    def _remove(self, name: str) -> None:
        """A regular file; anything else was not made by Oscine."""
        with suppress(OSError):
            if stat.S_ISREG(os.stat(name, dir_fd=self._folder, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=self._folder)

    def _open(self, name: str) -> tuple[float, FoundFile]:
        """With the time of its last use. Raises OSError or PageFileError."""
        if not name.endswith(_SUFFIX):
            raise PageFileError(f"{name} was not completed")
        file = open_file(self._folder, name)
        try:
            head, facts = os.read(file, HEADER_BYTES), os.fstat(file)
        finally:
            os.close(file)
        try:
            header = json.loads(head)
            if (header["format"], header["identity"]) != (_FORMAT, _short(self._identity)):
                raise PageFileError(f"{name} is of another model")
            if header["checksum"] != _rows_checksum(header["pages"]):
                raise PageFileError(f"{name} is damaged")
            keys, places = _read_rows(header["pages"])
        except PageFileError:
            raise
        except _MALFORMED as error:
            raise PageFileError(f"{name} is damaged: {type(error).__name__}") from None
        size = file_bytes([place.length for place in places])
        if facts.st_size != size:
            raise PageFileError(f"{name} is cut")
        number = int(name.removesuffix(_SUFFIX))
        self._places[number] = places
        return facts.st_mtime, FoundFile(number, size, keys)


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


def _name(number: int) -> str:
    return f"{number:016d}{_SUFFIX}"


def _take_folder(base: int, path: Path) -> OwnedFolder:
    """`path`: of all folders of the identity. Raises OSError."""
    parent = open_below(base, path.name, path)
    try:
        for number in range(_MAX_ENGINES):
            folder = path / str(number)
            found = OwnedFolder.make(_KIND, parent, folder) or OwnedFolder.find(_KIND, parent, folder)
            if found is not None:
                return found
    finally:
        os.close(parent)
    raise OSError(f"{path} has no folder that is free: all {_MAX_ENGINES} are in use, or not of Oscine")


def _write_all(descriptor: int, left: memoryview) -> None:
    while len(left):
        left = left[os.write(descriptor, left) :]


def _read_all(descriptor: int, out: Bytes) -> int:
    """Returns the number of bytes; fewer than asked for at the end of the file."""
    left = out.data
    while len(left) and (count := os.readv(descriptor, [left])):
        left = left[count:]
    return len(out) - len(left)
