"""A GGUF file, or all parts of a split one: its metadata, and where its tensors lie. Knows nothing of gpt-oss.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A part is mapped into memory, and read when it
is used.
"""

import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oscine.system.model_files import is_file_name, open_file, shown

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = "BbHhIif?"  # struct's codes of value types 0 to 7
_TEXT, _ARRAY = 8, 9
_WIDE = {10: "Q", 11: "q", 12: "d"}
_FLOAT = 6  # value type of a 32-bit float
# gpt-oss has some 40 values, 700 tensors, and arrays of 450,000 texts. More is refused before it takes memory.
_MAX_VALUES, _MAX_TENSORS, _MAX_TEXTS = 1 << 14, 1 << 17, 1 << 20
_MAX_HEADER = 64 << 20  # bytes before the tensors; gpt-oss has 13 MB
_MAX_LISTED = 1 << 16  # numbers of an array; more are some for each token, which are not needed
_MAX_DIMENSIONS = 4
_MAX_PARTS = 1024
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
# A private mapping of a file larger than the memory is refused by some systems, unless nothing is reserved for it.
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of tensors: how many values a block has, and in how many bytes."""

    name: str
    values: int
    bytes: int


# By ggml's number. Number 4 is MXFP4 in the first files of Ollama, where the nibbles have the order of safetensors.
TYPES = {
    number: BlockType(name, values, size)
    for number, name, values, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (4, "MXFP4 of Ollama", 32, 17),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (30, "BF16", 1, 2),
        (39, "MXFP4", 32, 17),
    )
}


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file."""

    name: str
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    type: BlockType
    data: mmap.mmap  # of the whole file
    start: int  # bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) // self.type.values * self.type.bytes

    @property
    def raw(self) -> NDArray[np.uint8]:
        """The bytes of the tensor, mapped and not yet read."""
        return np.frombuffer(self.data, np.uint8, self.num_bytes, self.start)

    def part(self, index: int) -> "Stored":
        """Of several matrices the one of this index, as a tensor of one."""
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=(1, *self.shape[1:]), start=self.start + index * size)

    def release(self) -> None:
        """Releases the mapped pages: they no longer count as memory of this process."""
        first = self.start // mmap.PAGESIZE * mmap.PAGESIZE
        self.data.madvise(mmap.MADV_DONTNEED, first, self.start + self.num_bytes - first)


