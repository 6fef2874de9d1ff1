"""Folders that this program makes, and the one rule by which it deletes: only what carries its mark.

A folder that it makes has a mark, a file that says what the folder is for. Its owner holds a lock on the mark, which
the kernel frees with the process. Only a marked folder whose lock is free, or one's own, is ever emptied. Its files are
deleted by the names that this program gives them, through the folder's descriptor. So no link is followed. If anything
else is left, the folder stays.
"""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

MARK = "lock"
PART = ".part"  # ends the names of incomplete files
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK  # neither a link nor a wait for the writer of a pipe
_ATTEMPTS = 16
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
_PARTS = re.compile(r".+\.[0-9a-f]{8}\.part")

Report = Callable[[str], None]

_reported: set[str] = set()  # what this process says once


class Kind(NamedTuple):
    """What a folder is for."""

    name: str
    files: re.Pattern[str] | None  # names of the files that this program makes in it; None: all in it is waste

    @property
    def mark(self) -> bytes:
        return f"This folder was made by Oscine: {self.name}\n".encode()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- folders and files that others cannot change ----


def open_folder(path: Path, *, make: bool = True) -> int:
    """A descriptor of a folder of this user or of root that not everyone may change. It is made if it is missing.

    A volume may be open to everyone: a container's is (emptyDir of Kubernetes), and no other user is there. Links in
    the path count as what they lead to, unless another user made the last one. Raises OSError.
    """
    owners = os.geteuid(), 0
    with suppress(FileNotFoundError):
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in owners:
            raise PermissionError(f"{path} is a link of another user ({found.st_uid})")
    real = os.path.realpath(path)
    if make:
        os.makedirs(os.path.dirname(real), exist_ok=True)
        with suppress(FileExistsError):
            os.mkdir(real, 0o700)
    return _opened(real, None, real, owners, is_volume=os.path.ismount(real))


@contextmanager
def opened(path: Path, *, make: bool = True) -> Iterator[int]:
    """As open_folder, and closed again."""
    folder = open_folder(path, make=make)
    try:
        yield folder
    finally:
        os.close(folder)


def open_below(parent: int, name: str, path: Path, *, make: bool = True) -> int:
    """As open_folder, for a folder of this user that this program names. It must be no link. `path`: for messages."""
    if make:
        with suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
    return _opened(name, parent, str(path), (os.geteuid(),))


def _opened(name: str, parent: int | None, shown: str, owners: tuple[int, ...], *, is_volume: bool = False) -> int:
    folder = os.open(name, _FOLDER, dir_fd=parent)
    found = os.fstat(folder)
    if found.st_uid in owners and (is_volume or found.st_mode & stat.S_ISVTX or not found.st_mode & stat.S_IWOTH):
        return folder
    os.close(folder)
    if found.st_uid not in owners:
        remedy = "name a folder of this user, and a local one if NFS maps users"
        raise PermissionError(f"{shown} belongs to another user ({found.st_uid}): {remedy}")
    raise PermissionError(f"every user may write to {shown} (a folder below it would do)")


def temporary_home(*, make: bool = True) -> Path:
    """A folder of this user in the temporary folder: the same one for all processes. Raises OSError.

    If another user has made the one with the expected name, it is one with a random end.
    """
    with _temporary() as (parent, above):
        name = f"oscine-{os.geteuid()}"
        names = _names(parent) or []
        for found in sorted(found for found in names if re.fullmatch(name + "(-[0-9a-f]{8})?", found)):
            with suppress(OSError):
                os.close(open_below(parent, found, above / found, make=False))
                return above / found
        new = f"{name}-{secrets.token_hex(4)}" if name in names else name
        os.close(open_below(parent, new, above / new, make=make))
        return above / new


