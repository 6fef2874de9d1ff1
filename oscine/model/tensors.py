"""The tensors of a checkpoint: published names, shapes and dtypes, and which part of each a rank has.

Memory plans are made without torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal, NamedTuple

from oscine.kv_group import heads_of_rank
from oscine.model.config import ModelConfig
from oscine.types import ModelSize

if TYPE_CHECKING:
    from torch import Tensor

Dtype = Literal["BF16", "U8"]  # as safetensors spells them
BYTES: dict[Dtype, int] = {"BF16": 2, "U8": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The tensor that a checkpoint must hold under one name."""

    shape: tuple[int, ...]
    dtype: Dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


class Span(NamedTuple):
    """A rank's share of `total` equal units: heads, blocks or tokens."""

    own: range
    length: int  # units in memory, the same on each rank: zeros fill up what `own` lacks
    total: int


@dataclass(frozen=True, slots=True)
class Part:
    """One of the parts into which ranks divide something."""

    rank: int = 0
    num_ranks: int = 1

    def span(self, total: int) -> Span:
        """Shares differ by one unit at most."""
        own = range(total * self.rank // self.num_ranks, total * (self.rank + 1) // self.num_ranks)
        return Span(own, -(-total // self.num_ranks), total)


class Cut(NamedTuple):
    """A rank's share of one dimension of a tensor, in elements; see Span."""

    dimension: int
    start: int
    end: int
    length: int


# What ranks divide, and along which dimension, by the end of a tensor's name.
_DIVIDED = {
    **dict.fromkeys(("q_proj.weight", "q_proj.bias", "self_attn.sinks"), ("query heads", 0)),
    **dict.fromkeys(("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"), ("kv heads", 0)),
    "o_proj.weight": ("query heads", 1),
    **dict.fromkeys(("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"), ("blocks", 1)),
    **dict.fromkeys(("down_proj_blocks", "down_proj_scales"), ("blocks", 2)),
    **dict.fromkeys(("embed_tokens.weight", "lm_head.weight"), ("tokens", 0)),
}
_ADDED_ONCE = {"o_proj.bias": "attention", "down_proj_bias": "experts"}  # to partial sums over ranks: by rank 0
_BLOCK = 32  # intermediate columns that have one MXFP4 scale


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Tensor parallelism divides all three. Attention data parallelism divides the experts only.

    | part | is divided in | where the ranks are too many |
    |---|---|---|
    | attention | query heads, with their KV heads | ranks beside each other have the same KV head |
    | experts | MXFP4 blocks of intermediate columns | zeros fill up the shorter parts |
    | vocabulary | tokens | refused |
    """

    attention: Part = Part()
    experts: Part = Part()
    vocabulary: Part = Part()

    @classmethod
    def of_everything(cls, rank: int, num_ranks: int) -> "Shard":
        """The shard of a rank under tensor parallelism, which divides everything."""
        part = Part(rank, num_ranks)
        return cls(part, part, part)

    def config(self, config: ModelConfig) -> ModelConfig:
        """The configuration of this part, with the whole vocabulary. Raises ValueError if it cannot be divided."""
        config.check_divisible(self.attention.num_ranks)
        spans = self._spans(config)
        return replace(
            config,
            num_attention_heads=spans["query heads"].length,
            num_key_value_heads=spans["kv heads"].length,
            intermediate_size=spans["blocks"].length * _BLOCK,
        )

    def _spans(self, config: ModelConfig) -> dict[str, Span]:
        kv_heads, attention = config.num_key_value_heads, self.attention
        own = heads_of_rank(kv_heads, attention.num_ranks, attention.rank)
        return {
            "query heads": attention.span(config.num_attention_heads),
            "kv heads": Span(own, len(own), kv_heads),
            "blocks": self.experts.span(config.intermediate_size // _BLOCK),
            "tokens": self.vocabulary.span(config.vocab_size),
        }

    def _cut(self, config: ModelConfig, name: str, shape: Sequence[int]) -> Cut | None:
        """None for a tensor that every rank has."""
        for end, (what, dimension) in _DIVIDED.items():
            if name.endswith(end):
                own, length, total = self._spans(config)[what]
                unit = shape[dimension] // total
                return Cut(dimension, own.start * unit, own.stop * unit, length * unit)
        return None

    def specs(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """The tensors of this rank's part, by name."""
        found = tensor_specs(config)
        for name, spec in found.items():
            if cut := self._cut(config, name, spec.shape):
                shape = (*spec.shape[: cut.dimension], cut.length, *spec.shape[cut.dimension + 1 :])
                found[name] = replace(spec, shape=shape)
        return found

    def part(self, config: ModelConfig, name: str, tensor: "Tensor") -> "Tensor":
        """A view where nothing is filled up. Of a file's tensor no more than the part is read."""
        added = next((part for end, part in _ADDED_ONCE.items() if name.endswith(end)), None)
        if added is not None and getattr(self, added).rank:
            return tensor.new_zeros(tensor.shape)
        cut = self._cut(config, name, tensor.shape)
        if cut is None:
            return tensor
        own = tensor.narrow(cut.dimension, cut.start, cut.end - cut.start)
        if own.shape[cut.dimension] == cut.length:
            return own
        shape = (*own.shape[: cut.dimension], cut.length, *own.shape[cut.dimension + 1 :])
        filled_up = own.new_zeros(shape)
        filled_up.narrow(cut.dimension, 0, own.shape[cut.dimension]).copy_(own)
        return filled_up


WHOLE = Shard()  # of a model that one rank computes


def tensor_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor of a published checkpoint of this shape, by name."""
    vocabulary, hidden = config.vocab_size, config.hidden_size
    specs = {
        "model.embed_tokens.weight": TensorSpec((vocabulary, hidden), "BF16"),
        "model.norm.weight": TensorSpec((hidden,), "BF16"),
        "lm_head.weight": TensorSpec((vocabulary, hidden), "BF16"),
    }
    for layer in range(config.num_hidden_layers):
        specs |= {f"model.layers.{layer}.{name}": spec for name, spec in _layer_specs(config, layer).items()}
    return specs


def size_of(config: ModelConfig, *, on_gpu: bool = False) -> ModelSize:
    per_element = {"blocks": 2, "scales": 0}  # values of MXFP4 in a byte, by the end of a tensor's name
    specs = tensor_specs(config)
    values = (prod(spec.shape) * per_element.get(name.rpartition("_")[2], 1) for name, spec in specs.items())
    return ModelSize(sum(values), sum(spec.num_bytes for spec in specs.values()), on_gpu)


def _layer_specs(config: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    hidden, intermediate, experts = config.hidden_size, config.intermediate_size, config.experts[layer]
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    projected = {"q": queries, "k": keys, "v": keys}
    return {
        "input_layernorm.weight": TensorSpec((hidden,), "BF16"),
        **{f"self_attn.{name}_proj.weight": TensorSpec((rows, hidden), "BF16") for name, rows in projected.items()},
        **{f"self_attn.{name}_proj.bias": TensorSpec((rows,), "BF16") for name, rows in projected.items()},
        "self_attn.o_proj.weight": TensorSpec((hidden, queries), "BF16"),
        "self_attn.o_proj.bias": TensorSpec((hidden,), "BF16"),
        "self_attn.sinks": TensorSpec((config.num_attention_heads,), "BF16"),
        "post_attention_layernorm.weight": TensorSpec((hidden,), "BF16"),
        "mlp.router.weight": TensorSpec((experts, hidden), "BF16"),
        "mlp.router.bias": TensorSpec((experts,), "BF16"),
        "mlp.experts.gate_up_proj_blocks": TensorSpec((experts, 2 * intermediate, hidden // 32, 16), "U8"),
        "mlp.experts.gate_up_proj_scales": TensorSpec((experts, 2 * intermediate, hidden // 32), "U8"),
        "mlp.experts.gate_up_proj_bias": TensorSpec((experts, 2 * intermediate), "BF16"),
        "mlp.experts.down_proj_blocks": TensorSpec((experts, hidden, intermediate // 32, 16), "U8"),
        "mlp.experts.down_proj_scales": TensorSpec((experts, hidden, intermediate // 32), "U8"),
        "mlp.experts.down_proj_bias": TensorSpec((experts, hidden), "BF16"),
    }
