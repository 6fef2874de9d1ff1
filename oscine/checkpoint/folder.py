"""A checkpoint folder: config.json and safetensors, in one file or in shards, with an index or without.

The layout is the published one. An extension reads those of other tools. Everything is checked from the headers before
the first tensor is read.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oscine.checkpoint.formats import format_of
from oscine.checkpoint.hub import INDEX, SINGLE
from oscine.checkpoint.layout import (
    EMBEDDING,
    FLOATS,
    HEAD,
    OTHER_LAYOUTS,
    is_kv_scale,
    is_published,
    stored_specs,
    why_no_weights,
)
from oscine.model.config import ModelConfig
from oscine.model.weights import TensorSource
from oscine.system.extensions import is_there, load
from oscine.system.model_files import is_file_name, open_file, read_json, shown

_MAX_HEADER = 16 << 20  # bytes that describe the tensors of a safetensors file; gpt-oss's have 60 KB
_HEADER_AT = 8  # bytes of its size are before the header of a safetensors file
ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of PEFT
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})\.safetensors")
_SAMPLE_BYTES = 1024  # of each tensor, from its middle


class Checkpoint:
    """Tensors of a folder in the published layout, read when asked for. Raises ValueError for a malformed file."""

    def __init__(self, folder: Path, config: ModelConfig, stored: "Stored | None" = None) -> None:
        placed, stored = _placement(folder), stored or Stored(folder)
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
        for name, placed in _placement(folder).items():
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
    if not is_published(config, stored.files) and is_there(OTHER_LAYOUTS):
        other: TensorSource = load(OTHER_LAYOUTS)(stored, config)
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
    files = [path / name for name in _file_names(path)] if path.is_dir() else format_of(path).parts(path)
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


def _placement(folder: Path) -> dict[str, str]:
    """Tensor name -> file, as the index says; empty for a checkpoint without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    placed = read_json(path).get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path}: weight_map is not an object with tensors")
    for name, file in placed.items():
        if not is_file_name(file):
            what = f"{shown(name)} is placed in {shown(repr(file))}"
            raise ValueError(f"{path}: {what}, which is not a file of this folder")
        if not (folder / file).exists():
            raise ValueError(f"{folder / file}: missing; the index places {shown(name)} there")
    return placed


def _file_names(folder: Path) -> list[str]:
    """The files of weights: those of the index, or the one file, or all shards that there are."""
    names = set(_placement(folder).values()) or {SINGLE} & set(os.listdir(folder)) or _shards(folder)
    if not names:
        raise ValueError(f"{folder}: holds no weights in safetensors{why_no_weights(folder)}")
    return sorted(names)


def _shards(folder: Path) -> set[str]:
    """Without an index. Raises ValueError if one of numbered shards is missing."""
    names = {path.name for path in folder.glob("*.safetensors") if is_file_name(path.name)} - {ADAPTER_WEIGHTS}
    for stem, count in {(found[1], found[2]) for found in map(_SHARD.fullmatch, names) if found}:
        numbers = {int(name.removeprefix(stem)[1:6]) for name in names if name.endswith(f"-of-{count}.safetensors")}
        first = min(1, *numbers)  # some tools number from 0
        for number in range(first, int(count) + first):
            if number not in numbers:
                raise ValueError(f"{folder / f'{stem}-{number:05d}-of-{count}.safetensors'}: missing")
    return names


def open_files(folder: Path) -> dict[Path, Any]:
    """The safetensors files by their paths. Their headers are read and checked, no tensor is."""
    return {path: open_tensors(path) for path in (folder / name for name in _file_names(folder))}


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
