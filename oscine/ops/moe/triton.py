"""The mixture of experts in Triton, for any GPU from sm_80 on. Definition: reference.py.

Weights stay as published and are expanded in registers. Rows of one expert are gathered into tiles of BLOCK_M tokens;
the grid holds as many tiles as there could be, and each program finds the expert of its own from the counts. Two
products, both weights times tokens: the first ends in SwiGLU, the second in the routing weight, and what it leaves are
partial sums, one for each expert of a token.

    sort     slots[e, rank] = t * K + k                      the pairs of each expert
    up       a[pair] = swiglu(W_gu[e] x[t] + b_gu[e])
    down     y[pair] = w[pair] * (W_d[e] a[pair] + b_d[e])

Shape suffixes: T tokens, K experts per token, E experts, H hidden, I intermediate; M pairs of a tile, N weight rows of
a tile, B blocks of 32 values along the reduced dimension, R that dimension.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.launch import launch_options
from oscine.ops.moe.reference import SWIGLU_ALPHA

ALPHA = tl.constexpr(SWIGLU_ALPHA)


def prepare_experts(experts: MxExperts) -> MxExperts:
    return experts


def moe(x_TH: Tensor, routing: Routing, experts: MxExperts, swiglu_limit: float) -> Tensor:
    """[T, H] -> partial sums [T, K, H] in the dtype of x."""
    (num_tokens, hidden), (num_experts, doubled) = x_TH.shape, experts.gate_up_bias.shape
    ids_TK, intermediate = routing.expert_ids_TK, doubled // 2
    y_TKH = torch.empty((*ids_TK.shape, hidden), dtype=x_TH.dtype, device=x_TH.device)
    if not num_tokens:
        return y_TKH
    a_TKI = torch.empty((*ids_TK.shape, intermediate), dtype=x_TH.dtype, device=x_TH.device)
    counts_E, slots_ET = _sort(routing, num_experts)
    tiling = _tiling(ids_TK.numel(), num_experts)
    used = min(num_experts, ids_TK.numel())
    tiles = used + (ids_TK.numel() - used) // tiling["BLOCK_M"]
    shared = {
        "E": num_experts,
        "K": ids_TK.shape[1],
        "BLOCK_E": triton.next_power_of_2(num_experts),
        **tiling,
        **launch_options(x_TH.device),
    }
    up = (experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias)
    down = (experts.down_blocks, experts.down_scales, experts.down_bias)
    grid = (tiles * triton.cdiv(intermediate, tiling["BLOCK_N"]),)
    _experts_kernel[grid](
        x_TH, *up, None, a_TKI, counts_E, slots_ET, num_tokens, tiles, swiglu_limit, R=hidden, F=intermediate, **shared
    )
    shared["BLOCK_N"] *= 2
    grid = (tiles * triton.cdiv(hidden, shared["BLOCK_N"]),)
    weights = routing.weights_TK
    _experts_kernel[grid](
        a_TKI, *down, weights, y_TKH, counts_E, slots_ET, num_tokens, tiles, 0.0, R=intermediate, F=hidden, **shared
    )
    return y_TKH


def _sort(routing: Routing, num_experts: int) -> tuple[Tensor, Tensor]:
    """(counts_E, slots [E, T]: the first counts[e] of a row are the pairs t * K + k of expert e)."""
    ids_TK, counts_E = routing.expert_ids_TK, routing.counts_E
    if counts_E is None:
        counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_TK.device)
    slots_ET = torch.empty((num_experts, ids_TK.shape[0]), dtype=torch.int32, device=ids_TK.device)
    _sort_kernel[(triton.cdiv(ids_TK.numel(), 256),)](
        ids_TK,
        routing.ranks_TK,
        counts_E,
        slots_ET,
        ids_TK.numel(),
        ids_TK.shape[0],
        BLOCK=256,
        num_warps=4,
        **launch_options(ids_TK.device),
    )
    return counts_E, slots_ET


def _tiling(num_pairs: int, num_experts: int) -> dict[str, int]:
    """By the mean number of rows of an expert; BLOCK_N counts pairs of gate and up."""
    mean = num_pairs / num_experts
    if mean <= 16:
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_B": 4, "num_warps": 4, "num_stages": 4}
    if mean <= 48:
        return {"BLOCK_M": 32, "BLOCK_N": 64, "BLOCK_B": 4, "num_warps": 4, "num_stages": 3}
    block_m = 64 if mean <= 96 else 128
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_B": 2, "num_warps": 8, "num_stages": 3}


@triton.jit
def _sort_kernel(  # type: ignore[no-untyped-def]
    expert_ids, ranks, counts, slots, num_pairs, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = pair < num_pairs
    expert = tl.load(expert_ids + pair, mask=live, other=0)
    if ranks is None:
        rank = tl.atomic_add(counts + expert, 1, mask=live, sem="relaxed")
    else:
        rank = tl.load(ranks + pair, mask=live, other=0)
    tl.store(slots + expert.to(tl.int64) * num_tokens + rank, pair, mask=live)


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    scales, row_N, live_N, first, R: tl.constexpr, BLOCK_B: tl.constexpr
):
    block_B = first + tl.arange(0, BLOCK_B)
    live_NB = live_N[:, None] & (block_B < R // 32)[None, :]
    return tl.load(scales + row_N[:, None] * (R // 32) + block_B[None, :], mask=live_NB, other=0)


@triton.jit
def _weights(  # type: ignore[no-untyped-def]
    blocks, scale_NB, row_N, live_N, first, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_B: tl.constexpr
):
    """float32 [BLOCK_N, 32 BLOCK_B] from block `first` of each row.

    The three low bits of a nibble, put at the lowest exponent bits of a float, are its magnitude times 2^-126: one
    half becomes a subnormal number.
    """
    block_B = first + tl.arange(0, BLOCK_B)
    live_NB = live_N[:, None] & (block_B < R // 32)[None, :]
    start_NB = (row_N[:, None] * (R // 32) + block_B[None, :]) * 16
    byte = tl.arange(0, 16)[None, None, :]
    packed = tl.load(blocks + start_NB[:, :, None] + byte, mask=live_NB[:, :, None], other=0).to(tl.int32)
    nibbles = tl.join(packed, packed >> 4)  # low first; [N, B, 16, 2]
    values = (((nibbles & 7) << 22) | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    bits_NB = scale_NB.to(tl.int32) << 23
    bits_NB = tl.where(scale_NB == 255, 0x7FC00000, tl.maximum(bits_NB, 0x00400000))
    values *= bits_NB.to(tl.float32, bitcast=True)[:, :, None, None]
    return tl.reshape(values, (BLOCK_N, 32 * BLOCK_B))


@triton.jit
def _experts_kernel(  # type: ignore[no-untyped-def]
    x,
    blocks,
    scales,
    bias,
    weights,
    out,
    counts,
    slots,
    num_tokens,
    tiles,
    limit,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without routing weights: the gated product, x by token. With them: the second product, x by pair."""
    GATED: tl.constexpr = weights is None
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0) % tiles  # programs beside each other share the weight rows of an expert
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + expert_E, mask=expert_E < E, other=0)
    tiles_E = (count_E + BLOCK_M - 1) // BLOCK_M
    end_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((end_E <= tile).to(tl.int32), 0)
    if expert < E:
        mine_E = expert_E == expert
        count = tl.sum(tl.where(mine_E, count_E, 0), 0)
        first = (tile - tl.sum(tl.where(mine_E, end_E - tiles_E, 0), 0)) * BLOCK_M
        member_M = first + tl.arange(0, BLOCK_M)
        live_M = member_M < count
        pair_M = tl.load(slots + expert.to(tl.int64) * num_tokens + member_M, mask=live_M, other=0)
        feature_N = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = feature_N < F
        reduced_R = tl.arange(0, 32 * BLOCK_B)
        x_M = (pair_M // K if GATED else pair_M).to(tl.int64) * R
        row_N = expert.to(tl.int64) * F + feature_N
        if GATED:
            row_N = 2 * row_N
        sum_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        # the scales of the next step are loaded by hand: single bytes are too narrow for the pipeliner
        scale_NB = _scales(scales, row_N, live_N, 0, R, BLOCK_B)
        up_scale_NB = scale_NB
        if GATED:
            up_scale_NB = _scales(scales, row_N + 1, live_N, 0, R, BLOCK_B)
        for step in range(0, R // 32, BLOCK_B):
            next_NB = _scales(scales, row_N, live_N, step + BLOCK_B, R, BLOCK_B)
            at_R = step * 32 + reduced_R
            x_MR = tl.load(x + x_M[:, None] + at_R[None, :], mask=live_M[:, None] & (at_R < R)[None, :], other=0)
            w_NR = _weights(blocks, scale_NB, row_N, live_N, step, R, BLOCK_N, BLOCK_B)
            sum_NM = tl.dot(w_NR.to(x.dtype.element_ty), tl.trans(x_MR), sum_NM, input_precision="ieee")
            scale_NB = next_NB
            if GATED:
                next_NB = _scales(scales, row_N + 1, live_N, step + BLOCK_B, R, BLOCK_B)
                w_NR = _weights(blocks, up_scale_NB, row_N + 1, live_N, step, R, BLOCK_N, BLOCK_B)
                up_NM = tl.dot(w_NR.to(x.dtype.element_ty), tl.trans(x_MR), up_NM, input_precision="ieee")
                up_scale_NB = next_NB
        sum_NM += tl.load(bias + row_N, mask=live_N, other=0).to(tl.float32)[:, None]
        if GATED:
            up_NM += tl.load(bias + row_N + 1, mask=live_N, other=0).to(tl.float32)[:, None]
            gate_NM = tl.where(sum_NM > limit, limit, sum_NM)
            up_NM = tl.where(up_NM > limit, limit, tl.where(up_NM < -limit, -limit, up_NM))
            sum_NM = (up_NM + 1) * gate_NM * tl.sigmoid(ALPHA * gate_NM)
        else:
            sum_NM *= tl.load(weights + pair_M, mask=live_M, other=0)[None, :]
        at_NM = pair_M.to(tl.int64)[None, :] * F + feature_N[:, None]
        tl.store(out + at_NM, sum_NM.to(out.dtype.element_ty), mask=live_N[:, None] & live_M[None, :])
