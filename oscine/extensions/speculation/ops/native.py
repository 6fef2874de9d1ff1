"""The ops of a draft head in C: float32, contiguous. Definitions: reference.py."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oscine.extensions.speculation.ops import reference
from oscine.extensions.speculation.ops.interface import DraftState, SliceOfHead
from oscine.ops.choose.native import best
from oscine.ops.embed.native import embed
from oscine.ops.interface import Batch, SamplingBatch
from oscine.ops.linear.native import lm_head as linear
from oscine.ops.linear.native import prepare_dense as prepare
from oscine.ops.native.library import check, library
from oscine.ops.norm.native import rms_norm
from oscine.ops.packed import PackedStep

__all__ = [
    "choose",
    "gated",
    "held",
    "hold",
    "input",
    "join",
    "linear",
    "prepare",
    "put",
    "rope_and_write",
    "sampling",
    "sums",
]

sums = linear


def input(
    ids_T: Tensor, embed_VH: Tensor, embed_norm_H: Tensor, features_TH: Tensor, feature_norm_H: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    embedded_TH, _ = rms_norm(embed(ids_T, embed_VH), embed_norm_H, eps, None)
    normed_TH, _ = rms_norm(features_TH, feature_norm_H, eps, None)
    return join((embedded_TH, normed_TH)), normed_TH


def join(parts: Sequence[Tensor]) -> Tensor:
    width, first = sum(part.shape[1] for part in parts), 0
    joined = torch.empty(parts[0].shape[0], width)
    for part in parts:
        check(library().oscine_place(part.data_ptr(), joined.data_ptr(), *part.shape, width, first))
        first += part.shape[1]
    return joined


def rope_and_write(qkv: Tensor, cos_sin: Tensor, positions_T: Tensor, kv_pages: Tensor, slots_T: Tensor) -> Tensor:
    _, _, num_kv_heads, page_size, head_dim = kv_pages.shape
    num_tokens, width = qkv.shape
    num_heads = width // head_dim - 2 * num_kv_heads
    q_TQD = torch.empty(num_tokens, num_heads, head_dim)
    inputs = qkv.data_ptr(), cos_sin.data_ptr(), positions_T.data_ptr(), slots_T.data_ptr(), q_TQD.data_ptr()
    pages = kv_pages.data_ptr(), kv_pages.stride(0), num_kv_heads, page_size, head_dim
    check(library().oscine_rope(*inputs, num_tokens, num_heads, *pages))
    return q_TQD


def gated(x: Tensor, weight: Any) -> Tensor:
    gate_up = linear(x, weight)
    num_tokens, width = gate_up.shape
    out = torch.empty(num_tokens, width // 2)
    check(library().oscine_swiglu(gate_up.data_ptr(), out.data_ptr(), *out.shape))
    return out


def choose(x_NH: Tensor, head: SliceOfHead, sampling: SamplingBatch) -> Tensor:
    return best(x_NH, head.weight_UH, sampling, tokens_V=head.ids_U)[1]


def hold(packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor, features_TH: Tensor, state: DraftState) -> Tensor:
    next_ids_M = torch.empty(len(ids_M), dtype=torch.int64)
    check(
        library().oscine_hold(
            packed.logits_rows_N.data_ptr(),
            packed.sampled_slots_M.data_ptr(),
            batch.positions_T.data_ptr(),
            ids_M.data_ptr(),
            features_TH.data_ptr(),
            len(ids_M),
            features_TH.shape[1],
            len(state.lens) - 1,
            state.lens.data_ptr(),
            state.features.data_ptr(),
            next_ids_M.data_ptr(),
        )
    )
    return next_ids_M


def held(slots_D: Tensor, state: DraftState) -> Tensor:
    features_DH = torch.empty(len(slots_D), state.features.shape[1])
    sizes = features_DH.shape
    check(library().oscine_held(slots_D.data_ptr(), state.features.data_ptr(), features_DH.data_ptr(), *sizes))
    return features_DH


def sampling(slots_D: Tensor, positions_D: Tensor, state: DraftState) -> SamplingBatch:
    count = len(slots_D)
    seed_D, position_D = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    temperature_D = torch.empty(count)
    inputs = slots_D.data_ptr(), positions_D.data_ptr(), state.temperatures.data_ptr(), state.seeds.data_ptr()
    outputs = temperature_D.data_ptr(), seed_D.data_ptr(), position_D.data_ptr()
    check(library().oscine_draft_sampling(*inputs, count, *outputs))
    return reference.drawn(temperature_D, seed_D, position_D)


def put(drafts: Tensor, place: int, slots_D: Tensor, ids_D: Tensor) -> None:
    check(
        library().oscine_put(
            drafts.data_ptr(), drafts.shape[1], place, slots_D.data_ptr(), ids_D.data_ptr(), len(ids_D)
        )
    )
