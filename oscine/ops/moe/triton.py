"""The mixture of experts in Triton, for any GPU from sm_80 on. Definition: reference.py.

Weights are expanded in registers. Their published blocks are repacked so that byte j of sixteen holds values j and
j + 16: low and high nibbles are then two products of their own, and nothing is interleaved. Rows of one expert are
gathered into tiles of BLOCK_M tokens; the grid holds as many tiles as there could be, and each program finds the
expert of its own from the counts. Two products, both weights times tokens: the first ends in SwiGLU, the second in the
routing weight, and what it leaves are partial sums, one for each expert of a token.

    sort     slots[e, rank] = t * K + k                      the pairs of each expert
    up       a[pair] = swiglu(W_gu[e] x[t] + b_gu[e])
    down     y[pair] = w[pair] * (W_d[e] a[pair] + b_d[e])

Shape suffixes: T tokens, K experts per token, E experts, H hidden, I intermediate; M pairs of a tile, N weight rows of
a tile, B blocks of 32 values along the reduced dimension, R that dimension.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.launch import depend
from oscine.ops.moe.reference import SWIGLU_ALPHA
from oscine.ops.target import Target

ALPHA = tl.constexpr(SWIGLU_ALPHA)


def prepare_experts(experts: MxExperts) -> MxExperts:
    """Blocks with byte j holding value j below value j + 16; the rest is shared."""
    return replace(experts, gate_up_blocks=_halve(experts.gate_up_blocks), down_blocks=_halve(experts.down_blocks))


def _halve(blocks: Tensor) -> Tensor:
    """[..., 16] -> [..., 16]; expert by expert, so that little memory is needed on the way."""
    out = torch.empty_like(blocks)
    for published, halved in zip(blocks, out, strict=True):
        values = torch.stack((published & 15, published >> 4), -1).flatten(-2)
        torch.bitwise_or(values[..., :16], values[..., 16:] << 4, out=halved)
    return out


def moe(target: Target, x_TH: Tensor, routing: Routing, experts: MxExperts, swiglu_limit: float) -> Tensor:
    """[T, H] -> partial sums [T, K, H] in the dtype of x."""
    up = Matrix(experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias)
    down = Matrix(experts.down_blocks, experts.down_scales, experts.down_bias)
    pairs, added = sort(target, routing, len(up.bias)), routing.added
    added_PN = None if added is None else added.first(x_TH)
    a_TKI = gated(target, x_TH, pairs, up, swiglu_limit, added_PN)
    y_TKH = weighted(target, a_TKI, pairs, down)
    if added is not None:
        added.second(a_TKI.flatten(0, 1), y_TKH, adds=True)
    return y_TKH


class Matrix(NamedTuple):
    """The weights of one product, of all experts."""

    blocks: Tensor  # as prepare_experts leaves them
    scales: Tensor
    bias: Tensor  # [E, rows]


class Pairs(NamedTuple):
    """The pairs of a token and an expert, sorted by expert."""

    routing: Routing
    counts_E: Tensor
    slots_ET: Tensor  # the first counts[e] of a row are the pairs t * K + k of expert e

    @property
    def shape(self) -> torch.Size:
        """[T, K]"""
        return self.routing.expert_ids_TK.shape


def gated(
    target: Target, x_TH: Tensor, pairs: Pairs, up: Matrix, swiglu_limit: float, added_PN: Tensor | None = None
) -> Tensor:
    """[T, H] -> [T, K, I], the first product and SwiGLU. added_PN: [T * K, 2I], added to the product."""
    return _launch(target, x_TH, pairs, up, up.bias.shape[1] // 2, None, swiglu_limit, added_PN)


def weighted(target: Target, a_TKI: Tensor, pairs: Pairs, down: Matrix) -> Tensor:
    """[T, K, I] -> [T, K, H], the second product times the routing weights."""
    return _launch(target, a_TKI, pairs, down, down.bias.shape[1], pairs.routing.weights_TK, 0.0)


def _launch(
    target: Target,
    x: Tensor,
    pairs: Pairs,
    matrix: Matrix,
    features: int,
    weights_TK: Tensor | None,
    limit: float,
    added_PN: Tensor | None = None,
) -> Tensor:
    out = torch.empty((*pairs.shape, features), dtype=x.dtype, device=x.device)
    (num_tokens, per_token), num_experts = pairs.shape, len(matrix.bias)
    if not num_tokens:
        return out
    num_pairs = num_tokens * per_token
    tiling = _tiling(target, num_pairs, num_experts)
    if weights_TK is not None:
        tiling["BLOCK_N"] *= 2
    tiles = most_tiles(num_pairs, num_experts, tiling["BLOCK_M"])
    _experts_kernel[(tiles * triton.cdiv(features, tiling["BLOCK_N"]),)](
        x,
        *matrix,
        weights_TK,
        added_PN,
        out,
        pairs.counts_E,
        pairs.slots_ET,
        num_tokens,
        tiles,
        limit,
        E=num_experts,
        K=per_token,
        R=x.shape[-1],
        F=features,
        BLOCK_E=triton.next_power_of_2(num_experts),
        PTX=not target.architecture,
        **tiling,
        **target.launch_options,
    )
    return out


def sort(target: Target, routing: Routing, num_experts: int) -> Pairs:
    ids_TK, counts_E = routing.expert_ids_TK, routing.counts_E
    if counts_E is None:
        counts_E = torch.zeros(num_experts, dtype=torch.int32, device=ids_TK.device)
    slots_ET = torch.empty((num_experts, ids_TK.shape[0]), dtype=torch.int32, device=ids_TK.device)
    if len(ids_TK):
        _sort_kernel[(triton.cdiv(ids_TK.numel(), 256),)](
            ids_TK,
            routing.ranks_TK,
            counts_E,
            slots_ET,
            ids_TK.numel(),
            ids_TK.shape[0],
            BLOCK=256,
            num_warps=4,
            **target.launch_options,
        )
    return Pairs(routing, counts_E, slots_ET)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Of all experts together, whichever pairs each has."""
    used = min(num_experts, num_pairs)
    return used + (num_pairs - used) // block_m


