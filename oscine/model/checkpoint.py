"""A checkpoint folder in the published layout: config.json and safetensors, in one file or in shards with an index.

Everything is checked from the headers before the first tensor is read.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.weights import TensorSpec, tensor_specs

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 1024  # of each tensor, from its middle
HEADER_LENGTH_BYTES = 8  # a safetensors file starts with the length of its JSON header, little-endian


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The head of one safetensors file."""

    path: Path
    tensors: dict[str, dict[str, Any]]  # name -> {"dtype", "shape", "data_offsets"}
    data_bytes: int  # size of the file less its head


class Checkpoint:
    """Tensors of a folder, read when asked for. Raises ValueError if any file of the folder is malformed."""

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        placed = _placement(folder)
        headers = {name: _read_header(folder / name) for name in sorted(set(placed.values()) or {SINGLE})}
        self._file_of = _check_names(tensor_specs(config), headers, placed)
        for name, spec in tensor_specs(config).items():
            _check_tensor(name, spec, headers[self._file_of[name]])
        for header in headers.values():
            _check_size(header)
        self._folder = folder
        self._open: dict[str, Any] = {}

    def get(self, name: str) -> Tensor:
        """The tensor on the CPU, backed by the file's memory map."""
        file = self._file_of[name]
        if file not in self._open:
            try:
                self._open[file] = safe_open(self._folder / file, framework="pt")
            except SafetensorError as error:
                raise ValueError(f"{self._folder / file}: {error}") from None
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


def save(folder: Path, config: ModelConfig, tensors: dict[str, Tensor], max_shard_bytes: int | None = None) -> None:
    """Writes config.json and the tensors as published: bfloat16 and packed uint8, in shards where a limit is given."""
    assert tensors.keys() == tensor_specs(config).keys()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    if max_shard_bytes is None:
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        return
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards):
        file = f"model-{number:05d}-of-{len(shards) - 1:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def fingerprint(folder: Path) -> str:
    """Distinguishes weights of equal names and shapes, by a sample of each tensor. The division into files does not
    matter. Raises ValueError for a folder without weights."""
    samples: dict[str, bytes] = {}
    for name in set(_placement(folder).values()) or {SINGLE}:
        header = _read_header(folder / name)
        with header.path.open("rb") as file:
            head_bytes = header.path.stat().st_size - header.data_bytes
            for tensor, entry in header.tensors.items():
                start, end = entry["data_offsets"]
                middle = max(start, (start + end - _SAMPLE_BYTES) // 2)
                file.seek(head_bytes + middle)
                samples[tensor] = file.read(min(_SAMPLE_BYTES, end - middle))
    digest = hashlib.blake2b(digest_size=8)
    for tensor in sorted(samples):
        digest.update(tensor.encode() + b"\0" + samples[tensor])
    return digest.hexdigest()


def _placement(folder: Path) -> dict[str, str]:
    """Tensor name -> file, as the index says; empty for a checkpoint of one file."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise ValueError(f"{folder}: holds neither {INDEX} nor {SINGLE}")
        return {}
    try:
        placed = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not a JSON object with a weight_map") from None
    if not isinstance(placed, dict) or not placed:
        raise ValueError(f"{path}: weight_map is not an object with tensors")
    for name, file in placed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{path}: {name} is placed in {file!r}, which is not a file of this folder")
        if not (folder / file).exists():
            raise ValueError(f"{folder / file}: missing; the index places {name} there")
    return placed


def _read_header(path: Path) -> FileHeader:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(HEADER_LENGTH_BYTES), "little")
        data_bytes = size - HEADER_LENGTH_BYTES - length
        if data_bytes < 0:
            raise ValueError(f"{path}: truncated or not safetensors: {size} bytes do not hold its header")
        try:
            tensors = json.loads(file.read(length))
        except ValueError:
            raise ValueError(f"{path}: not safetensors: its header is not JSON") from None
    if not isinstance(tensors, dict):
        raise ValueError(f"{path}: not safetensors: its header is not an object")
    tensors.pop("__metadata__", None)
    for name, entry in tensors.items():
        if not _is_entry(entry):
            raise ValueError(f"{path}: not safetensors: the header entry of {name} is malformed: {entry}")
    return FileHeader(path, tensors, data_bytes)


def _is_entry(entry: object) -> bool:
    match entry:
        case {"dtype": str(), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            return all(isinstance(size, int) for size in shape) and 0 <= start <= end
    return False


def _check_names(
    specs: dict[str, TensorSpec], headers: dict[str, FileHeader], placed: dict[str, str]
) -> dict[str, str]:
    """Checks that each tensor of specs is in exactly one file, the index's, and that there are no others. Returns name
    -> file."""
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        for name in header.tensors:
            if name not in specs:
                raise ValueError(f"{header.path}: {name} is not a tensor of this configuration")
            if name in file_of:
                raise ValueError(f"{header.path}: {name} is also in {file_of[name]}")
            file_of[name] = file
    for name in specs:
        if placed and name not in placed:
            raise ValueError(f"{next(iter(headers.values())).path.parent / INDEX}: {name} is missing")
        expected = headers[placed.get(name, SINGLE)]
        if name not in expected.tensors:
            raise ValueError(f"{expected.path}: {name} is missing")
    return file_of


def _check_tensor(name: str, spec: TensorSpec, header: FileHeader) -> None:
    entry = header.tensors[name]
    if tuple(entry["shape"]) != spec.shape:
        raise ValueError(f"{header.path}: {name} has shape {entry['shape']}, not {list(spec.shape)}")
    if entry["dtype"] != spec.dtype:
        raise ValueError(f"{header.path}: {name} has dtype {entry['dtype']}, not {spec.dtype}")
    start, end = entry["data_offsets"]
    if end - start != spec.num_bytes:
        raise ValueError(f"{header.path}: {name} has {end - start} bytes, not {spec.num_bytes}")
    if end > header.data_bytes:
        raise ValueError(f"{header.path}: truncated: {name} ends at byte {end} of {header.data_bytes}")


def _check_size(header: FileHeader) -> None:
    """The bytes of all tensors fill the file, so the sum over the files is that over tensor_specs(config)."""
    total = sum(end - start for start, end in (entry["data_offsets"] for entry in header.tensors.values()))
    if total != header.data_bytes:
        raise ValueError(f"{header.path}: holds {header.data_bytes} bytes of data; its tensors have {total}")
