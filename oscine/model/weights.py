"""The weights of a model on their device, and how they are built tensor by tensor from any source.

Knows the published names, shapes and dtypes, and which part of each tensor a rank has. Must not know files, folders or
how a tensor comes about.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from tqdm import tqdm

from oscine.kv_group import heads_of_rank
from oscine.model.config import ModelConfig
from oscine.model.packed import PackedFiles, page_out
from oscine.model.staging import Staging
from oscine.ops.interface import MxExperts, Ops
from oscine.types import ModelSize

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

    def part(self, config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
        """A view where nothing is filled up. Of a file's tensor no more than the part is read."""
        added = next((part for end, part in _ADDED_ONCE.items() if name.endswith(end)), None)
        if added is not None and getattr(self, added).rank:
            return torch.zeros_like(tensor)
        cut = self._cut(config, name, tensor.shape)
        if cut is None:
            return tensor
        own = tensor.narrow(cut.dimension, cut.start, cut.end - cut.start)
        missing = cut.length - (cut.end - cut.start)
        after = (0, 0) * (tensor.dim() - 1 - cut.dimension)
        return functional.pad(own, (*after, 0, missing)) if missing else own


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. F = (Q + 2G) * D: all query heads, then key heads, then value heads."""

    input_norm_H: Tensor
    qkv_weight_FH: Any  # Tensor, or the result of Ops.prepare_projection
    qkv_bias_F: Tensor
    sinks_Q: Tensor
    out_weight: Any  # [H, Q * D], as qkv_weight_FH
    out_bias_H: Tensor
    post_attention_norm_H: Tensor
    router_weight_EH: Tensor
    router_bias_E: Tensor
    experts: Any  # MxExperts, or the result of Ops.prepare_experts


@dataclass(frozen=True, slots=True)
class Weights:
    """All float tensors share one dtype, and one device except for weights on the host. Packed experts are uint8."""

    embed_VH: Tensor  # may be in pinned host memory
    layers: list[LayerWeights]
    norm_H: Tensor
    head_VH: Any  # Tensor, or the result of Ops.prepare_dense
    prepared_head: Any = None  # made from head_VH by Ops.chooser, which also needs it

    @property
    def device(self) -> torch.device:
        """The device that computes the steps."""
        return self.norm_H.device


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def get(self, name: str) -> Tensor:
        """The tensor under its published name, in its published dtype, on any device."""
        ...


class HostPlace(Protocol):
    """Layers whose experts stay in host memory (oscine/ops/moe/on_host.py)."""

    layers: Collection[int]  # indices

    def prepare_experts(self, experts: MxExperts) -> Any:
        """Prepares the published experts of one of these layers, on the host."""
        ...

    def loaded(self) -> None:
        """Called once, after the last layer."""
        ...


# In the order of MxExperts.
_EXPERTS = [f"{matrix}_proj_{part}" for matrix in ("gate_up", "down") for part in ("blocks", "scales", "bias")]


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


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    *,
    ops: Ops | None = None,
    shard: Shard = Shard(),
    on_host: HostPlace | None = None,
    embedding_on_host: bool = False,
    files: PackedFiles | None = None,
    progress: bool = False,
) -> Weights:
    """Copies the shard's part of every tensor to the device, layer by layer. Casts floats to dtype; MXFP4 stays packed.

    With `ops`, repacks the experts of each layer for them as soon as they are loaded, and prepares the head. Experts of
    the layers `on_host` are never copied to the device. With `embedding_on_host`, the embedding stays in pinned host
    memory. With `files`, large prepared weights are mapped from there.
    """
    loader = _Loader(config, source, Staging(device), dtype, shard, ops, files, shard.specs(config))
    on_cpu = replace(loader, staging=Staging(torch.device("cpu")), ops=None, files=None)
    layers = []
    for index in tqdm(range(config.num_hidden_layers), desc="Loading layers", disable=None if progress else True):
        prefix = f"model.layers.{index}."
        if on_host is not None and index in on_host.layers:
            experts = on_host.prepare_experts(on_cpu.experts(prefix))
        else:
            experts = loader.experts(prefix)
        layers.append(loader.layer(prefix, experts))
    if on_host is not None:
        on_host.loaded()
    head_VH = loader.head("lm_head.weight")
    embedding = "model.embed_tokens.weight"
    return Weights(
        embed_VH=on_cpu.get(embedding).pin_memory() if embedding_on_host else loader.embedding(embedding),
        layers=layers,
        norm_H=loader.get("model.norm.weight"),
        head_VH=head_VH,
        prepared_head=None if ops is None else ops.chooser.prepare(head_VH),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    config: ModelConfig
    source: TensorSource
    staging: Staging
    dtype: torch.dtype
    shard: Shard
    ops: Ops | None
    files: PackedFiles | None
    specs: Mapping[str, TensorSpec]

    def published(self, name: str) -> Tensor:
        return self.shard.part(self.config, name, self.source.get(name))

    def cast(self, published: Tensor) -> Tensor:
        tensor = self.staging.bring(published)
        return tensor if tensor.dtype == torch.uint8 else tensor.to(self.dtype)

    def get(self, *names: str) -> Tensor:
        """One tensor, or several concatenated along their first dimension, on the device."""
        return self.cast(_joined([self.published(name) for name in names]))

    def head(self, name: str) -> Any:
        return self.dense(None if self.ops is None else self.ops.prepare_dense, name)

    def projection(self, *names: str) -> Any:
        return self.dense(None if self.ops is None else self.ops.prepare_projection, *names)

    def dense(self, prepare: Callable[[Tensor, torch.dtype], Any] | None, *names: str) -> Any:
        if prepare is None:
            return self.get(*names)
        return self.prepared(names, lambda parts: prepare(self.staging.bring(_joined(parts)), self.dtype))

    def embedding(self, name: str) -> Tensor:
        ops = self.ops
        if ops is None:
            return self.get(name)

        def prepare(parts: list[Tensor]) -> Tensor:
            return ops.prepare_embedding(self.staging.bring(_joined(parts)), self.dtype)

        embedding: Tensor = self.prepared([name], prepare, some_rows=True)
        return embedding

    def experts(self, prefix: str) -> Any:
        def prepare(parts: list[Tensor]) -> Any:
            experts = MxExperts(*map(self.cast, parts))
            return experts if self.ops is None else self.ops.prepare_experts(experts)

        return self.prepared([f"{prefix}mlp.experts.{name}" for name in _EXPERTS], prepare)

    def prepared(self, names: Sequence[str], prepare: Callable[[list[Tensor]], Any], *, some_rows: bool = False) -> Any:
        """The result of `prepare` for published tensors; mapped from its file if there is one.

        `some_rows`: as in PackedFiles.get.
        """
        if self.files is None:
            return prepare([self.published(name) for name in names])

        def make() -> Any:
            parts = [self.published(name) for name in names]
            made = prepare(parts)
            page_out(parts)
            return made

        return self.files.get(names[0], make, some_rows, {name: self.specs[name].shape for name in names})

    def layer(self, prefix: str, experts: Any) -> LayerWeights:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm_H=self.get(f"{prefix}input_layernorm.weight"),
            qkv_weight_FH=self.projection(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias_F=self.get(*(f"{attention}{name}_proj.bias" for name in "qkv")),
            sinks_Q=self.get(f"{attention}sinks"),
            out_weight=self.projection(f"{attention}o_proj.weight"),
            out_bias_H=self.get(f"{attention}o_proj.bias"),
            post_attention_norm_H=self.get(f"{prefix}post_attention_layernorm.weight"),
            router_weight_EH=self.get(f"{mlp}router.weight"),
            router_bias_E=self.get(f"{mlp}router.bias"),
            experts=experts,
        )


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