def _tiling(target: Target, num_pairs: int, num_experts: int) -> dict[str, int]:
    """By the mean number of rows of an expert; BLOCK_N counts pairs of gate and up.

    Warp groups want 64 weight rows for every four warps, or warps expand the same weights. Tiles of 128
    tokens spill where both operands and sums are in registers; with tensor memory they spill only in four warps.
    """
    mean = num_pairs / num_experts
    if mean <= 0.5:  # fewer programs than would fill the GPU: small ones
        return {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_B": 4, "num_warps": 2, "num_stages": 4}
    if mean <= 48:
        block_m = 16 if mean <= 16 else 32
        return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_B": 4, "num_warps": 4, "num_stages": 4}
    roomy = target.warp_groups or target.tensor_memory
    block_m = 128 if roomy and mean > 96 else 64
    warps = 8 if target.tensor_memory and block_m == 128 else 4
    return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_B": 2, "num_warps": warps, "num_stages": 3}


@triton.jit
def _sort_kernel(expert_ids, ranks, counts, slots, num_pairs, num_tokens, BLOCK: tl.constexpr, PDL: tl.constexpr):
    depend(PDL)
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = pair < num_pairs
    expert = tl.load(expert_ids + pair, mask=live, other=0)
    if ranks is None:
        rank = tl.atomic_add(counts + expert, 1, mask=live, sem="relaxed")
    else:
        rank = tl.load(ranks + pair, mask=live, other=0)
    tl.store(slots + expert.to(tl.int64) * num_tokens + rank, pair, mask=live)


@triton.jit
def expert_of(counts, tile, E: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """(the expert of a tile, E past the last tile; the tile's first row among those of the expert; how many it has)."""
    expert_E = tl.arange(0, BLOCK_E)
    count_E = tl.load(counts + expert_E, mask=expert_E < E, other=0)
    tiles_E = (count_E + BLOCK_M - 1) // BLOCK_M
    end_E = tl.cumsum(tiles_E, 0)
    expert = tl.sum((end_E <= tile).to(tl.int32), 0)
    mine_E = expert_E == expert
    first = (tile - tl.sum(tl.where(mine_E, end_E - tiles_E, 0), 0)) * BLOCK_M
    return expert, first, tl.sum(tl.where(mine_E, count_E, 0), 0)


@triton.jit
def pairs_of(slots, expert, first, count, num_tokens, BLOCK_M: tl.constexpr):
    """(the pairs of a tile, which of them there are)."""
    member_M = first + tl.arange(0, BLOCK_M)
    live_M = member_M < count
    return tl.load(slots + expert.to(tl.int64) * num_tokens + member_M, mask=live_M, other=0), live_M


@triton.jit
def swiglu(gate, up, limit):
    """NaN stays NaN."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return (up + 1) * gate * tl.sigmoid(gate * ALPHA)


@triton.jit
def _scales(scales, row_N, live_N, first, R: tl.constexpr, BLOCK_B: tl.constexpr):
    block_B = first + tl.arange(0, BLOCK_B)
    live_NB = live_N[:, None] & (block_B < R // 32)[None, :]
    return tl.load(scales + row_N[:, None] * (R // 32) + block_B[None, :], mask=live_NB, other=0)


# Four bytes to bfloat16: low nibbles in $0 and $1, high nibbles in $2 and $3. Bytes 1 and 2 change places, so that the
# two values of a register are 16 bits apart; sign and magnitude are moved to the highest and to the lowest exponent
# bits, and a product with 2^126 makes of them what they stand for (one half was a subnormal number).
_TO_BFLOAT16 = tl.constexpr("""
{
    .reg .b32 w, s, m, huge, zero;
    prmt.b32 w, $4, 0, 0x3120;
    mov.b32 huge, 0x7e807e80;
    mov.b32 zero, 0x80008000;
    shl.b32 s, w, 12;
    shl.b32 m, w, 6;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 m, s, zero, m, 0xea;
    fma.rn.bf16x2 $0, m, huge, zero;
    shl.b32 s, w, 4;
    shr.u32 m, w, 2;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 m, s, zero, m, 0xea;
    fma.rn.bf16x2 $1, m, huge, zero;
    shl.b32 s, w, 8;
    shl.b32 m, w, 2;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 m, s, zero, m, 0xea;
    fma.rn.bf16x2 $2, m, huge, zero;
    shr.u32 m, w, 6;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 m, w, zero, m, 0xea;
    fma.rn.bf16x2 $3, m, huge, zero;
}
""")


@triton.jit
def _expand(nibbles):
    """float32; as the assembler, but with the exponent bits of a float."""
    nibbles = nibbles.to(tl.int32)
    return (((nibbles & 7) << 22) | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126


@triton.jit
def _multiply(
    sum_NM,
    blocks,
    scale_NB,
    row_N,
    live_N,
    first,
    low_MR,
    high_MR,
    R: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PTX: tl.constexpr,
):
    """Adds the product of the weights from block `first` of each row, and the low and high halves of tokens."""
    byte_R = first * 16 + tl.arange(0, 16 * BLOCK_B)
    at_NR = row_N[:, None] * (R // 2) + byte_R[None, :]
    bytes_NR = tl.load(blocks + at_NR, mask=live_N[:, None] & (byte_R < R // 2)[None, :], other=0)
    bits_NB = scale_NB.to(tl.int32) << 23
    bits_NB = tl.where(scale_NB == 255, 0x7FC00000, tl.maximum(bits_NB, 0x00400000))
    power_NB = bits_NB.to(tl.float32, bitcast=True).to(low_MR.dtype if low_MR.dtype == tl.bfloat16 else tl.float32)
    power_NR = tl.reshape(tl.broadcast_to(power_NB[:, :, None], (BLOCK_N, BLOCK_B, 16)), (BLOCK_N, 16 * BLOCK_B))
    if PTX and low_MR.dtype == tl.bfloat16:
        low_NR, high_NR = tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,=r,=r,r", [bytes_NR], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low_NR, high_NR = _expand(bytes_NR & 15), _expand(bytes_NR >> 4)
    low_NR, high_NR = (low_NR * power_NR).to(low_MR.dtype), (high_NR * power_NR).to(low_MR.dtype)
    sum_NM = tl.dot(low_NR, tl.trans(low_MR), sum_NM, input_precision="ieee")
    return tl.dot(high_NR, tl.trans(high_MR), sum_NM, input_precision="ieee")


@triton.jit
def _experts_kernel(
    x,
    blocks,
    scales,
    bias,
    weights,
    added,
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
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """Without routing weights: the gated product, x by token. With them: the second product, x by pair."""
    GATED: tl.constexpr = weights is None
    depend(PDL)
    tile = tl.program_id(0) % tiles  # programs beside each other share the weight rows of an expert
    expert, first, count = expert_of(counts, tile, E, BLOCK_E, BLOCK_M)
    if expert < E:
        pair_M, live_M = pairs_of(slots, expert, first, count, num_tokens, BLOCK_M)
        feature_N = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = feature_N < F
        half_R = tl.arange(0, 16 * BLOCK_B)
        half_R = half_R // 16 * 32 + half_R % 16  # the low half of each block
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
            at_R = step * 32 + half_R
            live_MR = live_M[:, None] & (at_R < R)[None, :]
            low_MR = tl.load(x + x_M[:, None] + at_R[None, :], mask=live_MR, other=0)
            high_MR = tl.load(x + x_M[:, None] + at_R[None, :] + 16, mask=live_MR, other=0)
            sum_NM = _multiply(sum_NM, blocks, scale_NB, row_N, live_N, step, low_MR, high_MR, R, BLOCK_N, BLOCK_B, PTX)
            scale_NB = next_NB
            if GATED:
                next_NB = _scales(scales, row_N + 1, live_N, step + BLOCK_B, R, BLOCK_B)
                up_NM = _multiply(
                    up_NM, blocks, up_scale_NB, row_N + 1, live_N, step, low_MR, high_MR, R, BLOCK_N, BLOCK_B, PTX
                )
                up_scale_NB = next_NB
        sum_NM += tl.load(bias + row_N, mask=live_N, other=0).to(tl.float32)[:, None]
        if GATED:
            up_NM += tl.load(bias + row_N + 1, mask=live_N, other=0).to(tl.float32)[:, None]
            if added is not None:
                added_NM = added + pair_M.to(tl.int64)[None, :] * (2 * F) + 2 * feature_N[:, None]
                live_NM = live_N[:, None] & live_M[None, :]
                sum_NM += tl.load(added_NM, mask=live_NM, other=0).to(tl.float32)
                up_NM += tl.load(added_NM + 1, mask=live_NM, other=0).to(tl.float32)
            sum_NM = swiglu(sum_NM, up_NM, limit)
        else:
            sum_NM *= tl.load(weights + pair_M, mask=live_M, other=0)[None, :]
        at_NM = pair_M.to(tl.int64)[None, :] * F + feature_N[:, None]
        tl.store(out + at_NM, sum_NM.to(out.dtype.element_ty), mask=live_N[:, None] & live_M[None, :])
