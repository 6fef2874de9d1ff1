"""A LoRA adapter, as PEFT saves it, merged into the tensors of its base model.

The product of two factors, [out, rank] and [rank, in], is added to a matrix. The factors of experts come in several
layouts. PEFT has those of all experts of a layer together, [out, rank * experts] and [experts * rank, in]; which of the
layer's two matrices they belong to follows from their shapes. Other tools have a pair for each expert, or for the gates
and ups of each. Merged experts are quantised.
"""

import json
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

_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<factor>[AB])(?:\.default)?(?:\.weight)?")
_WRAPPERS = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.|(?<=^)module\.")
# All experts of a layer together (PEFT's target_parameters), a list of modules per matrix (Unsloth), or a module per
# expert, whose gates and ups may have matrices of their own.
_EXPERTS = re.compile(
    r"(?P<layer>model\.layers\.\d+\.mlp\.experts)"
    r"(?:(?:\.base_layer)*|\.(?P<listed>gate_up|down|gate|up)_projs\.(?P<index>\d{1,5})|(?:\.(?P<number>\d{1,5}))?\."
    r"(?P<which>gate_up|down|gate|up)_proj)"
)
_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # ways to begin that leave the base model other weights
_PLAIN = {"use_dora": False, "bias": "none", "fan_in_fan_out": False}
_BY_PEFT = "merge it by merge_and_unload of PEFT, and serve the result"
_MODULE = re.compile(r"[\w.]+")  # a key of a pattern; PEFT would take any regular expression


class Factors(NamedTuple):
    into: Tensor  # A [rank, in]; of experts [E, rank, in]
    out_of: Tensor  # B [out, rank]; of experts [E, out, rank]
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
        self._factors = read_factors(folder, specs)  # by the tensor or matrix of experts

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
        into, out_of, scale = self._factors[matrix]
        for index, expert in enumerate(experts_of(self._base, matrix)):
            weight = dequantize(*expert) if isinstance(expert, Quantized) else expert.float()
            yield weight + scale * (out_of[index].float() @ into[index].float())


def _adapter(path: Path) -> _Adapter:
    values = read_json(path)
    for name, plain in _PLAIN.items():
        if values.get(name, plain) not in (plain, None):
            wrong = f"{name} must be {json.dumps(plain)}, not {shown(json.dumps(values[name]))}"
            raise ValueError(f"{path}: {wrong}: {_BY_PEFT}")
    begun = values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGE_BASE):
        raise ValueError(
            f"{path}: init_lora_weights {shown(repr(begun))} changes the base model; convert it to LoRA with PEFT first"
        )
    if values.get("modules_to_save"):
        raise ValueError(f"{path}: modules_to_save cannot be merged: {_BY_PEFT}")
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


def read_factors(folder: Path, specs: dict[str, TensorSpec]) -> dict[str, Factors]:
    """The factors of the adapter in a folder, by the tensor, or the matrix of experts, that they change.

    `specs`: the tensors of the base model. Shapes are checked before values are read. Raises ValueError for an adapter
    that cannot be read, or does not suit the model.
    """
    adapter, path = _adapter(folder / ADAPTER), folder / ADAPTER_WEIGHTS
    file, modules = open_tensors(path), dict[str, dict[str, str]]()
    for name in file.keys():  # noqa: SIM118
        match, stored = _FACTOR.fullmatch(_WRAPPERS.sub("", name)), file.get_slice(name)
        if match is None or len(stored.get_shape()) not in (2, 3) or stored.get_dtype() not in FLOATS:
            raise ValueError(f"{path}: {shown(name)} is no factor of a matrix")
        modules.setdefault(match["module"], {})[match["factor"]] = name
    parts: dict[str, dict[_Part, Factors]] = {}
    for module, names in modules.items():
        if len(names) != 2:
            raise ValueError(f"{path}: {shown(module)} has one factor, not two")
        place, part, factors = _part_of(file, path, module, names, adapter, specs)
        if part in parts.setdefault(place, {}):
            raise ValueError(f"{path}: {shown(module)}: other factors are for the same matrix")
        parts[place][part] = factors
    return {place: _whole(found, place, specs) for place, found in parts.items()}


