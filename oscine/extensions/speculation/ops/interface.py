"""The ops that only a draft head needs. It takes all others, such as attention and norms, from ops/interface.py.

Shape suffixes as there; U tokens that the head can draft, D sequences that draft.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oscine.ops.interface import Batch, SamplingBatch
from oscine.ops.packed import PackedStep


@dataclass(frozen=True, slots=True)
class SliceOfHead:
    """An output matrix for some tokens of the target's vocabulary."""

    weight_UH: Any  # of DraftOps.prepare
    ids_U: Tensor  # int64; the token of each row


@dataclass(frozen=True, slots=True)
class DraftState:
    """What the device keeps of running sequences for their next drafts: a row for each slot, and one for padding."""

    features: Tensor  # [slots + 1, H]; the feature of the last position that the target has computed
    lens: Tensor  # int32 [slots + 1]; how many positions the target has computed
    temperatures: Tensor  # float32 [slots + 1]
    seeds: Tensor  # int64 [slots + 1]


@dataclass(frozen=True, slots=True)
class DraftOps:
    """The callables of one backend. Their results only decide which drafts are accepted, so they may be inexact."""

    # (published matrix [N, K] on the device; dtype of the activations) -> weight of `linear`
    prepare: Callable[[Tensor, torch.dtype], Any]
    # (x_TK, weight [N, K]) -> [T, N]
    linear: Callable[[Tensor, Any], Tensor]
    # the same, for a norm: [T, N], or partial sums [T, J, N]
    sums: Callable[[Tensor, Any], Tensor]
    # (x_TK, weight [2I, K]: I gates, then I values) -> silu(gate) * value [T, I]
    gated: Callable[[Tensor, Any], Tensor]
    # (token ids_T int64, embedding of Ops.prepare_embedding, its norm_H, features_TH, their norm_H, eps)
    #     -> (normed embedding beside normed features [T, 2H], normed features_TH)
    input: Callable[[Tensor, Any, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    # (tensors [T, K], of different widths) -> one beside the other, [T, sum of the widths]
    join: Callable[[Sequence[Tensor]], Tensor]
    # (qkv [T, (Q + 2G) * D], cos_sin, positions_T, kv_pages, slots_T) -> q_TQD, as rope.reference.rope_and_write; Q may
    # be 0
    rope_and_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    # (x_NH, slice, sampling) -> token ids_N int64 of the target: the best of logit / temperature + the target's noise
    choose: Callable[[Tensor, SliceOfHead, SamplingBatch], Tensor]
    # (packed step of the target, its batch, ids_M of Ops.accept, features_TH, state written) -> the token after each
    #     of the M rows, int64; any where it is not known. Keeps what the last accepted row of each sequence leaves.
    hold: Callable[[PackedStep[Tensor], Batch, Tensor, Tensor, DraftState], Tensor]
    # (slots_D int32, state) -> features_DH
    held: Callable[[Tensor, DraftState], Tensor]
    # (slots_D int32, positions_D of the head, state) -> the noise of what is drafted: tokens two positions later
    sampling: Callable[[Tensor, Tensor, DraftState], SamplingBatch]
    # (drafts of BatchState written, place j >= 0, slots_D int32, ids_D): the j-th drafts of these sequences
    put: Callable[[Tensor, int, Tensor, Tensor], None]
