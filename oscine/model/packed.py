"""Packed weights for a CPU in memory-mapped files: the next start is immediate, and processes share the memory.

One file holds one prepared weight: a header in JSON, padded to 4,096 bytes with spaces, then its tensors at multiples
of 64 bytes. A file gets its name when it is complete, so the next start continues an interrupted one.
"""

import ctypes
import json
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from oscine.ops.native.weights import PackedDense, PackedExperts

T = TypeVar("T")
_HEADER, _ALIGNMENT = 4096, 64
_SPARE_BYTES = 1 << 30  # bytes of the disk that stay free
_WHOLE = 0.98  # a complete folder's share of all weight bytes: norms and routers are in no file
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (PackedDense, PackedExperts)}
_MADV_PAGEOUT = 21
_PART = ".part"  # suffix of a file that is being written
_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
_ABANDONED_S = 3600.0  # without a write, after which its process must have ended


class PackedFiles:
    """A folder of prepared weights by name. Without room on the disk, weights are packed again and stay in memory."""

    def __init__(self, folder: Path, num_bytes: int, report: Callable[[str], None]) -> None:
        """`num_bytes`: size of all weights."""
        self._folder, self._report = folder, report
        self._usable = self._has_room(num_bytes)

    def get(self, name: str, make: Callable[[], T], some_rows: bool = False) -> T:
        """The prepared weight, from its file or from `make`. `some_rows`: steps read only some rows of it."""
        path, advice = self._folder / name, "MADV_RANDOM" if some_rows else "MADV_HUGEPAGE"
        if not self._usable:
            return make()
        try:
            return _read(path, advice)  # type: ignore[no-any-return]
        except (OSError, *_UNREADABLE):  # the file is missing or incomplete
            made = make()
        try:
            _write(path, made)
            return _read(path, advice)  # type: ignore[no-any-return]
        except OSError as error:
            self._give_up(str(error))
            return made

    def _has_room(self, num_bytes: int) -> bool:
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for part in self._folder.glob(f"*{_PART}"):
                with suppress(FileNotFoundError):  # another process has renamed it
                    if time.time() - part.stat().st_mtime > _ABANDONED_S:
                        part.unlink()
            held = sum(path.stat().st_size for path in self._folder.iterdir() if path.suffix != _PART)
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            self._give_up(str(error))
            return False
        missing = num_bytes - held if held < _WHOLE * num_bytes else 0
        if missing and missing + _SPARE_BYTES > free:
            self._give_up(f"they need {missing >> 20} MiB more, and {self._folder} has {free >> 20} MiB")
            return False
        self._report(f"packed weights: {'mapped from' if not missing else 'written to'} {self._folder}")
        return True

    def _give_up(self, why: str) -> None:
        self._usable = False
        self._report(f"weights are packed again at every start, and processes do not share them: {why}")


def page_out(tensors: Iterable[Tensor]) -> None:
    """Releases the memory of mapped files to the system. Pages that are used again are read again."""
    for tensor in tensors:
        first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (tensor.data_ptr() + tensor.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        if length > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_PAGEOUT)


def _write(path: Path, value: Any) -> None:
    header, tensors = _describe(value)
    text = json.dumps(header).encode()
    assert len(text) <= _HEADER
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PART, delete=False) as file:
        try:
            file.write(text.ljust(_HEADER))
            for tensor in tensors:
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
                file.write(bytes(-file.tell() % _ALIGNMENT))
            file.flush()
            os.fsync(file.fileno())
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _describe(value: Any) -> tuple[dict[str, Any], list[Tensor]]:
    """The header, and the tensors in the order of the header."""
    named = {"": value} if isinstance(value, Tensor) else {f.name: getattr(value, f.name) for f in fields(value)}
    tensors = {name: part for name, part in named.items() if isinstance(part, Tensor)}
    places, end = {}, _HEADER
    for name, tensor in tensors.items():
        places[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end]
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    rest = {name: part for name, part in named.items() if name not in tensors}
    return {"kind": type(value).__name__, "bytes": end, "tensors": places, "rest": rest}, list(tensors.values())


def _read(path: Path, advice: str) -> Any:
    """Raises OSError, or one of _UNREADABLE for an incomplete file."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    header = json.loads(memory[:_HEADER])
    if header["bytes"] != len(memory):
        raise ValueError(path)
    if hasattr(mmap, advice):
        memory.madvise(getattr(mmap, advice))
    named = {name: _tensor(memory, *place) for name, place in header["tensors"].items()}
    if header["kind"] not in _KINDS:
        return named[""]
    rest = {name: tuple(part) if isinstance(part, list) else part for name, part in header["rest"].items()}
    return _KINDS[header["kind"]](**named, **rest)


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], offset: int) -> Tensor:
    count = torch.Size(shape).numel()
    return torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)
