"""The token of each row from a quarter or half of the bytes of the head: a screen of the vocabulary, then exact logits.

Columns of the head are divided by powers of two that make them alike, and activations multiplied by them. Each column
has a number from -8 to 8, drawn once, that is added to its weights before they are rounded: the dither. So a row of
weights is scale * (codes - dither) + rest, its codes integers of 8 bits; activations are scale * (128 high + low) +
rest. The sum of dither * x is the same for all rows. Then a logit is known up to a bound, by Cauchy and Schwarz, for
any weights of ordinary magnitude and up to 4,096 columns (for the sums' rounding):

    |w x - w' x'|  <=  |w - w'| |x'|  +  |w| |x - x'|        w', x' as coded; norms of the rests are computed once

If is_coarse, only the high 4 bits of the codes are read, and the low ones are taken to be 7.5. The dither makes the
error of each weight uniform between -8 and 8 scales, whatever the weight, and errors of different columns independent.
So the error (w - w') x' is sub-Gaussian with the standard deviation 16 / sqrt(12) * scale * |x'|, and the bound is
BOUND_DEVIATIONS of these. The best token's error exceeds it with a probability of at most exp(-BOUND_DEVIATIONS^2 / 2)
= 2.3e-11.

The floor of a row is the exact score of the token with the highest lower bound, but at most the highest upper bound. A
token is excluded if its upper bound is below the floor. Exact scores of the others are computed from the weights. Of
201,088 tokens, for normally distributed weights and activations, these are some 10 for a greedy row by all bits, some
110 by the high bits, and fewer with noise. The result is that of all logits: always with all bits, and with the high
bits except with the probability above.

    quantize   activations -> int8 planes, scales, norms, and what the dither contributes to each sum
    logits     products with the codes; reading the codes is nearly all of the time (hopper_gemm.py)
    floor      the floor of each row, and the highest upper bound of each part of it
    decide     exact scores of the tokens whose upper bound reaches the floor; the best of them

Where it is no gain, all logits are made: for more rows than TILES cover, and of weights that int8 tells too little of.

Shape suffixes: N rows, H hidden, V vocabulary, B tokens of a part, S parts of a row.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.choose.hopper_gemm import COARSE_TILES, TILES, Tile, logits
from oscine.ops.choose.screen_size import screen_bytes
from oscine.ops.interface import Chooser, LmHead, Sample, SamplingBatch, Shapes, Use, unmet
from oscine.ops.launch import arrivals, arrives_last, depend
from oscine.ops.linear.hopper_stream import CHUNK_BYTES, tile_for
from oscine.ops.sample.triton import apply_temperature, gumbel, in_vocabulary, settle
from oscine.ops.target import Target

MAX_TOKENS = TILES[-1].max_tokens
# Weights with a larger mean bound, in standard deviations of a logit, are not screened. At 1.5 some 340 of 201,088
# tokens are left (simulated). For normally distributed weights it is 0.48 with all bits, 1.01 with the high bits.
MAX_DOUBT = 1.5
MAX_COARSE_DOUBT = 1.2  # the same of the high bits, where rounding leaves more: 180 tokens at 1.2, 600 at 1.5
CODED_AT_ONCE = 8192  # rows of the head, to bound the workspace
DITHER = 8.0  # the dither is uniform from -DITHER to DITHER, in units of scale
MAX_CODE = 127.0 - DITHER  # largest weight in units of scale; with the dither it still fits int8
LOW_MEAN = 7.5  # of the low four bits
BOUND_DEVIATIONS = 7.0
# The bound when only the high bits are read, in scales, for activations of norm 1: an error is uniform in 16 scales.
COARSE_BOUND = BOUND_DEVIATIONS * 16 / 12**0.5
MAX_FINE = tl.constexpr(127 * 128)  # of two planes
# What rounding adds to the bound: sums of float32 products, relative to |w| |x|; and all else, relative to the bound.
ROUNDED_SUM = tl.constexpr(2.0**-18)
ROUNDED_BOUND = tl.constexpr(1 + 2.0**-10)


@dataclass(frozen=True, slots=True)
class Screen:
    """The head in 8 bits, row by row."""

    column_H: Tensor  # float32, powers of two; what columns were divided by
    dither_H: Tensor  # float32, in units of scale
    codes_2VJ: Tensor  # int8: high and low four bits of the codes; a byte has those of columns j and j + H / 2
    scale_V: Tensor  # float32
    norm_V: Tensor  # float32; of the row
    rest_V: Tensor  # float32; norm of what the codes leave of the row
    is_coarse: bool  # whether the bound of the high bits is at most MAX_COARSE_DOUBT

    def tile(self, num_rows: int) -> Tile:
        """The smallest one for so many rows of activations. It tells whether all bits of the codes are read."""
        tile = tile_for(num_rows, (*COARSE_TILES, *TILES) if self.is_coarse else TILES)
        assert tile is not None, "so many rows are not screened"
        return tile


def chooser_use(shapes: Shapes) -> Use:
    return Use(
        f"up to {MAX_TOKENS} rows",
        "reference",
        unmet(("hidden size modulo 32", 0, shapes.hidden % 32)),
    )


def prepare(weight_VH: Tensor) -> Screen | None:
    """None if H is not a multiple of 32, a weight is not finite or its square is not, or the bound of all bits exceeds
    MAX_DOUBT."""
    vocab, hidden = weight_VH.shape
    if hidden % 32:
        return None
    parts = [slice(start, start + CODED_AT_ONCE) for start in range(0, vocab, CODED_AT_ONCE)]
    square_H = torch.zeros(hidden, dtype=torch.float32, device=weight_VH.device)
    for rows in parts:
        square_H += weight_VH[rows].float().square().sum(0)
    square_H /= vocab
    if not square_H.isfinite().all():
        return None
    # Powers of two near the roots of mean squares; 1 where these are 0.
    column_H = torch.where(square_H > 0, square_H, 1).log2().div(2).round().exp2()
    drawn_H = torch.rand(hidden, generator=torch.Generator().manual_seed(0)) * (2 * DITHER) - DITHER
    dither_H = drawn_H.to(weight_VH.device)
    codes_2VJ = torch.empty(2, vocab, hidden // 2, dtype=torch.int8, device=weight_VH.device)
    scale_V, norm_V, rest_V = (torch.empty(vocab, dtype=torch.float32, device=weight_VH.device) for _ in range(3))
    for rows in parts:
        exact = weight_VH[rows].float() / column_H
        scale = exact.abs().amax(1, keepdim=True) / MAX_CODE
        codes = (exact / scale.masked_fill(scale == 0, 1) + dither_H).round_()  # within int8
        coded = (codes - dither_H) * scale
        scale_V[rows], norm_V[rows], rest_V[rows] = scale[:, 0], exact.norm(dim=1), (exact - coded).norm(dim=1)
        integers = codes.to(torch.int8)
        codes_2VJ[0, rows], codes_2VJ[1, rows] = _joined(integers >> 4), _joined(integers)
    if _doubt(rest_V, norm_V, hidden) > MAX_DOUBT:
        return None
    is_coarse = _doubt(COARSE_BOUND * scale_V, norm_V, hidden) <= MAX_COARSE_DOUBT
    return Screen(column_H, dither_H, codes_2VJ, scale_V, norm_V, rest_V, is_coarse)


def _joined(codes: Tensor) -> Tensor:
    """The low four bits of int8 [V, H], two in a byte."""
    first, second = (codes & 15).chunk(2, dim=1)
    return first | second << 4


def _doubt(bound_V: Tensor, norm_V: Tensor, hidden: int) -> float:
    """The mean bound in standard deviations of a logit, for normally distributed activations; 0 without weights."""
    norm = float(norm_V.mean())
    return float(bound_V.mean()) * hidden**0.5 / norm if norm else 0.0


def chooser(target: Target, lm_head: LmHead, sample: Sample) -> Chooser:
    def choose(x_NH: Tensor, weight_VH: Tensor, screen: Screen | None, sampling: SamplingBatch) -> Tensor:
        if screen is None or not 0 < len(x_NH) <= MAX_TOKENS:
            return sample(lm_head(x_NH, weight_VH), sampling).token_ids_N
        return screened(target, x_NH, weight_VH, screen, sampling)

    return Chooser(prepare, screen_bytes, choose)


def screened(target: Target, x_NH: Tensor, weight_VH: Tensor, screen: Screen, sampling: SamplingBatch) -> Tensor:
    """int64 [N]; as `sample` of all logits, of a batch that asks for nothing but temperature. -1 for a row of
    activations with NaN or infinity.

    Each rank decides among the tokens of its own part of the vocabulary. The best of them all is the token.
    """
    (num_rows, hidden), vocab, device = x_NH.shape, len(weight_VH), x_NH.device
    tile, part = screen.tile(num_rows), part_for(num_rows)
    parts, options = triton.cdiv(vocab, part), target.launch_options
    communicator = target.communicator
    first = None if communicator.num_ranks == 1 else communicator.rank * vocab

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    coded = quantize(target, x_NH, screen, tile)
    rough_NV = logits(target, coded.planes, coded.scale_N, coded.shift_N, screen.codes_2VJ, screen.scale_V, tile)
    rest_V, rests = (screen.rest_V, 1.0) if tile.whole else (screen.scale_V, COARSE_BOUND)
    scores = (rough_NV, screen.norm_V, rest_V, coded.norm_N, coded.rest_N)
    drawn = (sampling.temperature_N, sampling.seed_N, sampling.position_N, vocab, first)
    exact = (x_NH, weight_VH, hidden)
    constants = {
        "RESTS": rests,
        "NOISE": not sampling.greedy,
        "BLOCK_B": part,
        "BLOCK_H": triton.next_power_of_2(hidden),
        "BLOCK_S": triton.next_power_of_2(parts),
        "num_warps": 4,
    }
    # value_NS and id_NS are workspace of both kernels.
    peak_NS, value_NS = (empty(torch.float32, num_rows, parts) for _ in range(2))
    id_NS, floor_N = empty(torch.int32, num_rows, parts), empty(torch.float32, num_rows)
    floor_kernel[(parts, num_rows)](
        *scores, *drawn, *exact, value_NS, id_NS, peak_NS, floor_N, arrivals(device), **constants, **options
    )
    ids_N, values_N = empty(torch.int64, num_rows), None if first is None else empty(torch.float32, num_rows)
    decide_kernel[(parts, num_rows)](
        *scores,
        *drawn,
        *exact,
        peak_NS,
        floor_N,
        ids_N,
        values_N,
        value_NS,
        id_NS,
        arrivals(device),
        **constants,
        **options,
    )
    return ids_N if values_N is None else communicator.best(values_N, ids_N)


def part_for(num_rows: int) -> int:
    """Tokens of a part. Few rows get smaller parts, so that there are enough programs."""
    return 256 if num_rows <= 2 else 512 if num_rows <= 4 else 1024


class Coded(NamedTuple):
    """Activations as integers of two planes."""

    planes: Tensor  # int8, as `logits` has them
    scale_N: Tensor  # float32, as all below
    shift_N: Tensor  # added to each sum: without the dither, and with 7.5 for low bits that are not read
    norm_N: Tensor  # of the activations
    rest_N: Tensor  # of what the integers leave of them


def quantize(target: Target, x_NH: Tensor, screen: Screen, tile: Tile) -> Coded:
    """Rounds activations to two int8 planes, in the layout of `tile`."""
    num_rows, hidden = x_NH.shape
    shape = tile.steps(hidden), 2, 2, tile.max_tokens, CHUNK_BYTES
    planes = torch.empty(shape, dtype=torch.int8, device=x_NH.device)
    # Four tensors, since slices would not be aligned.
    made = [torch.empty(num_rows, dtype=torch.float32, device=x_NH.device) for _ in range(4)]
    quantize_kernel[(num_rows,)](
        x_NH,
        screen.column_H,
        screen.dither_H,
        planes,
        *made,
        hidden,
        MEAN=0.0 if tile.whole else LOW_MEAN,
        TOKENS=tile.max_tokens,
        BLOCK_H=triton.next_power_of_2(hidden),
        num_warps=8,
        **target.launch_options,
    )
    return Coded(planes, *made)


@triton.jit
def quantize_kernel(
    x,
    column,
    dither,
    planes,
    scale,
    shift,
    norm,
    rest,
    hidden,
    MEAN: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """MEAN: of the low bits of codes that are not read."""
    row = tl.program_id(0)
    column_H = tl.arange(0, BLOCK_H)
    inside_H = column_H < hidden
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    even_H = tl.load(column + column_H, mask=inside_H, other=0.0)
    dither_H = tl.load(dither + column_H, mask=inside_H, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    x_H = tl.load(x + row * hidden + column_H, mask=inside_H, other=0.0).to(tl.float32) * even_H
    step = tl.max(tl.abs(x_H), 0) / MAX_FINE
    step = tl.where(step == 0, 1.0, step)
    fine_H = tl.floor(x_H / step + 0.5)
    fine_H = tl.minimum(tl.maximum(fine_H, -MAX_FINE), MAX_FINE)
    high_H = tl.floor(fine_H / 128 + 0.5)
    is_second_H = column_H >= hidden // 2
    place_H = column_H - tl.where(is_second_H, hidden // 2, 0)
    out_H = (place_H // 128 * 4 + tl.where(is_second_H, 2, 0)) * TOKENS * 128 + row * 128 + place_H % 128
    tl.store(planes + out_H, high_H.to(tl.int8), mask=inside_H)
    tl.store(planes + TOKENS * 128 + out_H, (fine_H - high_H * 128).to(tl.int8), mask=inside_H)
    rest_H = x_H - fine_H * step
    tl.store(scale + row, step)
    tl.store(shift + row, tl.sum(fine_H * (MEAN - dither_H), 0))
    tl.store(norm + row, tl.sqrt(tl.sum(x_H * x_H, 0)))
    tl.store(rest + row, tl.sqrt(tl.sum(rest_H * rest_H, 0)))


@triton.jit
def _noise(token, row, drawn):
    """Gumbel noise of tokens of a row, by seed, position and token; 0 for greedy rows.

    drawn: (temperature, seed, position, first token of the part as in_vocabulary)
    """
    temperature, seed, position, first = drawn
    noise = token * 0.0  # float32 zeros
    if tl.load(temperature + row) != 0:
        noise = gumbel(in_vocabulary(token, first), tl.load(seed + row), tl.load(position + row))
    return noise


@triton.jit
def _drawn(logit, noise, row, drawn):
    """Logit / temperature + noise; the logit itself for greedy rows."""
    return apply_temperature(logit, tl.load(drawn[0] + row)) + noise


@triton.jit
def _highest(known, drawn, vocab, RESTS: tl.constexpr, NOISE: tl.constexpr, BLOCK_B: tl.constexpr):
    """The program's tokens, their highest possible scores (-inf or NaN: no token), and bounds of the logits' errors.

    known: (rough, row_norm, row_rest, norm, rest). RESTS: how many row_rest bound a row's errors.
    """
    rough, row_norm, row_rest, norm, rest = known
    row = tl.program_id(1)
    token_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside_B = token_B < vocab
    row_norm_B = tl.load(row_norm + token_B, mask=inside_B, other=0.0)
    row_rest_B = tl.load(row_rest + token_B, mask=inside_B, other=0.0)
    x_B = tl.load(rough + row.to(tl.int64) * vocab + token_B, mask=inside_B, other=float("-inf"))
    x_norm, x_rest = tl.load(norm + row), tl.load(rest + row)
    bound_B = RESTS * row_rest_B * (x_norm + x_rest) + row_norm_B * (x_rest + ROUNDED_SUM * x_norm)
    bound_B *= ROUNDED_BOUND
    x_B += bound_B
    if NOISE:
        x_B = _drawn(x_B, _noise(token_B, row, drawn), row, drawn)
    return token_B, x_B, bound_B


@triton.jit
def _exact(token, row, x_H, weight, hidden, drawn, NOISE: tl.constexpr, BLOCK_H: tl.constexpr):
    """The exact score of one token."""
    column_H = tl.arange(0, BLOCK_H)
    weight_H = tl.load(weight + token.to(tl.int64) * hidden + column_H, mask=column_H < hidden, other=0.0)
    score = tl.sum(weight_H.to(tl.float32) * x_H, 0)
    if NOISE:
        score = _drawn(score, _noise(token, row, drawn), row, drawn)
    return score


@triton.jit
def _row(x, row, hidden, BLOCK_H: tl.constexpr):
    """A row of activations in float32, padded with zeros."""
    column_H = tl.arange(0, BLOCK_H)
    return tl.load(x + row * hidden + column_H, mask=column_H < hidden, other=0.0).to(tl.float32)


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
    x,
    weight,
    hidden,
    lower,
    likely,
    peak,
    floor,
    arrivals,
    RESTS: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    """The floor of each row, which its last program computes. Of each part: `lower`, the highest lower bound; `likely`,
    its token; `peak`, the highest upper bound."""
    row, parts = tl.program_id(1), tl.num_programs(0)
    at = row * parts + tl.program_id(0)
    known, drawn = (rough, row_norm, row_rest, norm, rest), (temperature, seed, position, first)
    depend(PDL)
    token_B, highest_B, bound_B = _highest(known, drawn, vocab, RESTS, NOISE, BLOCK_B)
    if NOISE:
        bound_B *= apply_temperature(1.0, tl.load(temperature + row))
    lower_B = highest_B - 2 * bound_B  # may be off by rounding: it only selects a token
    own_lower = tl.max(lower_B, 0)
    tl.store(lower + at, own_lower)
    tl.store(likely + at, tl.min(tl.where(lower_B == own_lower, token_B, vocab), 0))
    tl.store(peak + at, tl.max(highest_B, 0))
    if arrives_last(arrivals + row, parts):
        tl.store(arrivals + row, 0)
        part_S = tl.arange(0, BLOCK_S)
        live_S, at_S = part_S < parts, row * parts + part_S
        lower_S = tl.load(lower + at_S, mask=live_S, other=float("-inf"), cache_modifier=".cg")
        likely_S = tl.load(likely + at_S, mask=live_S, other=vocab, cache_modifier=".cg")
        peak_S = tl.load(peak + at_S, mask=live_S, other=float("-inf"), cache_modifier=".cg")
        token = tl.min(tl.where(lower_S == tl.max(lower_S, 0), likely_S, vocab), 0)
        token = tl.minimum(token, vocab - 1)  # a row with NaN has none; any will do
        score = _exact(token, row, _row(x, row, hidden, BLOCK_H), weight, hidden, drawn, NOISE, BLOCK_H)
        tl.store(floor + row, tl.minimum(score, tl.max(peak_S, 0)))  # else no token might be left


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
    x,
    weight,
    hidden,
    peak,
    floor,
    ids,
    values,
    best_value,
    best_id,
    arrivals,
    RESTS: tl.constexpr,
    NOISE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    row, parts = tl.program_id(1), tl.num_programs(0)
    known, drawn = (rough, row_norm, row_rest, norm, rest), (temperature, seed, position, first)
    depend(PDL)
    value = tl.full((), float("-inf"), tl.float32)
    id = tl.program_id(0) * BLOCK_B
    own_floor = tl.load(floor + row)
    own_peak = tl.load(peak + row * parts + tl.program_id(0))
    if own_peak >= own_floor:
        token_B, highest_B, _ = _highest(known, drawn, vocab, RESTS, NOISE, BLOCK_B)
        left_B = (highest_B >= own_floor) & (highest_B > float("-inf"))
        x_H = _row(x, row, hidden, BLOCK_H)
        token = tl.min(tl.where(left_B, token_B, vocab), 0)
        while token < vocab:  # one after the other: there are few
            score = _exact(token, row, x_H, weight, hidden, drawn, NOISE, BLOCK_H)
            if score > value:
                value = score
                id = token
            left_B = left_B & (token_B != token)
            token = tl.min(tl.where(left_B, token_B, vocab), 0)
    out, bests = (ids, values, first), (best_value, best_id, arrivals)
    settle(value, id, row, out, bests, vocab, BLOCK_S)