class _Part(NamedTuple):
    """Of a matrix, what a pair of factors changes."""

    expert: int | None = None  # None: all of them, or there are none
    half: str | None = None  # "gate" or "up"; None: both, or there are none


def _part_of(
    file: Any, path: Path, module: str, names: dict[str, str], adapter: _Adapter, specs: dict[str, TensorSpec]
) -> tuple[str, _Part, Factors]:
    shapes = [list(file.get_slice(names[factor]).get_shape()) for factor in "AB"]
    found = _place_of(module, shapes, specs)
    if found is None:
        what = f"{shown(module)}: there is no matrix for factors of {shapes[0]} and {shapes[1]}"
        raise ValueError(f"{path}: {what}")
    place, part, rank = found
    matrix = place.removesuffix(".weight")
    named = matrix if part == _Part() else module  # patterns name what the tool calls it
    expected = adapter.rank_of(named)
    into, out_of = shapes[0][-1], shapes[1][-2]
    if rank > max(into, out_of):
        raise ValueError(f"{path}: {module} has factors of rank {rank}, more than its matrix has rows or columns")
    if rank != expected:
        raise ValueError(f"{path}: {module} has factors of rank {rank}, and {ADAPTER} says {expected}")
    a, b = (file.get_tensor(names[factor]) for factor in "AB")
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise ValueError(f"{path}: {module} has a factor that is not finite")
    if part.expert is None and place not in specs and a.dim() == 2:  # of all experts of a layer, as PEFT has them
        experts = len(a) // rank
        a, b = a.view(experts, rank, into), b.view(out_of, rank, experts).permute(2, 0, 1)
    return place, part, Factors(a, b, adapter.scale_of(named))


def _place_of(module: str, shapes: list[list[int]], specs: dict[str, TensorSpec]) -> tuple[str, _Part, int] | None:
    """The tensor, or the matrix of experts, that factors of these shapes fit; which part of it; and their rank."""
    (*count, rank, into), (*same_count, out_of, same_rank) = shapes
    if count != same_count or rank != same_rank:
        return None
    name = f"{module.removesuffix('.linear') if module.endswith('.router.linear') else module}.weight"
    if name in specs:
        return (name, _Part(), rank) if specs[name].shape == (out_of, into) and not count else None
    if (found := _EXPERTS.fullmatch(module)) is None:
        return None
    fitting = []
    which = found["which"] or found["listed"]
    half = which if which in ("gate", "up") else None
    number = found["number"] or found["index"]
    for kind in ("gate_up", "down"):
        matrix = f"{found['layer']}.{kind}_proj"
        if f"{matrix}_scales" not in specs or which not in (None, kind, *(("gate", "up") if kind == "gate_up" else ())):
            continue
        experts, rows, blocks = specs[f"{matrix}_scales"].shape
        if (out_of, into) != (rows // 2 if half else rows, blocks * BLOCK):
            continue
        if number is not None:
            if not count and int(number) < experts:
                fitting.append((matrix, _Part(int(number), half), rank))
        elif count == [experts]:
            fitting.append((matrix, _Part(None, half), rank))
        elif not count and rank % experts == 0:
            fitting.append((matrix, _Part(None, half), rank // experts))
    return fitting[0] if len(fitting) == 1 else None


def _whole(parts: dict[_Part, Factors], place: str, specs: dict[str, TensorSpec]) -> Factors:
    """The factors of a whole matrix, of all its experts. Experts without factors have zeros."""
    if (whole := parts.get(_Part())) is not None and len(parts) == 1:
        return whole
    experts, rows, blocks = specs[f"{place}_scales"].shape
    halves = {half for _, half in parts}
    rank = max(factors.into.shape[-2] for factors in parts.values())
    places = {half: i * rank for i, half in enumerate(sorted(halves, key=str))}  # ranks of halves are beside each other
    a = torch.zeros(experts, rank * len(halves), blocks * BLOCK)
    b = torch.zeros(experts, rows, rank * len(halves))
    for (expert, half), factors in parts.items():
        own, first = slice(None) if expert is None else expert, places[half]
        end = first + factors.into.shape[-2]
        at = slice(None) if half is None else slice(int(half == "up"), None, 2)  # rows of gate and up alternate
        a[own, first:end] = factors.into.float()
        b[own, at, first:end] = factors.scale * factors.out_of.float()
    return Factors(a, b, 1.0)
