"""Checkpoints in the published layout, written for tests."""

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from oscine.checkpoint.hub import CONFIG, INDEX, SINGLE
from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs


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