class Texts:
    """An array of strings that is read at its first use, as a vocabulary has hundreds of thousands of them."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        cursor = _Cursor(self._data, self._start)
        return (cursor.text() for _ in range(self._count))


class Gguf:
    """Raises ValueError naming the file if it is no GGUF file or truncated, or if a part of it is missing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}  # numbers, booleans, strings, Texts, lists of numbers; None for a long list
        self.tensors: dict[str, Stored] = {}
        for part in parts_of(path):
            try:
                self._read(part)
            except OSError as error:  # it cannot be mapped
                raise ValueError(f"{part}: cannot be read: {error.strerror}") from None
            except (struct.error, OverflowError, _MalformedError) as error:
                raise ValueError(f"{part}: truncated or malformed: {error}") from None

    def _read(self, part: Path) -> None:
        cursor = _Cursor(_mapped(part))
        if bytes(cursor.data[:4]) != _MAGIC:
            raise _MalformedError("it does not begin with GGUF")
        cursor.at = 4
        version, num_tensors, num_values = cursor.take("IQQ")
        if version not in _VERSIONS:
            raise _MalformedError(f"version {version} is not supported; it must be 2 or 3, little-endian")
        _check_count("values", num_values, _MAX_VALUES)
        _check_count("tensors", num_tensors, _MAX_TENSORS)
        metadata = {cursor.text(): cursor.value(*cursor.take("I")) for _ in range(num_values)}
        self.metadata = metadata | self.metadata  # the first part has all of it; others number themselves
        records = [(cursor.text(), cursor.dimensions(), *cursor.take("IQ")) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise _MalformedError(f"general.alignment must be a multiple of 8, not {shown(repr(alignment))}")
        start = -(-cursor.at // alignment) * alignment
        for name, shape, number, offset in records:
            if name in self.tensors:
                raise ValueError(f"{part}: {shown(name)} is there twice")
            kind = TYPES.get(number, BlockType(f"type {number}", 1, 0))
            stored = Stored(name, shape, kind, cursor.data, start + offset)
            if (end := stored.start + stored.num_bytes) > len(cursor.data):
                raise _MalformedError(f"{shown(name)} ends at byte {end} of {len(cursor.data)}")
            self.tensors[name] = stored


def is_gguf(path: Path) -> bool:
    """Whether the content of a file is GGUF. Its name does not matter."""
    try:
        with open_file(path) as file:
            return file.read(4) == _MAGIC
    except (OSError, ValueError):
        return False


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` belongs to: only `path`, unless its name is that of a part."""
    found = _SPLIT.fullmatch(path.name)
    if found is None or not 0 < int(found[3]) <= _MAX_PARTS:
        return [path]
    stem, _, count = found.groups()
    return [path.with_name(f"{stem}-{number:05d}-of-{count}.gguf") for number in range(1, int(count) + 1)]


def gguf_in(folder: Path) -> Path | None:
    """The first file of the one model in GGUF that a folder holds; None if it holds none. Raises ValueError."""
    found = (path for path in folder.glob("*.gguf") if is_file_name(path.name) and not path.name.startswith("mmproj"))
    firsts = sorted({parts_of(path)[0] for path in found})
    if len(firsts) > 1:
        names = shown(", ".join(path.name for path in firsts))
        raise ValueError(f"{folder} holds several GGUF files; name one: {names}")
    return firsts[0] if firsts else None


class _MalformedError(Exception): ...


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise _MalformedError(f"it has {count} {what}, and at most {most} are read")


class _Cursor:
    """Reads little-endian values one after the other, up to the largest end of a header."""

    def __init__(self, data: mmap.mmap, at: int = 0) -> None:
        self.data, self.at, self._end = data, at, min(len(data), _MAX_HEADER)

    def take(self, codes: str) -> tuple[Any, ...]:
        codes = f"<{codes}"
        values = struct.unpack_from(codes, self.data, self.at)
        self.at += struct.calcsize(codes)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        return bytes(self.data[slice(*self._skip(length))]).decode(errors="replace")

    def _skip(self, num_bytes: int) -> tuple[int, int]:
        """The first byte of the next ones, and the end."""
        start, end = self.at, self.at + num_bytes
        if end > self._end:
            raise _MalformedError(f"a value of {num_bytes} bytes begins at byte {start} of {self._end}")
        self.at = end
        return start, end

    def dimensions(self) -> tuple[int, ...]:
        (count,) = self.take("I")
        _check_count("dimensions", count, _MAX_DIMENSIONS)
        return tuple(reversed(self.take(f"{count}Q")))

    def value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            return self._array(*self.take("IQ"))
        (found,) = self.take(_code(kind))
        # A float of 32 bits is read as the decimal that was meant: 1e-05, not 9.999999747378752e-06.
        return float(str(np.float32(found))) if kind == _FLOAT else found

    def _array(self, kind: int, count: int) -> Any:
        if kind != _TEXT:
            numbers = np.dtype(f"<{_code(kind)}")
            start, _ = self._skip(count * numbers.itemsize)
            return np.frombuffer(self.data, numbers, count, start).tolist() if count <= _MAX_LISTED else None
        _check_count("texts in an array", count, _MAX_TEXTS)
        texts = Texts(self.data, self.at, count)
        self._skip_texts(count)
        return texts

    def _skip_texts(self, count: int) -> None:
        length_at: Callable[..., tuple[int]] = struct.Struct("<Q").unpack_from
        data, at = self.data, self.at
        for _ in range(count):
            at += 8 + length_at(data, at)[0]
        self._skip(at - self.at)


def _code(kind: int) -> str:
    code = _SCALARS[kind] if kind < len(_SCALARS) else _WIDE.get(kind)
    if code is None:
        raise _MalformedError(f"a value has the unknown type {kind}")
    return code


def _mapped(path: Path) -> mmap.mmap:
    """The file in memory, writable because torch needs that; the file itself never changes."""
    with open_file(path) as file:
        if not os.fstat(file.fileno()).st_size:
            raise _MalformedError("it is empty")
        return mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | _NO_RESERVE)
