"""The token of each row from half the bytes of the head: int8 logits screen the vocabulary, exact ones decide.

Columns of the head are divided by powers of two that make them alike, and activations multiplied by them. Then a row of
it is scale * codes + rest, its codes int8; activations are scale * (128 high + low) + rest. So a logit is known up to a
bound, by Cauchy and Schwarz, for any weights of ordinary magnitude and up to 4,096 columns (for the sums' rounding):

    |w x - w' x'|  <=  |w - w'| |x|  +  |w'| |x - x'|        w', x' as coded; norms of the rests are computed once

A token whose score cannot reach the best score that is certain is out. For those that remain the logits are computed
from the weights as they are: of a vocabulary of 201,088, for normally distributed weights and activations, some twenty
to a hundred when greedy, and one or two with noise. So what is chosen is what all logits would have chosen; the screen
decides only how long it takes.

    quantize   x -> planes, scales and norms
    logits     of int8, from memory: nearly all of the time (hopper_gemm.py)
    floor      the best score that is certain, of each part of a row
    decide     the exact scores of those that reach it, and the best of them

Where it is no gain, all logits are made: for more rows than TILES cover, and of weights that int8 tells too little of.

Shape suffixes: N rows, H hidden, V vocabulary, B tokens of a part, S parts of a row.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.choose.hopper_gemm import TILES, logits
from oscine.ops.choose.screen_size import screen_bytes
from oscine.ops.interface import Chooser, LmHead, Sample, SamplingBatch, Shapes, Use, unmet
from oscine.ops.launch import arrivals, depend
from oscine.ops.linear.hopper_stream import tile_for
from oscine.ops.sample.triton import apply_temperature, gumbel, in_vocabulary, settle
from oscine.ops.target import Target

MAX_TOKENS = TILES[-1].max_tokens
PART = 1024  # tokens of a program
# The mean bound in standard deviations of a logit: 0.45 for normally distributed weights, which leaves some fifty of
# 201,088 tokens; 1 leaves 2,000, whose exact scores take 10 us; 2 would leave a third of all.
MAX_DOUBT = 1.0
CODED_AT_ONCE = 8192  # rows of the head, to bound the workspace
MAX_CODE = tl.constexpr(127)  # of int8
MAX_FINE = tl.constexpr(127 * 128)  # of two planes
# What rounding adds to the bound: sums of float32 products, relative to |w'| |x|; and all else, relative to the bound.
ROUNDED_SUM = tl.constexpr(2.0**-18)
ROUNDED_BOUND = tl.constexpr(1 + 2.0**-10)


@dataclass(frozen=True, slots=True)
class Screen:
    """The head in int8, row by row."""

    column_H: Tensor  # float32, powers of two; what columns were divided by
    codes_VH: Tensor  # int8
    scale_V: Tensor  # float32
    norm_V: Tensor  # float32; of scale * codes
    rest_V: Tensor  # float32; norm of what the codes leave of the row


def chooser_use(shapes: Shapes) -> Use:
    return Use(
        f"up to {MAX_TOKENS} rows",
        "reference",
        unmet(("hidden size modulo 16", 0, shapes.hidden % 16)),
    )


def prepare(weight_VH: Tensor) -> Screen | None:
    """None where rows are not made of whole 16 bytes, and where too much would have to be computed exactly."""
    vocab, hidden = weight_VH.shape
    if hidden % 16:
        return None
    parts = [slice(start, start + CODED_AT_ONCE) for start in range(0, vocab, CODED_AT_ONCE)]
    square_H = torch.zeros(hidden, dtype=torch.float32, device=weight_VH.device)
    for rows in parts:
        square_H += weight_VH[rows].float().square().sum(0)
    square_H /= vocab
    # Powers of two near the roots of mean squares; 1 where these are 0.
    column_H = torch.where(square_H > 0, square_H, 1).log2().div(2).round().exp2()
    codes_VH = torch.empty(vocab, hidden, dtype=torch.int8, device=weight_VH.device)
    scale_V, norm_V, rest_V = (torch.empty(vocab, dtype=torch.float32, device=weight_VH.device) for _ in range(3))
    for rows in parts:
        exact = weight_VH[rows].float() / column_H
        scale = exact.abs().amax(1, keepdim=True) / MAX_CODE.value
        scale = scale.masked_fill(scale == 0, 1)
        codes = (exact / scale).round_().clamp_(-MAX_CODE.value, MAX_CODE.value)
        coded = codes * scale
        codes_VH[rows], scale_V[rows] = codes.to(torch.int8), scale[:, 0]
        norm_V[rows], rest_V[rows] = coded.norm(dim=1), (exact - coded).norm(dim=1)
    if rest_V.mean() * hidden**0.5 > MAX_DOUBT * norm_V.mean():
        return None
    return Screen(column_H, codes_VH, scale_V, norm_V, rest_V)


def chooser(target: Target, lm_head: LmHead, sample: Sample) -> Chooser:
    def choose(x_NH: Tensor, weight_VH: Tensor, screen: Screen | None, sampling: SamplingBatch) -> Tensor:
        if screen is None or not 0 < len(x_NH) <= MAX_TOKENS:
            return sample(lm_head(x_NH, weight_VH), sampling).token_ids_N
        return screened(target, x_NH, weight_VH, screen, sampling)

    return Chooser(prepare, screen_bytes, choose)


def screened(target: Target, x_NH: Tensor, weight_VH: Tensor, screen: Screen, sampling: SamplingBatch) -> Tensor:
    """int64 [N]; as `sample` of all logits, of a batch that asks for nothing but temperature.

    Each rank decides among the tokens of its own part of the vocabulary. The best of them all is the token.
    """
    (num_rows, hidden), vocab, device = x_NH.shape, len(weight_VH), x_NH.device
    parts, options = triton.cdiv(vocab, PART), target.launch_options
    communicator = target.communicator
    first = None if communicator.num_ranks == 1 else communicator.rank * vocab

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    planes_2NH, scale_N, norm_N, rest_N = quantize(target, x_NH, screen)
    tile = tile_for(num_rows, TILES)
    assert tile is not None
    rough_NV = logits(planes_2NH, scale_N, screen.codes_VH, screen.scale_V, tile)
    floor_NS = empty(torch.float32, num_rows, parts)
    scores = (rough_NV, screen.norm_V, screen.rest_V, norm_N, rest_N)
    drawn = (sampling.temperature_N, sampling.seed_N, sampling.position_N, vocab, first)
    noise = not sampling.greedy
    floor_kernel[(parts, num_rows)](*scores, *drawn, floor_NS, NOISE=noise, BLOCK_B=PART, num_warps=4, **options)
    ids_N, values_N = empty(torch.int64, num_rows), None if first is None else empty(torch.float32, num_rows)
    decide_kernel[(parts, num_rows)](
        *scores,
        *drawn,
        floor_NS,
        x_NH,
        weight_VH,
        hidden,
        ids_N,
        values_N,
        empty(torch.float32, num_rows, parts),
        empty(torch.int32, num_rows, parts),
        arrivals(device),
        NOISE=noise,
        BLOCK_B=PART,
        BLOCK_H=triton.next_power_of_2(hidden),
        BLOCK_S=triton.next_power_of_2(parts),
        num_warps=4,
        **options,
    )
    return ids_N if values_N is None else communicator.best(values_N, ids_N)


def quantize(target: Target, x_NH: Tensor, screen: Screen) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(planes int8 [2, N, H], their scales, norms of what they stand for, norms of what they leave of it)"""
    num_rows, hidden = x_NH.shape
    planes_2NH = torch.empty(2, num_rows, hidden, dtype=torch.int8, device=x_NH.device)
    # Three tensors, since slices would not be aligned.
    scale_N, norm_N, rest_N = (torch.empty(num_rows, dtype=torch.float32, device=x_NH.device) for _ in range(3))
    quantize_kernel[(num_rows,)](
        x_NH,
        screen.column_H,
        planes_2NH,
        scale_N,
        norm_N,
        rest_N,
        num_rows * hidden,
        hidden,
        BLOCK_H=triton.next_power_of_2(hidden),
        num_warps=8,
        **target.launch_options,
    )
    return planes_2NH, scale_N, norm_N, rest_N


