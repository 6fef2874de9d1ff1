"""Which files of a folder have the weights. Nothing is opened but the index."""

import os
import re
from pathlib import Path

from oscine.checkpoint.hub import INDEX, SINGLE
from oscine.checkpoint.layout import why_no_weights
from oscine.system.model_files import is_file_name, read_json, shown

ADAPTER_WEIGHTS = "adapter_model.safetensors"  # of PEFT
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def placement(folder: Path) -> dict[str, str]:
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


def weight_files(folder: Path) -> list[str]:
    """The files of weights: those of the index, or the one file, or all shards that there are."""
    names = set(placement(folder).values()) or {SINGLE} & set(os.listdir(folder)) or _shards(folder)
    if not names:
        raise ValueError(f"{folder}: holds no weights in safetensors{why_no_weights(folder)}")
    return sorted(names)


def _shards(folder: Path) -> set[str]:
    """Without an index. Raises ValueError if one of numbered shards is missing."""
    names = {path.name for path in folder.glob("*.safetensors") if is_file_name(path.name)} - {ADAPTER_WEIGHTS}
    numbers: dict[tuple[str, str], set[int]] = {}  # by what is before the number, and the number of shards
    for found in filter(None, map(_SHARD.fullmatch, names)):
        numbers.setdefault((found[1], found[3]), set()).add(int(found[2]))
    for (stem, count), own in numbers.items():
        first = min(1, *own)  # some tools number from 0
        for number in range(first, int(count) + first):
            if number not in own:
                raise ValueError(f"{folder / f'{stem}-{number:05d}-of-{count}.safetensors'}: missing")
    return names
