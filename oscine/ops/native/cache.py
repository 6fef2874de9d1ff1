"""The cache of compiled libraries: the first folder of the user's that can be written and that lets them run.

The name of a file ends with a checksum of its bytes. So a file that was cut or zeroed is found out before it is loaded,
as a process that loads such a file is ended by a signal.
"""

import ctypes
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from oscine.system.environment import Environment
from oscine.system.owned_folder import (
    Kind,
    complete_file,
    make_inside,
    open_file,
    opened,
    remove_parts,
    say,
    temporary_home,
)

_BUILD = Kind("build", None)  # what a compiler leaves behind
_ROOM_BYTES = 64 << 20  # for a compilation: a compiled header takes 25 MiB


class NoLibrary(Exception):  # noqa: N818  (reads as what it is)
    """The reason why there are no native kernels on this machine, in one line."""


class _Folder(NamedTuple):
    path: Path
    descriptor: int

    def find(self, state: str) -> ctypes.CDLL | None:
        """Removes libraries of this state that are damaged. Raises OSError."""
        for name in sorted(filter(re.compile(rf"native-{state}-[0-9a-f]+\.so").fullmatch, os.listdir(self.descriptor))):
            with suppress(OSError):
                with open(open_file(self.descriptor, name), "rb") as file:
                    is_whole = name == _name(state, file.read())
                if not is_whole:
                    say(f"{self.path / name} is damaged, so the library is compiled again")
                    os.unlink(name, dir_fd=self.descriptor)
                    continue
                return self._load(name)
        return None

    def keep(self, state: str, library: bytes) -> ctypes.CDLL:
        """Raises OSError, after which the library is not there."""
        remove_parts(self.descriptor)
        name = _name(state, library)
        with complete_file(self.descriptor, name) as file:
            file.write(library)
        try:
            return self._load(name)
        except OSError:
            os.unlink(name, dir_fd=self.descriptor)
            raise

    def build(self, compile_in: Callable[[Path], bytes]) -> bytes:
        """Raises OSError, and what `compile_in` raises."""
        if shutil.disk_usage(self.descriptor).free < _ROOM_BYTES:
            raise OSError("the disk is full")
        work = make_inside(_BUILD, self.descriptor, self.path)
        try:
            return compile_in(work.path)
        finally:
            work.remove()

    def _load(self, name: str) -> ctypes.CDLL:
        """Raises OSError where nothing may be executed."""
        return ctypes.CDLL(str(self.path / name))


def cached(state: str, compile_in: Callable[[Path], bytes]) -> ctypes.CDLL:
    """The library of this state, from the first folder that has it. If there is none, it is compiled once.

    `state`: a hash of all that makes the library what it is. `compile_in`: given a folder for files of the compiler.
    Raises NoLibrary.
    """
    found = _first(lambda folder: folder.find(state), {}, make=False)
    if found is not None:
        return found
    compiled: list[bytes] = []
    why: dict[Path, str] = {}

    def keep(folder: _Folder) -> ctypes.CDLL:
        if not compiled:
            compiled.append(folder.build(compile_in))
        return folder.keep(state, compiled[0])

    kept = _first(keep, why, make=True)
    if kept is None:
        reasons = "; ".join(f"{path}: {error}" for path, error in why.items())
        raise NoLibrary(f"no folder can hold the compiled library ({reasons}); XDG_CACHE_HOME names another one")
    return kept


def _first(attempt: Callable[[_Folder], ctypes.CDLL | None], why: dict[Path, str], *, make: bool) -> ctypes.CDLL | None:
    """What succeeds first, folder by folder. `why`: gets the other folders' errors. `make`: those that are missing."""
    for path in _paths(make):
        try:
            with opened(path, make=make) as descriptor:
                if (found := attempt(_Folder(path, descriptor))) is not None:
                    return found
        except OSError as error:
            why[path] = str(error)
    return None


def _paths(make: bool) -> Iterator[Path]:
    yield from dict.fromkeys((Environment().cache_folder, Path(os.path.expanduser("~/.cache/oscine"))))
    with suppress(OSError):
        yield temporary_home(make=make)


def _name(state: str, library: bytes) -> str:
    return f"native-{state}-{hashlib.blake2b(library, digest_size=8).hexdigest()}.so"
