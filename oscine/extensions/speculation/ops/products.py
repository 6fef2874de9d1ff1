"""Products of activations with 4-bit weights (weights.py), in Triton: sm_80 and newer.

    linear   y = x W^T
    sums     the same, with the sum over columns in parts, for a norm that adds them up
    gated    swiglu of the first and the second half of y
    choose   the best row per token, of logit / temperature + noise; logits stay in registers

One token: memory bounds the time, so its columns are multiplied outside of the tensor cores, with three instructions
per weight. Its first words are loaded while the kernel before still runs. More tokens: weights are expanded to
the dtype of the activations, exactly but for the scale of the row, which the sums are multiplied by.

Shape suffixes: R weight rows of a program, T tokens of a program, W words, B blocks of a row, S parts of all rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.speculation.ops.interface import SliceOfHead
from oscine.extensions.speculation.ops.weights import LOW_PLANES, PackedMatrix, integers, scales_of
from oscine.ops.interface import SamplingBatch
from oscine.ops.launch import depend
from oscine.ops.sample.triton import apply_temperature, gumbel
from oscine.ops.target import Target

LANE_WORDS = 128  # words of a row that a warp loads at once
DOT_WORDS = 32  # words of a row in one product of the tensor cores
MAX_ROWS = 4  # of a program for one token
PROGRAMS_PER_SM = 8  # from here on, more rows per program save loads of activations
PROGRAMS_WITHOUT_OTHERS = 3  # of an SM; up to here programs may have twice the registers that ptxas would give them
SUMMED_WORDS = 720  # of a part of the sum
FEW_TOKENS, MANY_TOKENS = 16, 64  # of a program with tensor cores
ZEROS = tl.constexpr(0x88888888 - (1 << 32))  # the word of eight zeros
MAX_COMPARED = 8192  # parts that `choose` compares at once


def linear(target: Target, x: Tensor, weight: PackedMatrix) -> Tensor:
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _multiply(target, x, weight, out, parts=1, gated=False)
    return out


def sums(target: Target, x: Tensor, weight: PackedMatrix) -> Tensor:
    """[T, J, N] float32. J depends on nothing but the weight and the number of tokens."""
    words = weight.words_NW.shape[1]
    parts = max(1, words // SUMMED_WORDS) if len(x) <= FEW_TOKENS else 1
    out = torch.empty(len(x), parts, len(weight), dtype=torch.float32, device=x.device)
    _multiply(target, x, weight, out, parts, gated=False)
    return out


def gated(target: Target, x: Tensor, weight: PackedMatrix) -> Tensor:
    out = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    _multiply(target, x, weight, out, parts=1, gated=True)
    return out


def choose(target: Target, x_NH: Tensor, head: SliceOfHead, sampling: SamplingBatch) -> Tensor:
    x, weight, num_tokens = x_NH.contiguous(), head.weight_UH, len(x_NH)
    ids_N = torch.empty(num_tokens, dtype=torch.int64, device=x.device)
    if not num_tokens:
        return ids_N
    tiling = _tiling(target, num_tokens, weight, 1)
    parts, tokens = triton.cdiv(len(weight), tiling["ROWS"]), triton.cdiv(num_tokens, tiling["TOKENS"])
    best_NS = torch.empty(num_tokens, parts, dtype=torch.float32, device=x.device)
    row_NS = torch.empty(num_tokens, parts, dtype=torch.int32, device=x.device)
    choose_kernel[(tokens, parts)](
        *_inputs(x, weight),
        sampling.temperature_N,
        sampling.seed_N,
        sampling.position_N,
        head.ids_U,
        best_NS,
        row_NS,
        len(weight),
        num_tokens,
        x.shape[1],
        NOISE=not sampling.greedy,
        **tiling,
        **target.launch_options,
    )
    block = min(triton.next_power_of_2(parts), MAX_COMPARED)
    decide_kernel[(num_tokens,)](
        best_NS, row_NS, head.ids_U, ids_N, parts, BLOCK_S=block, num_warps=8, **target.launch_options
    )
    return ids_N


def _multiply(target: Target, x: Tensor, weight: PackedMatrix, out: Tensor, parts: int, gated: bool) -> None:
    x, num_tokens, num_rows = x.contiguous(), len(x), out.shape[-1]
    if not num_tokens:
        return
    tiling = _tiling(target, num_tokens, weight, parts)
    out_rows = tiling["ROWS"] // 2 if gated else tiling["ROWS"]
    # Programs beside each other share weights.
    grid = triton.cdiv(num_tokens, tiling["TOKENS"]), triton.cdiv(num_rows, out_rows), parts
    product_kernel[grid](
        *_inputs(x, weight),
        out,
        num_rows,
        num_tokens,
        x.shape[1],
        PARTS=parts,
        GATED=gated,
        **tiling,
        **target.launch_options,
    )


def _inputs(x: Tensor, weight: PackedMatrix) -> tuple[Any, ...]:
    assert x.shape[1] == weight.columns
    return x, weight.words_NW, weight.scales_NB, weight.row_scale_N, weight.scales_NB.shape[1]


def _tiling(target: Target, num_tokens: int, weight: PackedMatrix, parts: int) -> dict[str, int]:
    """Of so many parts of the sum."""
    if num_tokens > 1:
        shared = {"WORDS_W": DOT_WORDS, "num_stages": 2}
        if num_tokens <= FEW_TOKENS:
            few = {"ROWS": 32, "TOKENS": FEW_TOKENS, "num_warps": 4, **shared}
            programs = triton.cdiv(len(weight), few["ROWS"]) * parts
            return few | ({"maxnreg": 168} if programs <= PROGRAMS_WITHOUT_OTHERS * target.sm_count else {})
        # Where operands are in registers, there is room for half as many tokens.
        tokens = MANY_TOKENS if target.warp_groups or target.tensor_memory else MANY_TOKENS // 2
        return {"ROWS": 64, "TOKENS": tokens, "num_warps": 4, **shared}
    rows = MAX_ROWS
    while rows > 2 and len(weight) * parts < rows * PROGRAMS_PER_SM * target.sm_count:
        rows //= 2
    # One warp: it has the words of a row and the columns that they meet in the same lanes, so nothing is exchanged.
    return {"ROWS": rows, "TOKENS": 1, "WORDS_W": LANE_WORDS, "num_warps": 1}


@triton.jit
def _words(matrix, row_R, inside_R, first, last, WORDS_W: tl.constexpr):
    """(words [R, W], block scales [R, W / 4]) of a step; nothing from `last` on.

    matrix: (words, scales, row scales, blocks of a row)
    """
    words, scales, _, blocks = matrix
    block_B = first // 4 + tl.arange(0, WORDS_W // 4)
    word_W = first + tl.arange(0, WORDS_W)
    row_R = row_R.to(tl.int64)
    inside_RW = inside_R[:, None] & (word_W < last)[None, :]
    inside_RB = inside_R[:, None] & (block_B < last // 4)[None, :]
    word_RW = tl.load(words + row_R[:, None] * (blocks * 4) + word_W[None, :], inside_RW, other=ZEROS)
    return word_RW, tl.load(scales + row_R[:, None] * blocks + block_B[None, :], inside_RB, other=0)


@triton.jit
def _columns(first, plane: tl.constexpr, WORDS_W: tl.constexpr):
    """The columns of a plane of the words from `first` on."""
    word_W = first + tl.arange(0, WORDS_W)
    return word_W // 4 * 32 + 4 * plane + word_W % 4


@triton.jit
def _one(
    x, matrix, row_R, inside_R, first, last, columns, ROWS: tl.constexpr, WORDS_W: tl.constexpr, PDL: tl.constexpr
):
    """float32 [R, 1] of one token, but for the scale of the row. Waits for the kernel before this one."""
    next_RW, next_scale_RB = _words(matrix, row_R, inside_R, first, last, WORDS_W)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums_RB = tl.zeros((ROWS, WORDS_W // 4), tl.float32)
    for at in range(first, last, WORDS_W):
        word_RW, scale_RB = next_RW, next_scale_RB
        next_RW, next_scale_RB = _words(matrix, row_R, inside_R, at + WORDS_W, last, WORDS_W)
        sums_RW = tl.zeros((ROWS, WORDS_W), tl.float32)
        for plane in tl.static_range(8):
            if plane == LOW_PLANES:
                word_RW = word_RW >> 12
            column_W = _columns(at, plane, WORDS_W)
            x_W = tl.load(x + column_W, column_W < columns, other=0.0).to(tl.float32)
            sums_RW += integers(word_RW, plane, x.dtype.element_ty == tl.bfloat16) * x_W[None, :]
        sums_RB += tl.sum(tl.reshape(sums_RW, (ROWS, WORDS_W // 4, 4)), 2) * scales_of(scale_RB)
    return tl.sum(sums_RB, 1)[:, None]


@triton.jit
def _several(
    x,
    matrix,
    row_R,
    inside_R,
    first,
    last,
    columns,
    num_tokens,
    ROWS: tl.constexpr,
    WORDS_W: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """float32 [R, T], but for the scale of the row. Waits for the kernel before this one."""
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if PDL:
        tl.extra.cuda.gdc_wait()
    sums_RT = tl.zeros((ROWS, TOKENS), tl.float32)
    for at in range(first, last, WORDS_W):
        word_RW, code_RB = _words(matrix, row_R, inside_R, at, last, WORDS_W)
        scale_RBI = tl.broadcast_to(scales_of(code_RB)[:, :, None], (ROWS, WORDS_W // 4, 4))
        scale_RW = tl.reshape(scale_RBI, (ROWS, WORDS_W))
        for plane in tl.static_range(8):
            if plane == LOW_PLANES:
                word_RW = word_RW >> 12
            column_W = _columns(at, plane, WORDS_W)
            inside_WT = (column_W < columns)[:, None] & (token_T < num_tokens)[None, :]
            x_WT = tl.load(x + column_W[:, None] + (token_T.to(tl.int64) * columns)[None, :], inside_WT, other=0.0)
            weight_RW = (integers(word_RW, plane, x.dtype.element_ty == tl.bfloat16) * scale_RW).to(x_WT.dtype)
            sums_RT = tl.dot(weight_RW, x_WT, sums_RT, input_precision="ieee")
    return sums_RT


@triton.jit
def _product(
    x,
    matrix,
    row_R,
    inside_R,
    first,
    last,
    columns,
    num_tokens,
    ROWS: tl.constexpr,
    WORDS_W: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """float32 [R, T] of the words from `first` on and below `last`. Waits for the kernel before this one."""
    scale_R = tl.load(matrix[2] + row_R, inside_R, other=0.0)
    if TOKENS == 1:
        sums_RT = _one(x, matrix, row_R, inside_R, first, last, columns, ROWS, WORDS_W, PDL)
    else:
        sums_RT = _several(x, matrix, row_R, inside_R, first, last, columns, num_tokens, ROWS, WORDS_W, TOKENS, PDL)
    return sums_RT * scale_R[:, None]


@triton.jit(do_not_specialize=["num_tokens"])
def product_kernel(
    x,
    words,
    scales,
    row_scales,
    blocks,
    out,  # [tokens, PARTS, rows]
    num_rows,  # of the output
    num_tokens,
    columns,
    PARTS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS_W: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    matrix = (words, scales, row_scales, blocks)
    part = tl.program_id(2)
    share = tl.cdiv(blocks, PARTS) * 4
    first, last = part * share, tl.minimum((part + 1) * share, blocks * 4)
    OUT_ROWS: tl.constexpr = ROWS // 2 if GATED else ROWS
    first_row = tl.program_id(1) * OUT_ROWS
    row_R = first_row + tl.arange(0, ROWS)
    inside_R = row_R < num_rows
    if GATED:  # rows of gates, then as many of values
        row_R = first_row + tl.arange(0, ROWS) % OUT_ROWS
        inside_R = row_R < num_rows
        row_R += tl.where(tl.arange(0, ROWS) < OUT_ROWS, 0, num_rows)
    sums_RT = _product(x, matrix, row_R, inside_R, first, last, columns, num_tokens, ROWS, WORDS_W, TOKENS, PDL)
    if GATED:
        both_RT2 = tl.permute(tl.reshape(sums_RT, (2, OUT_ROWS, TOKENS)), (1, 2, 0))
        gate_RT, value_RT = tl.split(both_RT2)
        sums_RT = gate_RT / (1 + tl.exp(-gate_RT)) * value_RT
    row_R = first_row + tl.arange(0, OUT_ROWS)
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    at_T = (token_T.to(tl.int64) * PARTS + part) * num_rows
    inside_RT = (row_R < num_rows)[:, None] & (token_T < num_tokens)[None, :]
    tl.store(out + at_T[None, :] + row_R[:, None], sums_RT.to(out.dtype.element_ty), inside_RT)


@triton.jit(do_not_specialize=["num_tokens"])
def choose_kernel(
    x,
    words,
    scales,
    row_scales,
    blocks,
    temperature,
    seed,
    position,
    token_ids,  # of the rows
    best,  # [tokens, programs]
    best_row,
    num_rows,
    num_tokens,
    columns,
    NOISE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WORDS_W: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    row_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside_R = row_R < num_rows
    token_T = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside_T = token_T < num_tokens
    matrix = (words, scales, row_scales, blocks)
    id_R = tl.load(token_ids + row_R, inside_R, other=0)
    score_RT = _product(x, matrix, row_R, inside_R, 0, blocks * 4, columns, num_tokens, ROWS, WORDS_W, TOKENS, PDL)
    if NOISE:
        heat_T = tl.load(temperature + token_T, inside_T, other=0.0)
        if tl.max(heat_T, 0) > 0:
            seed_T = tl.load(seed + token_T, inside_T, other=0)
            position_T = tl.load(position + token_T, inside_T, other=0)
            noise_RT = gumbel(id_R[:, None], seed_T[None, :], position_T[None, :])
            heat_RT = tl.broadcast_to(heat_T[None, :], (ROWS, TOKENS))
            score_RT = tl.where(heat_RT > 0, apply_temperature(score_RT, heat_RT) + noise_RT, score_RT)
    score_RT = tl.where(inside_R[:, None], score_RT, float("-inf"))
    best_T = tl.max(score_RT, 0)
    row_RT = tl.where(score_RT == best_T[None, :], row_R[:, None], num_rows - 1)  # NaN: any row
    at_T = token_T * tl.num_programs(1) + tl.program_id(1)
    tl.store(best + at_T, best_T, inside_T)
    tl.store(best_row + at_T, tl.min(row_RT, 0), inside_T)


@triton.jit
def decide_kernel(best, best_row, token_ids, ids, parts, BLOCK_S: tl.constexpr, PDL: tl.constexpr):
    """A program is a token. Of equals the lower row."""
    token = tl.program_id(0)
    part_S = tl.arange(0, BLOCK_S)
    depend(PDL)
    at_S = token.to(tl.int64) * parts + part_S
    value_S = tl.load(best + at_S, part_S < parts, other=float("-inf"))
    row_S = tl.load(best_row + at_S, part_S < parts, other=0)
    for first in range(BLOCK_S, parts, BLOCK_S):
        inside_S = first + part_S < parts
        other_S = tl.load(best + first + at_S, inside_S, other=float("-inf"))
        other_row_S = tl.load(best_row + first + at_S, inside_S, other=0)
        row_S = tl.where(other_S > value_S, other_row_S, row_S)
        value_S = tl.maximum(value_S, other_S)
    row = tl.load(best_row + token.to(tl.int64) * parts)  # where all are NaN
    chosen_S = value_S == tl.max(value_S, 0)
    lowest = tl.min(tl.where(chosen_S, row_S, 0x7FFFFFFF), 0)
    row = tl.where(lowest == 0x7FFFFFFF, row, lowest)
    tl.store(ids + token, tl.load(token_ids + row))
