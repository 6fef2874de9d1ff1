"""The weights of a model on their device, and how they are built tensor by tensor from any source.

Knows the published names, shapes and dtypes, and which part of each tensor a rank has. Must not know files, folders or
how a tensor comes about.
"""

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from oscine.model.config import ModelConfig
from oscine.model.staging import Staging
from oscine.ops.interface import MxExperts, Ops

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


@dataclass(frozen=True, slots=True)
class Part:
    """One of the equal parts into which ranks divide something."""

    rank: int = 0
    num_ranks: int = 1


# The dimension along which ranks divide a tensor, by the part that it belongs to and the end of its name.
DIVIDED: dict[str, dict[str, int]] = {
    "attention": {
        **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight", "self_attn.sinks"), 0),
        **dict.fromkeys(("q_proj.bias", "k_proj.bias", "v_proj.bias"), 0),
        "o_proj.weight": 1,
    },
    "experts": {
        **dict.fromkeys(("gate_up_proj_blocks", "gate_up_proj_scales", "gate_up_proj_bias"), 1),
        **dict.fromkeys(("down_proj_blocks", "down_proj_scales"), 2),
    },
    "vocabulary": {"embed_tokens.weight": 0, "lm_head.weight": 0},
}
ADDED_ONCE = {"attention": "o_proj.bias", "experts": "down_proj_bias"}  # to partial sums over ranks: by rank 0


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's part of a model.

    Tensor parallelism divides all three. Attention data parallelism divides the experts only.
    """

    attention: Part = Part()  # heads
    experts: Part = Part()  # rows of every expert
    vocabulary: Part = Part()

    @classmethod
    def of_everything(cls, rank: int, num_ranks: int) -> "Shard":
        """As tensor parallelism divides a model."""
        part = Part(rank, num_ranks)
        return cls(part, part, part)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Of the part; its vocabulary is the whole one. Raises ValueError for a model that ranks cannot divide."""
        divided = {
            "num_attention_heads": (config.num_attention_heads, self.attention),
            "num_key_value_heads": (config.num_key_value_heads, self.attention),
            "intermediate_size / 32": (config.intermediate_size // 32, self.experts),
            "vocab_size": (config.vocab_size, self.vocabulary),
        }
        for name, (count, part) in divided.items():
            if count % part.num_ranks:
                raise ValueError(f"{part.num_ranks} ranks cannot divide a {name} of {count}")
        return replace(
            config,
            num_attention_heads=config.num_attention_heads // self.attention.num_ranks,
            num_key_value_heads=config.num_key_value_heads // self.attention.num_ranks,
            intermediate_size=config.intermediate_size // self.experts.num_ranks,
        )

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """A view, so that of a file's tensor no more is read."""
        for kind, dimensions in DIVIDED.items():
            part: Part = getattr(self, kind)
            if part.rank and kind in ADDED_ONCE and name.endswith(ADDED_ONCE[kind]):
                return torch.zeros_like(tensor)
            dimension = next((dim for end, dim in dimensions.items() if name.endswith(end)), None)
            if dimension is not None:
                return tensor.tensor_split(part.num_ranks, dimension)[part.rank]
        return tensor


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block. F = (Q + 2G) * D: all query heads, then key heads, then value heads."""

    input_norm_H: Tensor
    qkv_weight_FH: Tensor
    qkv_bias_F: Tensor
    sinks_Q: Tensor
    out_weight: Tensor  # [H, Q * D]
    out_bias_H: Tensor
    post_attention_norm_H: Tensor
    router_weight_EH: Tensor
    router_bias_E: Tensor
    experts: Any  # MxExperts, or the result of Ops.prepare_experts


@dataclass(frozen=True, slots=True)
class Weights:
    """All float tensors share one dtype and device; packed experts are uint8."""

    embed_VH: Tensor
    layers: list[LayerWeights]
    norm_H: Tensor
    head_VH: Tensor
    prepared_head: Any = None  # made from head_VH by Ops.chooser, which also needs it


class TensorSource(Protocol):
    """Where tensors come from: a checkpoint, or a random generator."""

    def get(self, name: str) -> Tensor:
        """The tensor under its published name, in its published dtype, on any device."""
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
    progress: bool = False,
) -> Weights:
    """Brings every tensor to the device, one layer after the other, floats cast to dtype, MXFP4 left packed.

    Of each tensor the shard's part. With `ops`, experts are repacked for them as soon as they are there, layer by
    layer, and the head prepared.
    """
    loader = _Loader(source, Staging(device), dtype, shard)
    layers = []
    for index in tqdm(range(config.num_hidden_layers), desc="Loading layers", disable=not progress):
        layer = loader.layer(f"model.layers.{index}.")
        layers.append(layer if ops is None else replace(layer, experts=ops.prepare_experts(layer.experts)))
    head_VH = loader.get("lm_head.weight")
    return Weights(
        embed_VH=loader.get("model.embed_tokens.weight"),
        layers=layers,
        norm_H=loader.get("model.norm.weight"),
        head_VH=head_VH,
        prepared_head=None if ops is None else ops.chooser.prepare(head_VH),
    )


@dataclass(frozen=True, slots=True)
class _Loader:
    source: TensorSource
    staging: Staging
    dtype: torch.dtype
    shard: Shard

    def get(self, *names: str) -> Tensor:
        """One tensor, or several concatenated along their first dimension."""
        tensors = [self.shard.part(name, self.source.get(name)) for name in names]
        tensor = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return self.staging.bring(tensor.contiguous()).to(torch.uint8 if tensor.dtype == torch.uint8 else self.dtype)

    def layer(self, prefix: str) -> LayerWeights:
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        return LayerWeights(
            input_norm_H=self.get(f"{prefix}input_layernorm.weight"),
            qkv_weight_FH=self.get(*(f"{attention}{name}_proj.weight" for name in "qkv")),
            qkv_bias_F=self.get(*(f"{attention}{name}_proj.bias" for name in "qkv")),
            sinks_Q=self.get(f"{attention}sinks"),
            out_weight=self.get(f"{attention}o_proj.weight"),
            out_bias_H=self.get(f"{attention}o_proj.bias"),
            post_attention_norm_H=self.get(f"{prefix}post_attention_layernorm.weight"),
            router_weight_EH=self.get(f"{mlp}router.weight"),
            router_bias_E=self.get(f"{mlp}router.bias"),
            experts=MxExperts(*(self.get(f"{mlp}experts.{name}") for name in _EXPERTS)),
        )
