"""A LoRA adapter, as PEFT saves it, merged into the tensors of its base model.

The product of two factors, [out, rank] and [rank, in], is added to a matrix. The factors of experts are for all experts
of a layer together, [out, rank * experts] and [experts * rank, in]. Which of the layer's two matrices they belong to
follows from their shapes. Merged experts are quantised.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from oscine.checkpoint.folder import Checkpoint
from oscine.checkpoint.hub import ADAPTER
from oscine.checkpoint.quantize import QuantizationError, Quantized, quantize
from oscine.model.weights import TensorSource, TensorSpec
from oscine.ops.moe.mxfp4 import BLOCK, dequantize

_WEIGHTS = "adapter_model.safetensors"
_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)(?:\.base_layer)?")
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that leave the base model other weights
_PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "alpha_pattern": {}, "rank_pattern": {}}


class Factors(NamedTuple):
    into: Tensor  # A
    out_of: Tensor  # B


class LoraSource:
    """The tensors of `base`, with the adapter in `folder` added. Raises ValueError for one that cannot be merged."""

    def __init__(self, base: TensorSource, folder: Path, specs: dict[str, TensorSpec]) -> None:
        self._base, self._scale = base, _scale(folder)
        self._own_errors: dict[str, QuantizationError] = {}
        self._newest: tuple[str, Quantized] | None = None
        self._factors: dict[str, Factors] = {}  # by the tensor, or by the matrix of experts
        for module, factors in _read(folder).items():
            name = _target(module, factors, specs)
            if name is None or name in self._factors:
                shapes = " and ".join(str(list(factor.shape)) for factor in factors)
                raise ValueError(f"{folder / _WEIGHTS}: {module}: there is no matrix for factors of {shapes}")
            self._factors[name] = factors

    @property
    def errors(self) -> dict[str, QuantizationError]:
        return (self._base.errors if isinstance(self._base, Checkpoint) else {}) | self._own_errors

    def get(self, name: str) -> Tensor:
        matrix, _, part = name.rpartition("_")
        if matrix in self._factors and part in ("blocks", "scales"):
            quantized = self._quantized(matrix)
            return quantized.blocks if part == "blocks" else quantized.scales
        tensor, factors = self._base.get(name), self._factors.get(name)
        if factors is None:
            return tensor
        delta = self._scale * (factors.out_of.float() @ factors.into.float())
        return (tensor.float() + delta).to(tensor.dtype)

    def _quantized(self, matrix: str) -> Quantized:
        """Expert by expert, as all of them in floats would take much memory. The newest matrix is kept."""
        if self._newest is None or self._newest[0] != matrix:
            blocks, scales = (self._base.get(f"{matrix}_{part}") for part in ("blocks", "scales"))
            floats = self._base.floats(matrix) if isinstance(self._base, Checkpoint) else None
            made, error = [], QuantizationError()
            for i in range(len(blocks)):
                weight = dequantize(blocks[i], scales[i]) if floats is None else floats[i].float()
                quantized, own = quantize((weight + self._scale * self._of_expert(matrix, i, len(blocks)))[None])
                made.append(quantized)
                error += own
            self._newest = matrix, Quantized(*map(torch.cat, zip(*made, strict=True)))
            self._own_errors[matrix] = error
        return self._newest[1]

    def _of_expert(self, matrix: str, index: int, num_experts: int) -> Tensor:
        """[out, in]. The ranks of an expert are together in one factor, and apart in the other."""
        into, out_of = self._factors[matrix]
        rank = len(into) // num_experts
        return out_of[:, index::num_experts].float() @ into[index * rank : (index + 1) * rank].float()


def _target(module: str, factors: Factors, specs: dict[str, TensorSpec]) -> str | None:
    """The tensor, or the matrix of experts, that the factors fit."""
    (rank, into), (out_of, same_rank) = factors.into.shape, factors.out_of.shape
    if rank != same_rank:
        return None
    name = f"{module}.weight"
    if name in specs:
        return name if specs[name].shape == (out_of, into) else None
    if (found := _EXPERTS.fullmatch(module)) is None:
        return None
    fitting = []
    for matrix in (f"{found[1]}.{which}_proj" for which in ("gate_up", "down")):
        experts, rows, blocks = specs[f"{matrix}_scales"].shape
        if (out_of, into) == (rows, blocks * BLOCK) and rank % experts == 0:
            fitting.append(matrix)
    return fitting[0] if len(fitting) == 1 else None


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
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights {begun!r} changes the base model; convert it to LoRA with PEFT first"
        )
    if values.get("modules_to_save"):
        raise ValueError(f"{path}: modules_to_save cannot be merged")
    if rank < 1:
        raise ValueError(f"{path}: r must be positive, not {rank}")
    return float(alpha / (rank**0.5 if values.get("use_rslora") else rank))


def _read(folder: Path) -> dict[str, Factors]:
    """The factors by the name of their module."""
    path = folder / _WEIGHTS
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
    found: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or tensor.dim() != 2:
            raise ValueError(f"{path}: {name} is no factor of a matrix")
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    for module, factors in found.items():
        if len(factors) != 2:
            raise ValueError(f"{path}: {module} has one factor, not two")
    return {module: Factors(factors["A"], factors["B"]) for module, factors in found.items()}
