"""The weights of an EAGLE-3 head: their names in all formats, their shapes, and how they come onto the device."""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from oscine.extensions.speculation.eagle.config import HeadConfig
from oscine.extensions.speculation.ops.interface import DraftOps, SliceOfHead
from oscine.model.weights import TensorSource, Weights
from oscine.ops.interface import Ops

_RENAMED = (
    (r"^model\.", ""),
    (r"^(layers|midlayers)\.0\.", "midlayer."),
    (r"^aux_norm_low\.", "fc_norm.0."),
    (r"^aux_norm_mid\.", "fc_norm.1."),
    (r"^aux_norm_high\.", "fc_norm.2."),
    (r"^fc_norms\.", "fc_norm."),
)
UNUSED = ("t2d",)  # the inverse of d2t
EMBEDDING, OUTPUT, TARGET_IDS, COMBINE = "embed_tokens.weight", "lm_head.weight", "d2t", "fc.weight"
# Of a slice of the target's output matrix: byte pairs that were merged early are frequent, and the last ids are the
# format's own.
MAX_DRAFTED = 32768
_LAST = 1090
_NO_SINK = -1e30  # finite, since kernels subtract it


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """The tensor that a head must hold under one name."""

    shape: tuple[int, ...]
    kind: Literal["float", "integer"] = "float"


def published_name(stored: str) -> str:
    """The name of a tensor in the spelling of this module."""
    for pattern, name in _RENAMED:
        stored = re.sub(pattern, name, stored)
    return stored


def head_specs(config: HeadConfig, held: Collection[str]) -> dict[str, HeadSpec]:
    """Every tensor that a head must have. `held`: the names that it has, which decide on what is optional."""
    hidden, inner, width = config.hidden_size, config.intermediate_size, len(config.aux_layers) * config.hidden_size
    queries, keys = (count * config.head_dim for count in (config.num_attention_heads, config.num_key_value_heads))
    shapes: dict[str, tuple[int, ...]] = {
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }
    if len(config.aux_layers) > 1 or COMBINE in held:
        shapes[COMBINE] = (hidden, width)
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (width,)
    if config.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (hidden,) for i in range(len(config.aux_layers))}
    if EMBEDDING in held:
        shapes[EMBEDDING] = (config.vocab_size, hidden)
    if OUTPUT in held:
        shapes[OUTPUT] = (config.draft_vocab_size, hidden)
    specs = {name: HeadSpec(shape) for name, shape in shapes.items()}
    if config.draft_vocab_size < config.vocab_size or TARGET_IDS in held:
        specs[TARGET_IDS] = HeadSpec((config.draft_vocab_size,), "integer")
    return specs


@dataclass(frozen=True, slots=True)
class WholeHead:
    """An output matrix for all tokens of the target's vocabulary, as Ops.chooser takes it."""

    weight_VH: Any
    prepared: Any


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """Norms are in the dtype of the activations; matrices are prepared by DraftOps. F = (Q + 2G) * D."""

    embed_VH: Tensor
    tap_norms: tuple[Tensor, ...]  # none, one over all tapped states, or one for each
    combine: Any | None  # [H, aux_layers * H]
    embed_norm_H: Tensor
    feature_norm_H: Tensor
    qkv: Any  # [F, 2H]
    kv: Any  # [2G * D, 2H]: the same without the queries
    sinks_Q: Tensor  # without effect
    out: Any
    mlp_norm_H: Tensor
    gate_up: Any  # [2I, H]
    down: Any
    norm_H: Tensor
    output: WholeHead | SliceOfHead


def load_weights_of_head(
    config: HeadConfig,
    source: TensorSource,
    held: Collection[str],
    target: Weights,
    target_output: Callable[[], Tensor],
    ops: Ops,
    draft: DraftOps,
    dtype: torch.dtype,
) -> HeadWeights:
    """Prepares the tensors of `source` on the target's device. What the head lacks is the target's.

    `held`: the names in the source. `target_output`: the target's published output matrix, of which a slice is taken
    if the vocabulary is large.
    """
    device = target.device

    def get(name: str) -> Tensor:
        return source.get(name).to(device, dtype)

    def matrix(*names: str) -> Any:
        return draft.prepare(torch.cat([source.get(name) for name in names]).to(device), dtype)

    norms = ["input_norm.weight"] if config.norm_before_fc else []
    norms += [f"fc_norm.{i}.weight" for i in range(len(config.aux_layers))] if config.fc_norm else []
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    own = EMBEDDING in held
    return HeadWeights(
        embed_VH=ops.prepare_embedding(source.get(EMBEDDING).to(device), dtype) if own else target.embed_VH,
        tap_norms=tuple(get(name) for name in norms),
        combine=matrix(COMBINE) if COMBINE in held else None,
        embed_norm_H=get("midlayer.input_layernorm.weight"),
        feature_norm_H=get("midlayer.hidden_norm.weight"),
        qkv=matrix(*(f"{attention}{name}_proj.weight" for name in "qkv")),
        kv=matrix(*(f"{attention}{name}_proj.weight" for name in "kv")),
        sinks_Q=torch.full((config.num_attention_heads,), _NO_SINK, dtype=dtype, device=device),
        out=matrix(f"{attention}o_proj.weight"),
        mlp_norm_H=get("midlayer.post_attention_layernorm.weight"),
        gate_up=matrix(f"{mlp}gate_proj.weight", f"{mlp}up_proj.weight"),
        down=matrix(f"{mlp}down_proj.weight"),
        norm_H=get("norm.weight"),
        output=_output(config, source, held, target, target_output, ops, draft, dtype),
    )


def _output(
    config: HeadConfig,
    source: TensorSource,
    held: Collection[str],
    target: Weights,
    target_output: Callable[[], Tensor],
    ops: Ops,
    draft: DraftOps,
    dtype: torch.dtype,
) -> WholeHead | SliceOfHead:
    device = target.device
    ids_U = _target_ids(config, source, held)
    own = OUTPUT in held
    if ids_U is None and own:
        weight = ops.prepare_dense(source.get(OUTPUT).to(device), dtype)
        return WholeHead(weight, ops.chooser.prepare(weight))
    if ids_U is None and config.vocab_size <= 2 * MAX_DRAFTED:
        return WholeHead(target.head_VH, target.prepared_head)
    if ids_U is None:
        ids_U = frequent(config.vocab_size)
    rows = source.get(OUTPUT) if own else target_output()[ids_U]
    return SliceOfHead(draft.prepare(rows.to(device), dtype), ids_U.to(device))


def _target_ids(config: HeadConfig, source: TensorSource, held: Collection[str]) -> Tensor | None:
    """The target's token of each drafted one, int64; None: they are the same. The file has the differences.

    Raises ValueError if there is no such token.
    """
    if TARGET_IDS not in held:
        return None
    first = torch.arange(config.draft_vocab_size)
    ids_U = first + source.get(TARGET_IDS).long()
    if not bool(((ids_U >= 0) & (ids_U < config.vocab_size)).all()):
        raise ValueError(f"{TARGET_IDS} names tokens beyond the vocabulary of {config.vocab_size}")
    whole = config.draft_vocab_size == config.vocab_size and bool((ids_U == first).all())
    return None if whole else ids_U


def frequent(vocab_size: int) -> Tensor:
    """The tokens that a slice of a large vocabulary has, int64."""
    last = torch.arange(vocab_size - _LAST, vocab_size)
    return torch.cat((torch.arange(MAX_DRAFTED - _LAST), last))
