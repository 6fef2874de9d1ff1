"""A LoRA adapter, as PEFT saves it, merged into the tensors of its base model.

The product of two factors, [out, rank] and [rank, in], is added to a matrix. The factors of experts are for all experts
of a layer together, [out, rank * experts] and [experts * rank, in]. Which of the layer's two matrices they belong to
follows from their shapes. Merged experts are quantised.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from oscine.checkpoint.files import ADAPTER_WEIGHTS
from oscine.checkpoint.folder import open_tensors
from oscine.checkpoint.hub import ADAPTER
from oscine.checkpoint.layout import FLOATS
from oscine.checkpoint.quantize import NotFiniteError, Quantized, QuantizingSource, errors_of, experts_of
from oscine.model.tensors import TensorSpec
from oscine.model.weights import TensorSource
from oscine.ops.moe.mxfp4 import BLOCK, dequantize
from oscine.system.model_files import read_json, shown

_FACTOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)(?:\.base_layer)?")
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that leave the base model other weights
_PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False}
_MODULE = re.compile(r"[\w.]+")  # a key of a pattern; PEFT would take any regular expression


class Factors(NamedTuple):
    into: Tensor  # A
    out_of: Tensor  # B
    scale: float  # of their product


@dataclass(frozen=True, slots=True)
class _Adapter:
    """What adapter_config.json says of the factors of a module."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rank_stabilised: bool

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (rank**0.5 if self.rank_stabilised else rank)


_T = TypeVar("_T")


def _by_pattern(pattern: dict[str, _T], module: str, default: _T) -> _T:
    """The value of the first key that is the module's name, or the end of it after a dot."""
    return next((value for key, value in pattern.items() if f".{module}".endswith(f".{key}")), default)


class LoraSource(QuantizingSource):
    """The tensors of `base`, with the adapter in `folder` added. Raises ValueError for one that cannot be merged."""

    def __init__(self, base: TensorSource, folder: Path, specs: dict[str, TensorSpec]) -> None:
        super().__init__()
        self._base = base
        self._path = folder / ADAPTER_WEIGHTS
        self._factors = _read(self._path, _adapter(folder / ADAPTER), specs)  # by the tensor or matrix of experts
        self._num_experts = {name: specs[f"{name}_scales"].shape[0] for name in self._factors if name not in specs}

    def get(self, name: str) -> Tensor:
        matrix, _, part = name.rpartition("_")
        if part in ("blocks", "scales") and matrix in self._factors:
            try:
                return self.quantized(name)
            except NotFiniteError as unfit:
                raise ValueError(f"{self._path}: with it, in {matrix} {unfit}") from None
        tensor, factors = self._base.get(name), self._factors.get(name)
        self.errors |= errors_of(self._base)
        if factors is None:
            return tensor
        delta = factors.scale * (factors.out_of.float() @ factors.into.float())
        merged = (tensor.float() + delta).to(tensor.dtype)
        if not torch.isfinite(merged).all():
            raise ValueError(f"{self._path}: with it, {name} is not finite")
        return merged

    def experts(self, matrix: str) -> Iterator[Quantized | Tensor]:
        num_experts = self._num_experts[matrix]
        for index, expert in enumerate(experts_of(self._base, matrix)):
            weight = dequantize(*expert) if isinstance(expert, Quantized) else expert.float()
            yield weight + self._of_expert(matrix, index, num_experts)

    def _of_expert(self, matrix: str, index: int, num_experts: int) -> Tensor:
        """[out, in]. The ranks of an expert are together in one factor, and apart in the other."""
        into, out_of, scale = self._factors[matrix]
        rank = len(into) // num_experts
        return scale * (out_of[:, index::num_experts].float() @ into[index * rank : (index + 1) * rank].float())


