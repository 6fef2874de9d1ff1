"""The tensors of a folder that another tool wrote, under their published names."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from oscine.checkpoint.folder import Stored, check_tensor
from oscine.checkpoint.layout import EMBEDDING, FLOATS, HEAD, is_kv_scale, stored_specs
from oscine.checkpoint.quantize import NotFiniteError, Quantized, QuantizingSource
from oscine.extensions.formats.layouts.matrix import Matrix
from oscine.extensions.formats.layouts.table import NEEDLESS, NEEDLESS_MODULES, check_names, common_name, tools_of
from oscine.model.config import ModelConfig
from oscine.ops.moe.mxfp4 import BLOCK, dequantize
from oscine.system.model_files import shown

_SPLIT = re.compile(r"(.+?)\.(weight\..+|[^.]+)")
_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(gate_up|down)_proj_(blocks|scales|bias)")
_HALVES = {"gate_up": (("gate_up",), ("gate", "up")), "down": (("down",),)}


class _Form(NamedTuple):
    """How the experts of a layer are stored: all in one, or apart; the rows of gate and up interleaved, or apart."""

    modules: list[list[str]]  # of each expert, or of all together: one, or those of gate and up
    apart: bool


class ToolFolder(QuantizingSource):
    """Raises ValueError if any tensor is missing, misshapen, of an unknown type, or not of this model."""

    def __init__(self, stored: Stored, config: ModelConfig) -> None:
        super().__init__()
        self._stored = stored
        self.kv_scales = 0  # tensors that are left out
        self._modules: dict[str, dict[str, str]] = {}  # name -> part -> name of the tensor
        for name in stored.files:
            self._sort(name)
        self._forms: dict[str, _Form] = {}  # by the matrix of experts
        self._matrices: dict[str, Matrix] = {}
        used = set[tuple[str, str]]()
        for name, spec in stored_specs(config, {f"{module}.weight" for module in self._modules}).items():
            if _EXPERTS.fullmatch(name):
                used |= self._find_experts(name, spec.shape)
            else:
                used |= self._find(name, spec.shape)
        for module, parts in self._modules.items():
            for part, name in parts.items():
                if (module, part) not in used:
                    raise ValueError(f"{stored.files[name]}: {shown(name)} is not a tensor of this configuration")

    # ---- finding and checking ----

    def _sort(self, name: str) -> None:
        path = self._stored.files[name]
        check_names(path, name)
        common = common_name(name)
        if is_kv_scale(common):
            self.kv_scales += 1
            return
        found = _SPLIT.fullmatch(common)
        module, part = found.groups() if found else ("", common)
        if NEEDLESS.fullmatch(part) or NEEDLESS_MODULES.fullmatch(module):
            return
        if part in (parts := self._modules.setdefault(module, {})):
            raise ValueError(f"{path}: {shown(name)} and {shown(parts[part])} are the same tensor")
        parts[part] = name

    def _find(self, name: str, shape: tuple[int, ...]) -> set[tuple[str, str]]:
        """What belongs to a published tensor that is not of experts, as modules and parts."""
        module, _, part = name.rpartition(".")
        parts = self._modules.get(module, {})
        if part != "weight" or len(shape) == 1:
            self._check_plain(name, module, part, shape)
            return {(module, part)}
        if not parts.keys() - {"bias"}:
            raise self._missing(name)
        self._matrices[module] = Matrix.find(self._stored, parts, shape)
        return {(module, part) for part in parts if part != "bias"}

    def _check_plain(self, said: str, module: str, part: str, shape: tuple[int, ...]) -> None:
        name = self._modules.get(module, {}).get(part)
        if name is None:
            raise self._missing(said)
        check_tensor(name, shape, FLOATS, self._stored.files[name], self._stored.header(name))

    def _missing(self, name: str) -> ValueError:
        return ValueError(f"{self._stored.first}: {name} is missing")

    def _find_experts(self, name: str, shape: tuple[int, ...]) -> set[tuple[str, str]]:
        experts, which, part = _groups(name)
        if part == "scales":  # they were found with the blocks
            return set()
        matrix = f"{experts}.{which}_proj"
        if matrix not in self._forms:
            self._forms[matrix] = self._form(name, experts, which, shape[0])
        form = self._forms[matrix]
        used = set[tuple[str, str]]()
        for modules in form.modules:
            for module in modules:
                whole = () if form.apart else shape[:1]
                rows = shape[1] // len(modules)
                if part == "bias":
                    self._check_plain(f"{module}.bias", module, "bias", (*whole, rows))
                    used.add((module, "bias"))
                elif not (parts := self._modules.get(module, {})).keys() - {"bias"}:
                    raise self._missing(f"{module}.weight" if form.apart else name)
                else:
                    self._matrices[module] = Matrix.find(self._stored, parts, (*whole, rows, shape[2] * BLOCK))
                    used |= {(module, part) for part in parts if part != "bias"}
        return used

    def _form(self, name: str, experts: str, which: str, count: int) -> _Form:
        """Raises ValueError if there is none, or more than one."""
        found: list[tuple[str, _Form]] = []
        for halves in _HALVES[which]:
            for apart in (False, True):
                prefixes = [f"{index}." for index in range(count)] if apart else [""]
                form = _Form([[f"{experts}.{prefix}{half}_proj" for half in halves] for prefix in prefixes], apart)
                held = (
                    self._modules[module] for modules in form.modules for module in modules if module in self._modules
                )
                if first := next((part for parts in held for part in parts.values()), None):
                    found.append((first, form))
        if not found:
            raise self._missing(name)
        if len(found) > 1:
            names = [first for first, _ in found]
            said = " and ".join(f"{shown(one)} ({tools_of(one)})" for one in names)
            raise ValueError(f"{self._stored.files[names[0]]}: two layouts are mixed: {said}")
        return found[0][1]

    # ---- reading ----

    def get(self, name: str) -> Tensor:
        """On the CPU, in bfloat16 or, of experts, packed."""
        if _EXPERTS.fullmatch(name):
            experts, which, part = _groups(name)
            return self._bias(f"{experts}.{which}_proj") if part == "bias" else self._packed(name)
        module, _, part = name.rpartition(".")
        if name == HEAD and module not in self._matrices:
            module = EMBEDDING.rpartition(".")[0]
        if part != "weight" or module not in self._matrices:
            return self._plain(module, part)
        matrix = self._matrices[module]
        values = matrix.values()
        return (dequantize(*values) if isinstance(values, Quantized) else values).bfloat16()

    def _plain(self, module: str, part: str) -> Tensor:
        return self._stored.get(self._modules[module][part]).bfloat16()

    def _packed(self, name: str) -> Tensor:
        matrix = name.rpartition("_")[0]
        try:
            return self.quantized(name)
        except NotFiniteError as error:  # others name their tensors
            path = self._matrices[self._forms[matrix].modules[0][0]].path
            raise ValueError(f"{path}: {matrix}: {error}") from None

    def experts(self, matrix: str) -> Iterator[Quantized | Tensor]:
        form = self._forms[matrix]
        if form.apart:
            yield from (self._joined([self._matrices[one].values() for one in modules]) for modules in form.modules)
            return
        matrices = [self._matrices[one] for one in form.modules[0]]
        yield from (self._joined([one.values(i) for one in matrices]) for i in range(matrices[0].shape[0]))

    def _joined(self, halves: list[Quantized | Tensor]) -> Quantized | Tensor:
        """The rows of gate and up, interleaved."""
        if len(halves) == 1:
            return halves[0]
        packed = [half for half in halves if isinstance(half, Quantized)]
        if len(packed) == len(halves):
            return Quantized(*(torch.stack(parts, dim=1).flatten(0, 1) for parts in zip(*packed, strict=True)))
        floats = [dequantize(*half) if isinstance(half, Quantized) else half.float() for half in halves]
        return torch.stack(floats, dim=1).flatten(0, 1)

    def _bias(self, matrix: str) -> Tensor:
        form = self._forms[matrix]
        made = [torch.stack([self._plain(one, "bias") for one in modules], -1).flatten(-2) for modules in form.modules]
        return torch.stack(made) if form.apart else made[0]


def _groups(name: str) -> tuple[str, ...]:
    """The parts of the name of a published tensor of experts."""
    found = _EXPERTS.fullmatch(name)
    assert found is not None
    return found.groups()