@triton.jit
def quantize_kernel(
    x, column, planes, scale, norm, rest, plane_stride, hidden, BLOCK_H: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < hidden
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    even_H = tl.load(column + column_H, mask=inside_H, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    at_H = row * hidden + column_H
    x_H = tl.load(x + at_H, mask=inside_H, other=0.0).to(tl.float32) * even_H
    step = tl.max(tl.abs(x_H), 0) / MAX_FINE
    step = tl.where(step == 0, 1.0, step)
    fine_H = tl.floor(x_H / step + 0.5)
    fine_H = tl.minimum(tl.maximum(fine_H, -MAX_FINE), MAX_FINE)
    high_H = tl.floor(fine_H / 128 + 0.5)
    tl.store(planes + at_H, high_H.to(tl.int8), mask=inside_H)
    tl.store(planes + plane_stride + at_H, (fine_H - high_H * 128).to(tl.int8), mask=inside_H)
    rest_H = x_H - fine_H * step
    tl.store(scale + row, step)
    tl.store(norm + row, tl.sqrt(tl.sum(x_H * x_H, 0)))
    tl.store(rest + row, tl.sqrt(tl.sum(rest_H * rest_H, 0)))


@triton.jit
def _drawn(logit, token, row, drawn):
    """The score of a logit: with the token's noise, which is the same whenever it is asked for; itself where greedy.

    drawn: (temperature, seed, position, first token of the part as in_vocabulary)
    """
    temperature, seed, position, first = drawn
    heat = tl.load(temperature + row)
    if heat != 0:
        logit = apply_temperature(logit, heat) + gumbel(
            in_vocabulary(token, first), tl.load(seed + row), tl.load(position + row)
        )
    return logit


@triton.jit
def _scores(known, drawn, vocab, SIGN, NOISE: tl.constexpr, BLOCK_B: tl.constexpr, PDL: tl.constexpr):
    """The program's tokens, and the lowest (SIGN -1) or highest (1) scores they can have; -inf or NaN: no token.

    known: (rough, row_norm, row_rest, norm, rest). Waits for the kernel before this one.
    """
    rough, row_norm, row_rest, norm, rest = known
    row = tl.program_id(1)
    token_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    depend(PDL)
    inside_B = token_B < vocab
    row_norm_B = tl.load(row_norm + token_B, mask=inside_B, other=0.0)
    row_rest_B = tl.load(row_rest + token_B, mask=inside_B, other=0.0)
    x_B = tl.load(rough + row.to(tl.int64) * vocab + token_B, mask=inside_B, other=float("-inf"))
    x_norm = tl.load(norm + row)
    bound_B = row_rest_B * x_norm + row_norm_B * (tl.load(rest + row) + ROUNDED_SUM * x_norm)
    x_B += SIGN * ROUNDED_BOUND * bound_B
    if NOISE:
        x_B = _drawn(x_B, token_B, row, drawn)  # noise is finite, so -inf stays what it is
    return token_B, x_B


@triton.jit(do_not_specialize=["first"])
def floor_kernel(
    rough,
    row_norm,
    row_rest,
    norm,
    rest,
    temperature,
    seed,
    position,
    vocab,
    first,
    floor,
    NOISE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    known, drawn = (rough, row_norm, row_rest, norm, rest), (temperature, seed, position, first)
    _, lowest_B = _scores(known, drawn, vocab, -1, NOISE, BLOCK_B, PDL)
    tl.store(floor + row * tl.num_programs(0) + tl.program_id(0), tl.max(lowest_B, 0))


@triton.jit(do_not_specialize=["first"])
def decide_kernel(
    rough,
    row_norm,
    row_rest,
    norm,
    rest,
    temperature,
    seed,
    position,
    vocab,
    first,
    floor,
    x,
    weight,
    hidden,
    ids,
    values,
    best_value,
    best_id,
    arrivals,
    NOISE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    part_S = tl.arange(0, BLOCK_S)
    column_H = tl.arange(0, BLOCK_H)
    known, drawn = (rough, row_norm, row_rest, norm, rest), (temperature, seed, position, first)
    token_B, highest_B = _scores(known, drawn, vocab, 1, NOISE, BLOCK_B, PDL)
    parts = tl.num_programs(0)
    floor_S = tl.load(floor + row * parts + part_S, mask=part_S < parts, other=float("-inf"))
    # One after the other: there are few, and most parts have none.
    left_B = (highest_B >= tl.max(floor_S, 0)) & (highest_B > float("-inf")) & (token_B < vocab)
    value = tl.full((), float("-inf"), tl.float32)
    id = tl.program_id(0) * BLOCK_B
    x_H = tl.load(x + row * hidden + column_H, mask=column_H < hidden, other=0.0).to(tl.float32)
    token = tl.min(tl.where(left_B, token_B, vocab), 0)
    while token < vocab:
        weight_H = tl.load(weight + token.to(tl.int64) * hidden + column_H, mask=column_H < hidden, other=0.0)
        score = tl.sum(weight_H.to(tl.float32) * x_H, 0)
        if NOISE:
            score = _drawn(score, token, row, drawn)
        if score > value:
            value = score
            id = token
        left_B = left_B & (token_B != token)
        token = tl.min(tl.where(left_B, token_B, vocab), 0)
    out, bests = (ids, values, first), (best_value, best_id, arrivals)
    settle(value, id, row, out, bests, vocab, BLOCK_S)