def _adapter(path: Path) -> _Adapter:
    values = read_json(path)
    for name, plain in _PLAIN.items():
        if values.get(name, plain) not in (plain, None):
            raise ValueError(f"{path}: {name} must be {plain!r}, not {shown(repr(values[name]))}")
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights {shown(repr(begun))} changes the base model; convert it to LoRA with PEFT first"
        )
    if values.get("modules_to_save"):
        raise ValueError(f"{path}: modules_to_save cannot be merged")
    ranks, alphas = (_pattern(path, name, values.get(name)) for name in ("rank_pattern", "alpha_pattern"))
    for name, rank in [("r", values.get("r")), *((f"rank_pattern.{key}", rank) for key, rank in ranks.items())]:
        _require(type(rank) is int and rank > 0, path, name, "a positive integer", rank)
    for name, alpha in [
        ("lora_alpha", values.get("lora_alpha")),
        *((f"alpha_pattern.{key}", own) for key, own in alphas.items()),
    ]:
        _require(type(alpha) in (int, float), path, name, "a number", alpha)
    return _Adapter(values["r"], values["lora_alpha"], ranks, alphas, bool(values.get("use_rslora")))


def _pattern(path: Path, name: str, found: Any) -> dict[str, Any]:
    """What a pattern says for modules, by the ends of their names."""
    known = found is None or (isinstance(found, dict) and all(map(_MODULE.fullmatch, found)))
    _require(known, path, name, "an object with names of modules", found)
    return found or {}


def _require(condition: bool, path: Path, name: str, rule: str, value: object) -> None:
    if not condition:
        what = f"{shown(name)} must be {rule}, not {shown(repr(value))}"
        raise ValueError(f"{path}: not the configuration of a LoRA adapter that can be merged: {what}")


def _read(path: Path, adapter: _Adapter, specs: dict[str, TensorSpec]) -> dict[str, Factors]:
    """The factors by the tensor, or the matrix of experts, that they change. Shapes are checked before values are
    read."""
    file, names = open_tensors(path), dict[str, dict[str, str]]()
    for name in file.keys():  # noqa: SIM118
        match, stored = _FACTOR.fullmatch(name), file.get_slice(name)
        if match is None or len(stored.get_shape()) != 2 or stored.get_dtype() not in FLOATS:
            raise ValueError(f"{path}: {shown(name)} is no factor of a matrix")
        names.setdefault(match["module"], {})[match["factor"]] = name
    found: dict[str, Factors] = {}
    for module, parts in names.items():
        if len(parts) != 2:
            raise ValueError(f"{path}: {shown(module)} has one factor, not two")
        shapes = [file.get_slice(parts[factor]).get_shape() for factor in "AB"]
        target = _target(module, shapes, specs)
        if target is None or target[0] in found:
            what = f"{shown(module)}: there is no matrix for factors of {shapes[0]} and {shapes[1]}"
            raise ValueError(f"{path}: {what}")
        matrix, rank = target[0].removesuffix(".weight"), target[1]
        expected = adapter.rank_of(matrix)
        if rank > max(shapes[0][1], shapes[1][0]):
            raise ValueError(f"{path}: {module} has factors of rank {rank}, more than its matrix has rows or columns")
        if rank != expected:
            raise ValueError(f"{path}: {module} has factors of rank {rank}, and {ADAPTER} says {expected}")
        into, out_of = (file.get_tensor(parts[factor]) for factor in "AB")
        if not (torch.isfinite(into).all() and torch.isfinite(out_of).all()):
            raise ValueError(f"{path}: {module} has a factor that is not finite")
        found[target[0]] = Factors(into, out_of, adapter.scale_of(matrix))
    return found


def _target(module: str, shapes: list[list[int]], specs: dict[str, TensorSpec]) -> tuple[str, int] | None:
    """The tensor, or the matrix of experts, that factors of these shapes fit, and their rank for one matrix."""
    (rank, into), (out_of, same_rank) = shapes
    if rank != same_rank:
        return None
    name = f"{module}.weight"
    if name in specs:
        return (name, rank) if specs[name].shape == (out_of, into) else None
    if (found := _EXPERTS.fullmatch(module)) is None:
        return None
    fitting = []
    matrices = [f"{found[1]}.{which}_proj" for which in ("gate_up", "down")]
    for matrix in (one for one in matrices if f"{one}_scales" in specs):
        experts, rows, blocks = specs[f"{matrix}_scales"].shape
        if (out_of, into) == (rows, blocks * BLOCK) and rank % experts == 0:
            fitting.append((matrix, rank // experts))
    return fitting[0] if len(fitting) == 1 else None