def open_file(folder: int, name: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of a regular file of this user or of root that others cannot change. Raises OSError."""
    file = os.open(name, flags | _FILE, dir_fd=folder)
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & stat.S_IWOTH:
        os.close(file)
        raise PermissionError(f"{name} is not a file of this user alone")
    return file


@contextmanager
def complete_file(folder: int, name: str) -> Iterator[BinaryIO]:
    """A file that gets its name when all of it is on the disk. An error leaves nothing. Raises OSError."""
    part, file = _new_part(folder, name)
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(part, dir_fd=folder)
        raise


def check_new_file(folder: int, name: str) -> None:
    """Raises OSError where `complete_file` could not make this file."""
    part, file = _new_part(folder, name)
    os.unlink(part, dir_fd=folder)
    file.close()


def _new_part(folder: int, name: str) -> tuple[str, BinaryIO]:
    """A locked file; another start may have removed it before it was locked."""
    for _ in range(_ATTEMPTS):
        part = f"{name}.{secrets.token_hex(4)}{PART}"
        file = os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder), "wb")
        with suppress(OSError):  # where there are no locks, no start removes it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file.fileno()).st_nlink:
            return part, file
        file.close()
    raise OSError(f"new files of {name} vanish")


def take_lock(file: int, *, needed: bool) -> bool:
    """False where the file system has no locks, unless one is `needed`. Raises BlockingIOError for a locked file, and
    OSError."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if needed or error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def remove_parts(folder: int) -> None:
    """Removes incomplete files of processes that are gone. Raises OSError if the folder cannot be read."""
    for name in filter(_PARTS.fullmatch, os.listdir(folder)):
        with suppress(OSError):
            file = open_file(folder, name)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
            finally:
                os.close(file)


# ---- folders with a mark ----


class OwnedFolder:
    """A marked folder that this process holds. No other process takes it before it is closed or this one ends."""

    def __init__(self, kind: Kind, path: Path, descriptors: tuple[int, int, int], kept: ExitStack) -> None:
        """`descriptors`: of the folder above, of the folder, and of the mark, which a child may inherit with the lock.
        `kept`: closes them."""
        self.path, self._kind, self._kept = path, kind, kept
        self._parent, self.descriptor, self.lock = descriptors

    @classmethod
    def make(cls, kind: Kind, parent: int, path: Path, *, needs_lock: bool = True) -> "OwnedFolder | None":
        """A new folder in `parent`, named path.name; None if there is one. Raises OSError.

        Without a lock it gets no mark, so that no other process takes it. `needs_lock`: a lack of locks is an error.
        """
        try:
            os.mkdir(path.name, 0o700, dir_fd=parent)
        except FileExistsError:
            return None
        with ExitStack() as kept:
            folder = _keep(kept, os.open(path.name, _FOLDER, dir_fd=parent))
            try:
                lock = _keep(kept, os.open(MARK, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=folder))
                if take_lock(lock, needed=needs_lock):
                    os.write(lock, kind.mark)  # only now: without its text it is no mark
            except (BlockingIOError, FileNotFoundError):  # another process looks at it, or has removed it
                return None
            except OSError:
                with suppress(OSError):
                    os.unlink(MARK, dir_fd=folder)
                with suppress(OSError):
                    os.rmdir(path.name, dir_fd=parent)
                raise
            if not os.fstat(lock).st_nlink:
                return None
            return cls(kind, path, (_keep(kept, os.dup(parent)), folder, lock), kept.pop_all())

    @classmethod
    def find(cls, kind: Kind, parent: int, path: Path) -> "OwnedFolder | None":
        """A folder that another process has left. None for one that is in use, gone, or without a mark of this kind.

        Raises OSError, also where the file system has no locks.
        """
        with ExitStack() as kept:
            try:
                folder = _keep(kept, os.open(path.name, _FOLDER, dir_fd=parent))
                lock = _keep(kept, open_file(folder, MARK, os.O_RDWR))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if _is_strange(error):
                    return None
                raise
            is_there = os.fstat(lock).st_nlink and os.fstat(folder).st_uid == os.geteuid()
            if not is_there or os.read(lock, len(kind.mark) + 1) != kind.mark:
                return None
            return cls(kind, path, (_keep(kept, os.dup(parent)), folder, lock), kept.pop_all())

    @property
    def has_mark(self) -> bool:
        """Whether another process may take it when this one is gone."""
        return os.fstat(self.lock).st_size > 0

    def close(self) -> None:
        """The folder stays, for another process to take."""
        self._kept.close()

    @property
    def num_bytes(self) -> int:
        """Of the files that `remove` would delete from the folder itself."""
        return sum(found.st_size for name, found in self._entries() if self._is_own(name, found.st_mode))

    def remove(self, report: Report = say) -> None:
        """Empties, removes and closes it. What has another name stays, and so does the folder: one line says so."""
        try:
            if left := [name for name, found in self._entries() if not self._remove(name, found.st_mode)]:
                report(f"{self.path} is kept: {left[0]!r} in it was not made by Oscine")
            else:
                with suppress(FileNotFoundError):  # a child of this process was quicker
                    os.unlink(MARK, dir_fd=self.descriptor)
                with suppress(FileNotFoundError):
                    os.rmdir(self.path.name, dir_fd=self._parent)
        except (OSError, RecursionError) as error:  # of folders whose modes forbid it, or that are nested too deeply
            report(f"{self.path} is kept: {error}")
        finally:
            self.close()

    def _entries(self) -> list[tuple[str, os.stat_result]]:
        """All but the mark, by name."""
        found = []
        for name in sorted({*os.listdir(self.descriptor)} - {MARK}):
            with suppress(FileNotFoundError):  # its owner may be removing it
                found.append((name, os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)))
        return found

    def _remove(self, name: str, mode: int) -> bool:
        """False for what is not ours."""
        if not self._is_own(name, mode):
            return False
        if stat.S_ISDIR(mode):
            shutil.rmtree(name, dir_fd=self.descriptor)
        else:
            os.unlink(name, dir_fd=self.descriptor)
        return True

    def _is_own(self, name: str, mode: int) -> bool:
        names = self._kind.files
        return names is None or ((stat.S_ISREG(mode) or stat.S_ISSOCK(mode)) and names.fullmatch(name) is not None)


