"""Packed weights for a CPU in memory-mapped files: the next start is immediate, and processes share the memory.

One file holds one prepared weight: a header in JSON, padded to 4,096 bytes with spaces, then its tensors at multiples
of 64 bytes. A file gets its name when it is complete, so the next start continues an interrupted one. A file counts
only if it is of this user or of root, and if its header says that it was made of tensors with the model's names and
shapes. Any other is written anew.
"""

import ctypes
import json
import mmap
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from oscine.ops.native.weights import PackedDense, PackedExperts
from oscine.system.owned_folder import PART, complete_file, open_file, opened, remove_parts

Shapes = Mapping[str, Sequence[int]]  # of published tensors, by name
T = TypeVar("T")
_HEADER, _ALIGNMENT = 4096, 64
_SPARE_BYTES = 1 << 30  # bytes of the disk that stay free
_WHOLE = 0.98  # a complete folder's share of all weight bytes: norms and routers are in no file
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (PackedDense, PackedExperts)}
_MADV_PAGEOUT = 21
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)  # of damaged headers


class PackedFiles:
    """A folder of prepared weights by name. Without room on the disk, weights are packed again and stay in memory."""

    def __init__(self, folder: Path, num_bytes: int, report: Callable[[str], None]) -> None:
        """`num_bytes`: size of all weights."""
        self._folder, self._report = folder, report
        self._usable = self._has_room(num_bytes)

    def get(self, name: str, make: Callable[[], T], some_rows: bool = False, of: Shapes = MappingProxyType({})) -> T:
        """The prepared weight, from its file or from `make`.

        `some_rows`: steps read only some rows of it. `of`: what it is made of.
        """
        advice = "MADV_RANDOM" if some_rows else "MADV_HUGEPAGE"
        if not self._usable:
            return make()
        try:
            return self._read(name, of, advice)  # type: ignore[no-any-return]
        except (OSError, *_UNREADABLE):  # the file is missing, damaged, or not of this user
            made = make()
        try:
            with opened(self._folder) as folder:
                _write(folder, name, made, of)
            return self._read(name, of, advice)  # type: ignore[no-any-return]
        except OSError as error:
            self._give_up(str(error))
            return made

    def _read(self, name: str, of: Shapes, advice: str) -> Any:
        """Raises OSError, or one of _UNREADABLE."""
        with opened(self._folder) as folder, open(open_file(folder, name), "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return _value(memory, of, advice)

    def _has_room(self, num_bytes: int) -> bool:
        try:
            with opened(self._folder) as folder:
                remove_parts(folder)
                names = [name for name in os.listdir(folder) if not name.endswith(PART)]
                held = sum(os.stat(name, dir_fd=folder, follow_symlinks=False).st_size for name in names)
                free = shutil.disk_usage(folder).free
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


def _write(folder: int, name: str, value: Any, of: Shapes) -> None:
    header, tensors = _describe(value)
    header["of"] = _plain(of)
    text = json.dumps(header | {"checksum": _checksum(header)}).encode()
    assert len(text) <= _HEADER
    with complete_file(folder, name) as file:
        file.write(text.ljust(_HEADER))
        for tensor in tensors:
            file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            file.write(bytes(-file.tell() % _ALIGNMENT))


def _plain(of: Shapes) -> dict[str, list[int]]:
    """As JSON gives it back."""
    return {name: list(shape) for name, shape in of.items()}


def _checksum(header: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(header, sort_keys=True).encode())


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


def _value(memory: mmap.mmap, of: Shapes, advice: str) -> Any:
    """Raises one of _UNREADABLE for a file that is damaged, or was made of something else."""
    header = json.loads(memory[:_HEADER])
    if header.pop("checksum") != _checksum(header):
        raise ValueError("the header is damaged")
    if header["of"] != _plain(of) or header["bytes"] != len(memory):
        raise ValueError("it is of other weights, or cut")
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
