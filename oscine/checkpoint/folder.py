"""A checkpoint folder: config.json and safetensors, in one file or in shards, with an index or without.

The layout is the published one. An extension reads those of other tools. Everything is checked from the headers before
the first tensor is read.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oscine.checkpoint.files import placement, weight_files
from oscine.checkpoint.formats import TOOL_FOLDER, format_of
from oscine.checkpoint.hub import INDEX
from oscine.checkpoint.layout import (
    EMBEDDING,
    FLOATS,
    HEAD,
    is_kv_scale,
    is_published,
    stored_specs,
)
from oscine.model.config import ModelConfig
from oscine.model.weights import TensorSource
from oscine.system.extensions import is_there, load
from oscine.system.model_files import open_file, shown

_MAX_HEADER = 16 << 20  # bytes that describe the tensors of a safetensors file; gpt-oss's have 60 KB
_HEADER_AT = 8  # bytes of its size are before the header of a safetensors file
_SAMPLE_BYTES = 1024  # of each tensor, from its middle


class Checkpoint:
    """Tensors of a folder in the published layout, read when asked for. Raises ValueError for a malformed file."""

    def __init__(self, folder: Path, config: ModelConfig, stored: "Stored | None" = None) -> None:
        placed, stored = placement(folder), stored or Stored(folder)
        specs = stored_specs(config, stored.files)
        for name, path in stored.files.items():
            if name not in specs and not is_kv_scale(name):
                raise ValueError(f"{path}: {shown(name)} is not a tensor of this configuration")
        for name, spec in specs.items():
            if placed and name not in placed:
                raise ValueError(f"{folder / INDEX}: {name} is missing")
            if name not in stored.files:
                raise ValueError(f"{folder / placed.get(name, stored.first.name)}: {name} is missing")
            dtypes = FLOATS if spec.dtype == "BF16" else (spec.dtype,)
            check_tensor(name, spec.shape, dtypes, stored.files[name], stored.header(name))
        self._stored = stored
        self.kv_scales = sum(map(is_kv_scale, stored.files))  # tensors that are left out

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the file's memory map if it is stored as published."""
        tensor = self._stored.get(EMBEDDING if name == HEAD and name not in self._stored.files else name)
        return tensor if tensor.dtype == torch.uint8 else tensor.bfloat16()


class Stored:
    """The tensors in the safetensors files of a folder, whatever their names are. Raises ValueError if a file is
    malformed, a tensor is in two files, or one is not where the index says."""

    def __init__(self, folder: Path) -> None:
        opened = open_files(folder)
        self.first = next(iter(opened))  # of the files
        self.files: dict[str, Path] = {}  # by the name of a tensor, in the order of names within a file
        self._opened: dict[str, Any] = {}
        for path, file in opened.items():
            for name in sorted(file.keys()):
                if name in self.files:
                    raise ValueError(f"{path}: {shown(name)} is also in {self.files[name].name}")
                self.files[name], self._opened[name] = path, file
        for name, placed in placement(folder).items():
            if self.files.get(name) != folder / placed:
                raise ValueError(f"{folder / placed}: {shown(name)} is missing")

    def header(self, name: str) -> Any:
        """Has get_shape() and get_dtype(), and reads the parts that it is indexed with."""
        return self._opened[name].get_slice(name)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._opened[name].get_tensor(name)
        return tensor


def open_folder(folder: Path, config: ModelConfig) -> TensorSource:
    """The tensors of a folder, in the published layout or one that an extension knows. Raises ValueError."""
    stored = Stored(folder)
    if not is_published(config, stored.files) and is_there(TOOL_FOLDER):
        other: TensorSource = load(TOOL_FOLDER)(stored, config)
        return other
    return Checkpoint(folder, config, stored)


def fingerprint(path: Path) -> str:
    """Distinguishes weights of equal names and shapes, by a sample of each tensor. The division into files does not
    matter. `path`: of a folder, or of a file in another format. Raises ValueError for a folder without weights."""
    if path.is_dir():
        samples = {name: sample for file in open_files(path) for name, sample in _samples(file)}
    else:
        tensors = format_of(path).raw_tensors(path)
        samples = {name: data[_middle(len(data))].numpy().tobytes() for name, data in tensors}
    digest = hashlib.blake2b(digest_size=8)
    for tensor in sorted(samples):
        digest.update(tensor.encode() + b"\0" + samples[tensor])
    return digest.hexdigest()


def versions(path: Path) -> list[tuple[int, int]]:
    """Size and time of the last change, in ns, of each file of weights. `path`: as of fingerprint."""
    files = [path / name for name in weight_files(path)] if path.is_dir() else format_of(path).parts(path)
    return [(found.st_size, found.st_mtime_ns) for found in (file.stat() for file in files)]


def _samples(path: Path) -> Iterator[tuple[str, bytes]]:
    """Of a safetensors file that `open_files` has checked. They are read: a fault of a mapped page reads megabytes."""
    with open_file(path) as file:
        header = _header_size(file)
        tensors = json.loads(file.read(header))
        tensors.pop("__metadata__", None)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for name, (start, end) in ((name, found["data_offsets"]) for name, found in tensors.items()):
            middle = _middle(end - start)
            yield name, os.pread(file.fileno(), middle.stop - middle.start, _HEADER_AT + header + start + middle.start)


def _middle(num_bytes: int) -> slice:
    """The sample of a tensor."""
    size = min(num_bytes, _SAMPLE_BYTES)
    start = (num_bytes - size) // 2
    return slice(start, start + size)


def open_files(folder: Path) -> dict[Path, Any]:
    """The safetensors files by their paths. Their headers are read and checked, no tensor is."""
    return {path: open_tensors(path) for path in (folder / name for name in weight_files(folder))}


def open_tensors(path: Path) -> Any:
    """A safetensors file; its header is read and checked. Raises ValueError."""
    with open_file(path) as file:
        header = _header_size(file)
    if header > _MAX_HEADER:
        raise ValueError(f"{path}: truncated or malformed: a header of {header} bytes")
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path}: truncated or malformed: {shown(error)}") from None


def _header_size(file: BinaryIO) -> int:
    """In bytes, of a safetensors file at its start. The header comes next."""
    return int.from_bytes(file.read(_HEADER_AT), "little")


def check_tensor(name: str, shape: tuple[int, ...], dtypes: Sequence[str], path: Path, found: Any) -> None:
    """Raises ValueError if a tensor in a file is of another shape, or of none of these dtypes. `found`: its slice."""
    if tuple(found.get_shape()) != shape:
        raise ValueError(f"{path}: {shown(name)} has shape {shown(found.get_shape())}, not {list(shape)}")
    if found.get_dtype() not in dtypes:
        raise ValueError(f"{path}: {shown(name)} has dtype {found.get_dtype()}, not {dtypes[0]}")