def _is_strange(error: OSError) -> bool:
    """Whether a folder or its mark is missing, in use, or something that this program did not make."""
    expected = FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError, BlockingIOError
    return isinstance(error, expected) or error.errno in (errno.ELOOP, errno.ENXIO)  # a link, a socket


def is_marked(kind: Kind, path: Path) -> bool:
    """Whether a folder is of this kind, in use or not."""
    try:
        lock = os.open(path / MARK, os.O_RDONLY | _FILE)
    except OSError:
        return False
    with open(lock, "rb") as file:
        return file.read(len(kind.mark) + 1) == kind.mark


def remove_left(kind: Kind, path: Path, report: Report = say) -> None:
    """Removes a folder of this kind whose owner is gone. Raises OSError."""
    parent = os.open(os.path.realpath(path.parent), _FOLDER)
    try:
        if (left := OwnedFolder.find(kind, parent, path)) is not None:
            left.remove(report)
    finally:
        os.close(parent)


def make_temporary(kind: Kind, report: Report = say, *, needs_lock: bool = False) -> OwnedFolder:
    """As make_inside, in the temporary folder."""
    with _temporary() as (parent, above):
        return make_inside(kind, parent, above, report, needs_lock=needs_lock)


def make_inside(kind: Kind, parent: int, above: Path, report: Report = say, *, needs_lock: bool = False) -> OwnedFolder:
    """A new folder in `parent`, whose path is `above`. Those of its kind there whose owners are gone are removed.

    If that cannot be, as there are no locks or the names cannot be read, one line says so. Raises OSError.
    """
    prefix = f"oscine-{kind.name}-"
    names = _names(parent)
    for name in sorted(name for name in names or () if re.fullmatch(prefix + "[0-9a-f]{8}", name)):
        with suppress(OSError):
            if (left := OwnedFolder.find(kind, parent, above / name)) is not None:
                left.remove(report)
    for _ in range(_ATTEMPTS):
        path = above / f"{prefix}{secrets.token_hex(4)}"
        if (made := OwnedFolder.make(kind, parent, path, needs_lock=needs_lock)) is not None:
            if names is None or not made.has_mark:
                why = "cannot be listed" if names is None else "has no file locks"
                _report_once(report, f"{above} {why}, so what a killed process leaves in it stays")
            return made
    raise OSError(f"{above}: new folders in it are taken at once")


def _names(folder: int) -> list[str] | None:
    """None for a folder that can be written and not listed."""
    try:
        return os.listdir(folder)
    except OSError:
        return None


def _report_once(report: Report, text: str) -> None:
    if text not in _reported:
        _reported.add(text)
        report(text)


@contextmanager
def _temporary() -> Iterator[tuple[int, Path]]:
    """The temporary folder and its path. An OSError names TMPDIR."""
    with ExitStack() as kept:
        try:
            above = Path(os.path.realpath(tempfile.gettempdir()))
            try:
                folder = os.open(above, _FOLDER)
            except PermissionError:  # it cannot be listed
                folder = os.open(above, _FOLDER | os.O_PATH)
            yield _keep(kept, folder), above
        except OSError as error:
            raise OSError(f"no folder for temporary files can be made: {error}; TMPDIR names another place") from None


def _keep(kept: ExitStack, descriptor: int) -> int:
    kept.callback(os.close, descriptor)
    return descriptor
