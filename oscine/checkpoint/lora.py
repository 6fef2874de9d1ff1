"""A LoRA adapter, as PEFT saves it, merged into the tensors of its base model.

Adapters of the attention's projections, of the router and of the head are read. Those of the experts are refused: PEFT
has several forms of them.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oscine.checkpoint.hub import ADAPTER
from oscine.model.weights import TensorSource, TensorSpec

_WEIGHTS = "adapter_model.safetensors"
_PART = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
_PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "alpha_pattern": {}, "rank_pattern": {}}


class LoraSource:
    """The tensors of `base`, with the adapter in `folder` added. Raises ValueError for one that cannot be merged."""

    def __init__(self, base: TensorSource, folder: Path, specs: dict[str, TensorSpec]) -> None:
        self.base = base
        self._scale = _scale(folder)
        self._parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in _tensors(folder).items():
            found = _PART.fullmatch(name)
            target = f"{found['module']}.weight" if found else name
            if found is None or target not in specs:
                raise ValueError(f"{folder / _WEIGHTS}: {name} is of no matrix that an adapter can be merged into")
            self._parts.setdefault(target, {})[found["part"]] = tensor
        for target, parts in self._parts.items():
            shapes = [tuple(parts[part].shape) for part in "BA" if part in parts]
            if len(shapes) != 2 or (shapes[0][0], shapes[1][1]) != specs[target].shape or shapes[0][1] != shapes[1][0]:
                raise ValueError(f"{folder / _WEIGHTS}: the shapes for {target} are {shapes}, not two factors of it")

    def get(self, name: str) -> Tensor:
        tensor, parts = self.base.get(name), self._parts.get(name)
        if parts is None:
            return tensor
        return (tensor.float() + self._scale * (parts["B"].float() @ parts["A"].float())).to(tensor.dtype)


def _scale(folder: Path) -> float:
    """What the product of the factors is multiplied with."""
    path = folder / ADAPTER
    try:
        values: dict[str, Any] = json.loads(path.read_text())
        rank, alpha = int(values["r"]), float(values["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{path}: not the configuration of a LoRA adapter") from None
    for name, plain in _PLAIN.items():
        if values.get(name, plain) not in (plain, None):
            raise ValueError(f"{path}: {name} must be {plain!r}, not {values[name]!r}")
    if values.get("modules_to_save") or values.get("target_parameters"):
        raise ValueError(f"{path}: modules_to_save and target_parameters (experts) cannot be merged")
    if rank < 1:
        raise ValueError(f"{path}: r must be positive, not {rank}")
    return alpha / (float(torch.tensor(rank).sqrt()) if values.get("use_rslora") else rank)


def _tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / _WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
