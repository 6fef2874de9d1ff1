"""A checkpoint folder: config.json and safetensors, in one file or in shards with an index.

The layout is the published one, or that of transformers for experts in floats, which are quantised when they are read.
Everything is checked from the headers before the first tensor is read.
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

from oscine.checkpoint.formats import format_of
from oscine.checkpoint.hub import INDEX, SINGLE
from oscine.checkpoint.layout import EMBEDDING, FLOATS, HEAD, is_kv_scale, matrix_of, stored_specs
from oscine.checkpoint.quantize import QuantizationError, Quantized, quantize
from oscine.model.config import ModelConfig
from oscine.system.model_files import is_file_name, open_file, read_json, shown

_MAX_HEADER = 16 << 20  # bytes that describe the tensors of a safetensors file; gpt-oss's have 60 KB
_HEADER_AT = 8  # bytes of its size are before the header of a safetensors file
_SAMPLE_BYTES = 1024  # of each tensor, from its middle


class Checkpoint:
    """Tensors of a folder, read when asked for. Raises ValueError if any file of the folder is malformed."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        placed, files = _placement(folder), open_files(folder)
        held = {name: path for path, file in files.items() for name in sorted(file.keys())}
        specs = stored_specs(config, held)
        for path, file in files.items():
            for name in sorted(file.keys()):
                if name not in specs and not is_kv_scale(name):
                    raise ValueError(f"{path}: {shown(name)} is not a tensor of this configuration")
                if held[name] != path:
                    raise ValueError(f"{held[name]}: {shown(name)} is also in {path.name}")
        for name, spec in specs.items():
            if placed and name not in placed:
                raise ValueError(f"{folder / INDEX}: {name} is missing")
            path = folder / placed.get(name, SINGLE)
            if held.get(name) != path:
                raise ValueError(f"{path}: {name} is missing")
            dtypes = FLOATS if spec.dtype == "BF16" else (spec.dtype,)
            check_tensor(name, spec.shape, dtypes, path, files[path].get_slice(name))
        self._file_of = {name: files[path] for name, path in held.items()}
        self._path_of = held
        self.errors: dict[str, QuantizationError] = {}  # by the matrix of experts that was quantised
        self.kv_scales = sum(map(is_kv_scale, held))  # tensors that are left out
        self._newest: tuple[str, Quantized] | None = None

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the file's memory map if it is stored as published."""
        if (matrix := matrix_of(name, self._file_of)) is not None:
            quantized = self._quantized(matrix)
            return quantized.blocks if name.endswith("_blocks") else quantized.scales
        tensor = self._stored(EMBEDDING if name == HEAD and name not in self._file_of else name)
        return tensor if tensor.dtype == torch.uint8 else tensor.bfloat16()

    def floats(self, matrix: str) -> Tensor | None:
        """A matrix of experts as it is stored in floats, [experts, out, in]; None if it is stored as published."""
        stored = matrix_of(f"{matrix}_blocks", self._file_of)
        return None if stored is None else self._stored(stored).mT

    def _stored(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def _quantized(self, matrix: str) -> Quantized:
        """The newest one is kept, as its blocks and its scales are asked for one after the other."""
        if self._newest is None or self._newest[0] != matrix:
            self._newest = None
            try:
                quantized, self.errors[matrix] = quantize(self._stored(matrix).mT)
            except ValueError as error:
                raise ValueError(f"{self._path_of[matrix]}: {matrix}: {error}") from None
            self._newest = matrix, quantized
        return self._newest[1]


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
    """Tensor name -> file, as the index says; empty for a checkpoint of one file."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder}: holds neither {INDEX} nor {SINGLE}")
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
    return sorted(set(_placement(folder).values()) or {SINGLE})


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
