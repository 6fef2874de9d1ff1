"""The mixture of experts on compute capability 12.x with FP8 activations: products of e4m3 with block scales.

Exact activations have the portable kernels (triton.py). With --activation-dtype fp8, MXFP4 weights are multiplied with
x and h in e4m3 as fp8.py defines them, which is what Hopper and 10.x do. Triton expands mixed operands to bfloat16 on
these chips. So weights become e4m3 in registers, and both operands have the type for which `tl.dot_scaled` is
`mma.sync ... kind::mxf8f6f4.block_scale`.

    round     rows[t] = x[t] in e4m3, and its scale, a power of two
    sort      as in triton.py
    gemm      h[pair] = swiglu(W_gu x + b_gu), in e4m3 with one factor
    gemm      y[pair] = weight * (W_d h + b_d)

e2m1 has the exponent bits of e4m3 but for the two highest ones, so a nibble moved to the right place is the weight
times 2^-6, zeros and subnormal numbers too. The sums are multiplied with 2^6. Published blocks are repacked in pairs:
byte j of 32 holds value j of the first block below value j of the second, so low and high nibbles are operands of their
own, with a scale for each 32 values. An odd number of blocks gets one more, of zeros.

Shape suffixes: T tokens, K experts per token, E experts, H hidden, I intermediate; M pairs of a tile, N weight rows of
a tile, B pairs of blocks along the reduced dimension, R that dimension.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.launch import depend
from oscine.ops.moe import fp8, trial_inputs
from oscine.ops.moe import triton as portable
from oscine.ops.moe.triton import expert_of, pairs_of, swiglu
from oscine.ops.target import Target

moe_use = fp8.moe_use
SCALE = tl.constexpr(64.0)  # of a weight, over its form in e4m3
E4M3 = tl.constexpr("e4m3")
ONE = tl.constexpr(127)  # a block scale of 1


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of all experts."""

    blocks: Tensor  # uint8 [E, rows, pairs of blocks, 32]
    scales: Tensor  # uint8 [E, rows, pairs of blocks, 2]
    bias: Tensor  # [E, rows]


@dataclass(frozen=True, slots=True)
class RtxExperts:
    gate_up: Matrix
    down: Matrix


def prepare_experts(target: Target, experts: MxExperts) -> MxExperts | RtxExperts:
    """For the target's type of activations. Raises ValueError for sizes that are not multiples of 32."""
    if target.activation_dtype != "fp8":
        return portable.prepare_experts(experts)
    intermediate = experts.gate_up_scales.shape[1] // 2
    if intermediate % 32:
        raise ValueError(f"the Blackwell experts need an intermediate size in multiples of 32, not {intermediate}")
    return RtxExperts(
        _matrix(experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias),
        _matrix(experts.down_blocks, experts.down_scales, experts.down_bias),
    )


