"""Where the factors of a low-rank adapter are in one flat array, in host memory and on the device.

All adapters of an engine have the same layout. Factors are filled up with zeros to the rank of the layout. The scale of
a product is part of its second factor. One of several ranks has a part of each factor, as it has of the matrix: of the
second factor the rows, or of the first one the columns.

Shape suffixes as in ops/interface.py; R the rank, N rows of gates and ups in the order of the backend.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from oscine.extensions.formats.lora import Factors
from oscine.model.config import ModelConfig
from oscine.model.tensors import Shard

_ALIGNED = 64  # elements


class Field(NamedTuple):
    offset: int  # elements
    shape: tuple[int, ...]


# The matrices of a layer by their names in a checkpoint: the part of settings.adapters.TARGETS, and the factors' names.
PLACES = {
    **{f"self_attn.{which}_proj.weight": ("attention", "qkv") for which in "qkv"},
    "self_attn.o_proj.weight": ("attention", "out"),
    "mlp.router.weight": ("router", "router"),
    "mlp.experts.gate_up_proj": ("experts", "gate_up"),
    "mlp.experts.down_proj": ("experts", "down"),
}


def place_of(name: str) -> tuple[int, str] | None:
    """The layer of a tensor or a matrix of experts, and its name there; None for what no adapter may change."""
    prefix, _, rest = name.partition("layers.")
    layer, _, place = rest.partition(".")
    return (int(layer), place) if prefix == "model." and layer.isdecimal() and place in PLACES else None


def targets_of(names: Collection[str]) -> list[str]:
    """The parts of layers that these tensors belong to."""
    found = {PLACES[place[1]][0] for name in names if (place := place_of(name)) is not None}
    return sorted(found)


@dataclass(frozen=True, slots=True)
class Layout:
    layers: tuple[Mapping[str, Field], ...]  # by the names of factors, such as qkv_in and qkv_out
    size: int  # elements
    rank: int  # R
    qkv_rows: tuple[int, int, int]  # of queries, keys and values

    @classmethod
    def of(cls, config: ModelConfig, targets: Collection[str], rank: int, gate_up_rows: int | None = None) -> "Layout":
        """`config`: of the rank. `gate_up_rows`: N; None: as published."""
        heads, groups, head = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        queries, keys = heads * head, groups * head
        hidden, inner = config.hidden_size, config.intermediate_size
        offset, layers = 0, []
        for experts in config.experts:
            shapes: dict[str, tuple[int, ...]] = {}
            if "attention" in targets:
                shapes |= {"qkv_in": (3 * rank, hidden), "qkv_out": (queries + 2 * keys, rank)}
                shapes |= {"out_in": (rank, queries), "out_out": (hidden, rank)}
            if "router" in targets:
                shapes |= {"router_in": (rank, hidden), "router_out": (experts, rank)}
            if "experts" in targets:
                rows = gate_up_rows or 2 * inner
                shapes |= {"gate_up_in": (experts, rank, hidden), "gate_up_out": (experts, rows, rank)}
                shapes |= {"down_in": (experts, rank, inner), "down_out": (experts, hidden, rank)}
            fields = {}
            for name, shape in shapes.items():
                fields[name] = Field(offset, shape)
                offset += -(-prod(shape) // _ALIGNED) * _ALIGNED
            layers.append(fields)
        return cls(tuple(layers), offset, rank, (queries, keys, keys))

    def view(self, memory: Tensor, layer: int, name: str) -> Tensor | None:
        """A factor in memory [..., size]: [..., *shape]. None: no adapter has it."""
        field = self.layers[layer].get(name)
        if field is None:
            return None
        return memory.narrow(-1, field.offset, prod(field.shape)).view(*memory.shape[:-1], *field.shape)

    def of_layers(self, layers: Sequence[int]) -> "Layout":
        return Layout(tuple(self.layers[i] for i in layers), self.size, self.rank, self.qkv_rows)


@dataclass(frozen=True, slots=True)
class Packing:
    """How the factors of a checkpoint become a flat array."""

    layout: Layout
    config: ModelConfig  # of the whole model
    shard: Shard
    gate_up_order: Tensor | None = None  # rows of a rank's gates and ups in the backend's order, -1: zeros

    def pack(self, factors: Mapping[str, Factors], out: Tensor) -> None:
        """Writes the flat array [size], which has zeros. Factors must suit the layout."""
        for name, (into, out_of, scale) in factors.items():
            found = place_of(name)
            assert found is not None
            layer, place = found
            kind = PLACES[place][1]
            first, second = self.layout.view(out, layer, f"{kind}_in"), self.layout.view(out, layer, f"{kind}_out")
            assert first is not None
            assert second is not None
            into, out_of = self._part(name, into, out_of.float() * scale)
            rank = into.shape[-2]
            if kind == "qkv":
                which = "qkv".index(place[len("self_attn.")])
                start = which * self.layout.rank
                begin = sum(self.layout.qkv_rows[:which])
                first, second = first[start:], second[begin : begin + self.layout.qkv_rows[which]]
            first[..., :rank, : into.shape[-1]] = into
            second[..., : out_of.shape[-2], :rank] = out_of

    def _part(self, name: str, into: Tensor, out_of: Tensor) -> tuple[Tensor, Tensor]:
        """The rank's part of both factors."""
        if name.endswith("gate_up_proj"):
            out_of = self.shard.part(self.config, f"{name}_bias", out_of)
            if self.gate_up_order is not None:
                order = self.gate_up_order
                out_of = torch.where((order >= 0)[:, None], out_of[:, order.clamp(min=0)], 0)
        elif name.endswith("down_proj"):
            into = self.shard.part(self.config, f"{name}_scales", into)
        elif name.endswith("o_proj.weight"):
            into = self.shard.part(self.config, name, into)
        elif not name.endswith("router.weight"):
            out_of = self.shard.part(self.config, name, out_of)
        return into, out_of
