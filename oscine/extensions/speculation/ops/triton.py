"""The ops of a draft head in Triton: sm_80 and newer. Definitions: reference.py.

Memory bounds a draft, so weights have 4 bits and 8 per 32 of them (weights.py). For gpt-oss-120b and NVIDIA's
EAGLE3-v3 head, with an intermediate size of 17,280, one draft reads these weights (MB):

| matrix | rows x columns | bfloat16 | FP8, scale per 32 | 4 bits, scale per 32 |
|---|---|---|---|---|
| qkv | 5,120 x 5,760 | 59 | 30 | 16 |
| out | 2,880 x 4,096 | 24 | 12 | 6 |
| gate and up | 34,560 x 2,880 | 199 | 103 | 53 |
| down | 2,880 x 17,280 | 100 | 51 | 26 |
| slice of the head | 32,768 x 2,880 | 189 | 97 | 50 |
| all | | 570 | 294 | 151 |
| three drafts at 70 % of 4.8 TB/s | | 0.51 ms | 0.26 ms | 0.14 ms |

Launches of a draft, with the ops of the target that it uses: prepare_step, input, qkv, rope_and_write, attention, out,
norm, gate and up with swiglu, down, norm, sampling, choose (two), put. They are 14, and `held` before the first draft:
43 for three drafts, or 0.06 to 0.09 ms at 1.5 to 2 us each. So 4 bits give about 0.2 ms in all, by this count; FP8
0.33 to 0.35 ms, and bfloat16 0.6 ms. None of this is measured yet: see benchmarks/draft.py.

The 4 bits are integers with finer block scales, not MXFP4. At the same size, normally distributed weights have an error
of 9 % instead of 11 %, and are expanded in about half the instructions. The head of the embedded model drafts as well
as in float32 (docs/decisions/0027-a-draft-head-is-one-more-layer.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.speculation.ops.interface import DraftState
from oscine.extensions.speculation.ops.products import choose, gated, linear, sums
from oscine.extensions.speculation.ops.reference import drawn, join
from oscine.extensions.speculation.ops.weights import PackedMatrix, pack
from oscine.ops.interface import Batch, SamplingBatch
from oscine.ops.launch import depend
from oscine.ops.packed import REJECTED, PackedStep
from oscine.ops.rope.triton import rope_and_write
from oscine.ops.target import Target

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

COUNT_BLOCK = 128  # sequences of a program that moves a number for each


def prepare(weight: Tensor, _: torch.dtype) -> PackedMatrix:
    return pack(weight)


def input(
    target: Target,
    ids_T: Tensor,
    embed_VH: Tensor,
    embed_norm_H: Tensor,
    features_TH: Tensor,
    feature_norm_H: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    num_tokens, hidden = features_TH.shape
    both = torch.empty(num_tokens, 2 * hidden, dtype=features_TH.dtype, device=features_TH.device)
    normed_TH = torch.empty_like(both[:, hidden:], memory_format=torch.contiguous_format)
    if num_tokens:
        _input_kernel[(num_tokens, 2)](
            ids_T,
            embed_VH,
            embed_norm_H,
            features_TH.contiguous(),
            feature_norm_H,
            both,
            normed_TH,
            eps,
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=8,
            **target.launch_options,
        )
    return both, normed_TH


def hold(
    target: Target, packed: PackedStep[Tensor], batch: Batch, ids_M: Tensor, features_TH: Tensor, state: DraftState
) -> Tensor:
    next_ids_M, hidden = torch.empty(len(ids_M), dtype=torch.int64, device=ids_M.device), features_TH.shape[1]
    if len(ids_M):
        _hold_kernel[(len(ids_M),)](
            packed.given_T,
            packed.logits_rows_N,
            packed.sampled_slots_M,
            batch.positions_T,
            ids_M,
            features_TH.contiguous(),
            state.features,
            state.lens,
            next_ids_M,
            len(ids_M),
            len(state.lens) - 1,
            REJECTED=REJECTED,
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=4,
            **target.launch_options,
        )
    return next_ids_M


def held(target: Target, slots_D: Tensor, state: DraftState) -> Tensor:
    hidden = state.features.shape[1]
    features_DH = state.features.new_empty(len(slots_D), hidden)
    if len(slots_D):
        _held_kernel[(len(slots_D),)](
            slots_D,
            state.features,
            features_DH,
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=4,
            **target.launch_options,
        )
    return features_DH


def sampling(target: Target, slots_D: Tensor, positions_D: Tensor, state: DraftState) -> SamplingBatch:
    count, device = len(slots_D), slots_D.device
    temperature_D = torch.empty(count, dtype=torch.float32, device=device)
    seed_D, position_D = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(2))
    if count:
        _sampling_kernel[(triton.cdiv(count, COUNT_BLOCK),)](
            slots_D,
            positions_D,
            state.temperatures,
            state.seeds,
            temperature_D,
            seed_D,
            position_D,
            count,
            BLOCK=COUNT_BLOCK,
            num_warps=4,
            **target.launch_options,
        )
    return drawn(temperature_D, seed_D, position_D)


def put(target: Target, drafts: Tensor, place: int, slots_D: Tensor, ids_D: Tensor) -> None:
    if len(slots_D):
        _put_kernel[(triton.cdiv(len(slots_D), COUNT_BLOCK),)](
            drafts,
            place,
            slots_D,
            ids_D,
            len(slots_D),
            DRAFTS=drafts.shape[1],
            BLOCK=COUNT_BLOCK,
            num_warps=4,
            **target.launch_options,
        )


@triton.jit
def _input_kernel(
    ids,
    embedding,
    embed_norm,
    features,
    feature_norm,
    both,  # [tokens, 2 H]
    normed,
    eps,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < H
    depend(PDL)
    if tl.program_id(1) == 0:
        row = tl.load(ids + token)
        y_H = _normed(embedding + row * H, embed_norm, column_H, inside_H, eps, H)
        tl.store(both + token * 2 * H + column_H, y_H.to(both.dtype.element_ty), inside_H)
    else:
        y_H = _normed(features + token * H, feature_norm, column_H, inside_H, eps, H)
        tl.store(both + (token * 2 + 1) * H + column_H, y_H.to(both.dtype.element_ty), inside_H)
        tl.store(normed + token * H + column_H, y_H.to(normed.dtype.element_ty), inside_H)


@triton.jit
def _normed(x, weight, column_H, inside_H, eps, H: tl.constexpr):
    x_H = tl.load(x + column_H, inside_H, other=0.0).to(tl.float32)
    weight_H = tl.load(weight + column_H, inside_H, other=0.0).to(tl.float32)
    return x_H * tl.rsqrt(tl.sum(x_H * x_H, 0) / H + eps) * weight_H


@triton.jit(do_not_specialize=["count", "padding"], do_not_specialize_on_alignment=["ids"])
def _hold_kernel(
    given,
    rows,
    slots,
    positions,
    ids,
    features,
    held,
    lens,
    next_ids,
    count,
    padding,
    REJECTED: tl.constexpr,
    H: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program is a row. One that leaves nothing writes its next id alone."""
    m = tl.program_id(0)
    depend(PDL)
    id = tl.load(ids + m)
    tl.store(next_ids + m, tl.maximum(id, 0).to(tl.int64))
    follows = m + 1 < count
    next_row = tl.load(rows + m + 1, follows, other=0)
    next_accepted = tl.load(ids + m + 1, follows, other=REJECTED) != REJECTED
    goes_on = follows & next_accepted & (tl.load(given + next_row, follows, other=0) < -1)
    slot = tl.load(slots + m).to(tl.int64)
    if (id != REJECTED) & (slot != padding) & (goes_on == 0):
        row = tl.load(rows + m).to(tl.int64)
        column_H = tl.arange(0, BLOCK_H)
        x_H = tl.load(features + row * H + column_H, column_H < H)
        tl.store(held + slot * H + column_H, x_H, column_H < H)
        tl.store(lens + slot, (tl.load(positions + row) + 1).to(tl.int32))


@triton.jit
def _held_kernel(slots, held, features, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    d = tl.program_id(0)
    column_H = tl.arange(0, BLOCK_H)
    depend(PDL)
    slot = tl.load(slots + d).to(tl.int64)
    x_H = tl.load(held + slot * H + column_H, column_H < H)
    tl.store(features + d * H + column_H, x_H, column_H < H)


@triton.jit(do_not_specialize=["count"])
def _sampling_kernel(
    slots,
    positions,
    temperatures,
    seeds,
    temperature,
    seed,
    position,
    count,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < count
    depend(PDL)
    slot = tl.load(slots + d, inside, other=0)
    tl.store(temperature + d, tl.load(temperatures + slot, inside, other=0.0), inside)
    tl.store(seed + d, tl.load(seeds + slot, inside, other=0), inside)
    tl.store(position + d, tl.load(positions + d, inside, other=0) + 2, inside)


@triton.jit(do_not_specialize=["count", "place"])
def _put_kernel(drafts, place, slots, ids, count, DRAFTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = d < count
    depend(PDL)
    slot = tl.load(slots + d, inside, other=0)
    tl.store(drafts + slot * DRAFTS + place, tl.load(ids + d, inside, other=0).to(tl.int32), inside)