def _matrix(blocks: Tensor, scales: Tensor, bias: Tensor) -> Matrix:
    """blocks [E, rows, k / 32, 16], scales [E, rows, k / 32], bias [E, rows]. Expert by expert, to save memory."""
    num_experts, rows, k_blocks = scales.shape
    pairs = triton.cdiv(k_blocks, 2)
    paired = blocks.new_zeros(num_experts, rows, pairs, 32)
    paired_scales = scales.new_zeros(num_experts, rows, pairs, 2)
    paired_scales.flatten(2)[..., :k_blocks] = scales
    for published, out in zip(blocks, paired, strict=True):
        values = torch.stack((published & 15, published >> 4), -1).flatten(-2)  # [rows, k / 32, 32]
        out.copy_(values[:, 0::2])
        out[:, : k_blocks // 2] |= values[:, 1::2] << 4
    return Matrix(paired, paired_scales, bias)


def moe(target: Target, x_TH: Tensor, routing: Routing, experts: MxExperts | RtxExperts, swiglu_limit: float) -> Tensor:
    """bf16 [T, H] -> bf16 partial sums [T, K, H]."""
    if isinstance(experts, MxExperts):
        return portable.moe(target, x_TH, routing, experts, swiglu_limit)
    mean = routing.expert_ids_TK.numel() / len(experts.down.bias)
    return run(target, x_TH, routing, experts, swiglu_limit, tiling_for(mean))


def tiling_for(mean: float) -> dict[str, int]:
    """By the mean number of rows of an expert; BLOCK_N counts pairs of gate and up, BLOCK_B pairs of blocks."""
    if mean <= 48:
        block_m = 16 if mean <= 16 else 32
        return {"BLOCK_M": block_m, "BLOCK_N": 64, "BLOCK_B": 2, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_B": 2, "num_warps": 8, "num_stages": 3}  # 128 tokens would spill


def run(
    target: Target, x_TH: Tensor, routing: Routing, experts: RtxExperts, limit: float, tiling: dict[str, int]
) -> Tensor:
    """The op with a tiling given."""
    assert routing.added is None, "adapters need exact activations"
    (num_tokens, per_token), hidden = routing.expert_ids_TK.shape, x_TH.shape[1]
    y_TKH = x_TH.new_empty(num_tokens, per_token, hidden)
    if not num_tokens:
        return y_TKH
    rows_TH = torch.empty(x_TH.shape, dtype=torch.float8_e4m3fn, device=x_TH.device)
    scales_T = torch.empty(num_tokens, dtype=torch.float32, device=x_TH.device)
    _round_kernel[(num_tokens,)](
        x_TH,
        rows_TH,
        scales_T,
        H=hidden,
        BLOCK_H=triton.next_power_of_2(hidden),
        num_warps=4,
        **target.launch_options,
    )
    pairs = portable.sort(target, routing, len(experts.down.bias))
    intermediate = experts.gate_up.bias.shape[1] // 2
    h_PI = torch.empty((num_tokens * per_token, intermediate), dtype=torch.float8_e4m3fn, device=x_TH.device)
    _launch(target, rows_TH, scales_T, pairs, experts.gate_up, h_PI, limit, tiling, gated=True)
    _launch(target, h_PI, scales_T, pairs, experts.down, y_TKH, limit, tiling, gated=False)
    return y_TKH


def _launch(
    target: Target,
    rows: Tensor,
    scales_T: Tensor,
    pairs: portable.Pairs,
    matrix: Matrix,
    out: Tensor,
    limit: float,
    tiling: dict[str, int],
    *,
    gated: bool,
) -> None:
    features, num_experts = out.shape[-1], len(matrix.bias)
    tiling = dict(tiling)
    if not gated:
        tiling["BLOCK_N"] *= 2
    (num_tokens, per_token), num_pairs = pairs.shape, pairs.routing.expert_ids_TK.numel()
    tiles = portable.most_tiles(num_pairs, num_experts, tiling["BLOCK_M"])
    _gemm_kernel[(tiles * triton.cdiv(features, tiling["BLOCK_N"]),)](
        rows.view(torch.uint8),  # a masked load has no zero of e4m3
        scales_T,
        matrix.blocks,
        matrix.scales,
        matrix.bias,
        pairs.routing.weights_TK,
        out,
        pairs.counts_E,
        pairs.slots_ET,
        num_tokens,
        tiles,
        limit,
        fp8.h_factor(limit),
        E=num_experts,
        K=per_token,
        R=rows.shape[1],
        F=features,
        GATED=gated,
        BLOCK_E=triton.next_power_of_2(num_experts),
        PTX=target.device.type != "cpu",
        **tiling,
        **target.launch_options,
    )


@triton.jit
def _round_kernel(x, rows, scales, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    """A program for each token."""
    depend(PDL)
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    x_H = tl.load(x + token * H + column_H, mask=column_H < H, other=0).to(tl.float32)
    # The exponent of the largest magnitude is in its upper bits; see planes.py.
    largest = tl.max(x_H.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = tl.maximum((largest >> 23) - 7, 1)
    scaled_H = x_H * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rows + token * H + column_H, scaled_H.to(tl.float8e4nv), mask=column_H < H)
    tl.store(scales + token, (exponent << 23).to(tl.float32, bitcast=True))


# Four bytes to e4m3: low nibbles in $0, high nibbles in $1, times 2^-6
_TO_E4M3 = tl.constexpr("""
{
    .reg .b32 s, m;
    shl.b32 s, $2, 4;
    shl.b32 m, $2, 2;
    and.b32 m, m, 0x1c1c1c1c;
    and.b32 s, s, 0x80808080;
    or.b32 $0, s, m;
    shr.u32 m, $2, 2;
    and.b32 m, m, 0x1c1c1c1c;
    and.b32 s, $2, 0x80808080;
    or.b32 $1, s, m;
}
""")


@triton.jit
def _expand(bytes_NR, PTX: tl.constexpr):
    if PTX:
        low_NR, high_NR = tl.inline_asm_elementwise(
            _TO_E4M3, "=r,=r,r", [bytes_NR], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    else:
        low_NR = ((bytes_NR & 7) << 2) | ((bytes_NR & 8) << 4)
        high_NR = ((bytes_NR & 0x70) >> 2) | (bytes_NR & 0x80)
    return low_NR, high_NR


@triton.jit
def _multiply(
    sum_NM,
    blocks,
    scales,
    row_N,
    live_N,
    first,
    low_RM,
    high_RM,
    R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PTX: tl.constexpr,
):
    """Adds the product of the weights from pair `first` of each row, and the tokens of first and second blocks."""
    PAIRS: tl.constexpr = (R + 63) // 64
    byte_R = first * 32 + tl.arange(0, 32 * BLOCK_B)
    live_NR = live_N[:, None] & (byte_R < PAIRS * 32)[None, :]
    bytes_NR = tl.load(blocks + row_N[:, None] * (PAIRS * 32) + byte_R[None, :], mask=live_NR, other=0)
    low_NR, high_NR = _expand(bytes_NR, PTX)
    pair_B = first + tl.arange(0, BLOCK_B)
    live_NB = live_N[:, None] & (pair_B < PAIRS)[None, :]
    at_NB = scales + row_N[:, None] * (PAIRS * 2) + 2 * pair_B[None, :]
    low_NB = tl.load(at_NB, mask=live_NB, other=0)
    high_NB = tl.load(at_NB + 1, mask=live_NB, other=0)
    one_MB = tl.full((BLOCK_M, BLOCK_B), ONE, tl.uint8)
    sum_NM = tl.dot_scaled(low_NR, low_NB, E4M3, low_RM, one_MB, E4M3, sum_NM)
    return tl.dot_scaled(high_NR, high_NB, E4M3, high_RM, one_MB, E4M3, sum_NM)


@triton.jit
def _gemm_kernel(
    rows,
    token_scales,
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
    factor,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    F: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """GATED: the first product and SwiGLU, rows by token. Else the second product, rows by pair."""
    depend(PDL)
    tile = tl.program_id(0) % tiles  # programs beside each other share the weight rows of an expert
    expert, first, count = expert_of(counts, tile, E, BLOCK_E, BLOCK_M)
    if expert < E:
        pair_M, live_M = pairs_of(slots, expert, first, count, num_tokens, BLOCK_M)
        feature_N = tl.program_id(0) // tiles * BLOCK_N + tl.arange(0, BLOCK_N)
        live_N = feature_N < F
        lane_R = tl.arange(0, 32 * BLOCK_B)
        lane_R = lane_R // 32 * 64 + lane_R % 32  # the first block of each pair
        token_M = pair_M // K if GATED else pair_M
        row_N = expert.to(tl.int64) * F + feature_N
        if GATED:
            row_N = 2 * row_N
        sum_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        up_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        at_M = rows + token_M.to(tl.int64) * R
        for step in range(0, (R + 63) // 64, BLOCK_B):
            at_R = step * 64 + lane_R
            low_RM = tl.load(at_M[None, :] + at_R[:, None], mask=live_M[None, :] & (at_R < R)[:, None], other=0)
            high_R = at_R + 32
            high_RM = tl.load(at_M[None, :] + high_R[:, None], mask=live_M[None, :] & (high_R < R)[:, None], other=0)
            sum_NM = _multiply(sum_NM, blocks, scales, row_N, live_N, step, low_RM, high_RM, R, BLOCK_M, BLOCK_B, PTX)
            if GATED:
                up_NM = _multiply(
                    up_NM, blocks, scales, row_N + 1, live_N, step, low_RM, high_RM, R, BLOCK_M, BLOCK_B, PTX
                )
        bias_N = tl.load(bias + row_N, mask=live_N, other=0).to(tl.float32)
        if GATED:
            scale_M = tl.load(token_scales + token_M, mask=live_M, other=0) * SCALE
            up_bias_N = tl.load(bias + row_N + 1, mask=live_N, other=0).to(tl.float32)
            sum_NM = sum_NM * scale_M[None, :] + bias_N[:, None]
            up_NM = up_NM * scale_M[None, :] + up_bias_N[:, None]
            sum_NM = swiglu(sum_NM, up_NM, limit) * factor
        else:
            weight_M = tl.load(weights + pair_M, mask=live_M, other=0)
            sum_NM = (sum_NM * (SCALE / factor) + bias_N[:, None]) * weight_M[None, :]
        at_NM = pair_M.to(tl.int64)[None, :] * F + feature_N[:, None]
        tl.store(out + at_NM, sum_NM.to(out.dtype.element_ty), mask=live_N[:, None] & live_M[None, :])


def trial(target: Target) -> str | None:
    """What is wrong with the kernels on this GPU, in words: they run on small experts, beside the reference."""

    return trial_inputs.wrong(target, prepare_experts, run, [tiling_for(mean) for mean in (16, 48, 96)])
