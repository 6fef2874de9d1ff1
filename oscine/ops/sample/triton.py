"""Sampling without sorting the vocabulary, in Triton: sm_80 and newer. Definition: reference.py; noise: noise.py.

Every choice is one pass over the logits: the argmax of logit / temperature + noise, in programs of a part of a row
whose last one compares the parts. Noise is hashed in registers.

Truncation first finds each row's cut: the order of a token is its scaled logit, then its id, as one int64 key, so that
top_k, top_p and min_p keep the keys from some cut on.
    scan     maxima of 4096 lanes of the row: its r-th largest lane maximum is no more than its r-th largest logit
    bound    that r-th, r = top_k or MAX_RANK, found by bisection
    collect  the few tokens from the bound on, and the sum of exp over the row
    cut      bisection over the collected keys; over the whole row where they do not reach (a flat row with top_p,
             a large top_k, or very many equal logits)
Probability is added up in 40-bit fixed point, so that its sum does not depend on the order of the tokens.

Greedy rows take NaN for -inf here. Bias, penalties and log-probabilities are those of the reference. Where rows are
restricted to allowed tokens, all logits are copied.

Shape suffixes: N rows, V vocabulary, B tokens of a tile, L lanes, C collected tokens, S parts of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Sampled, SamplingBatch
from oscine.ops.launch import NUM_ARRIVALS, arrivals, arrives_last, depend
from oscine.ops.sample.reference import LOWEST_TEMPERATURE, add_bias, penalize, with_logprobs
from oscine.ops.target import Target

PARTS = tl.constexpr(64)  # programs of a row that scan and collect
LANES = tl.constexpr(64)  # lanes of each of them
MAX_RANK = tl.constexpr(1024)
CAPACITY = tl.constexpr(2048)  # collected tokens of a row; about 1,180 are expected for MAX_RANK
LOWEST = tl.constexpr(-(2**63))  # key of no token
UNIT = tl.constexpr(2.0**40)  # of probability in fixed point
COOLEST = tl.constexpr(LOWEST_TEMPERATURE)
RESTRICTED = 4096  # tokens of a program that restricts a row
MIN_BLOCK_S = 256  # gpt-oss has up to 197 programs per row that chooses: they share a variant


def sample(target: Target, logits_NV: Tensor, sampling: SamplingBatch) -> Sampled:
    """logits [N, V] float32, not written; log-probabilities are those of these logits, before any adjustment."""
    adjusted_NV = penalize(add_bias(logits_NV, sampling), sampling)
    ids_N = choose(target, restrict(target, adjusted_NV, sampling), sampling)
    return with_logprobs(ids_N, logits_NV, sampling.num_logprobs)


def restrict(target: Target, logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    """-inf for tokens that are not allowed; rows of the logits are contiguous, the matrix need not be."""
    if sampling.allowed_KW is None:
        return logits_NV
    num_rows, vocab = logits_NV.shape
    restricted_NV = torch.empty((num_rows, vocab), dtype=torch.float32, device=logits_NV.device)
    _restrict_kernel[(triton.cdiv(vocab, RESTRICTED), num_rows)](
        logits_NV,
        sampling.allowed_KW,
        sampling.allowed_row_N,
        restricted_NV,
        vocab,
        logits_NV.stride(0),
        sampling.allowed_KW.shape[1],
        BLOCK_B=RESTRICTED,
        num_warps=4,
        **target.launch_options,
    )
    return restricted_NV


def choose(target: Target, logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    """int64 [N]; rows of the logits are contiguous, the matrix need not be."""
    return _choose(target, logits_NV, sampling, None, None)


def best(target: Target, logits_NV: Tensor, sampling: SamplingBatch, first: int) -> tuple[Tensor, Tensor]:
    """As reference.best, of rows that nothing truncates."""
    values_N = torch.empty(len(logits_NV), dtype=torch.float32, device=logits_NV.device)
    return values_N, _choose(target, logits_NV, sampling, values_N, first)


def _choose(
    target: Target, logits_NV: Tensor, sampling: SamplingBatch, values_N: Tensor | None, first: int | None
) -> Tensor:
    """int64 [N]. Where the logits are a part of the vocabulary, `first` is its first token, and values_N is written."""
    num_rows, vocab = logits_NV.shape
    assert num_rows <= NUM_ARRIVALS
    ids_N = torch.empty(num_rows, dtype=torch.int64, device=logits_NV.device)
    if not num_rows:
        return ids_N
    cut_N = _find_cuts(target, logits_NV, sampling) if sampling.truncated and not sampling.greedy else None
    block, part, parts = split_rows(num_rows, vocab, sampling.greedy)
    _choose_kernel[(parts, num_rows)](
        logits_NV,
        sampling.temperature_N,
        sampling.seed_N,
        sampling.position_N,
        cut_N,
        ids_N,
        values_N,
        first,
        torch.empty((num_rows, parts), dtype=torch.float32, device=logits_NV.device),
        torch.empty((num_rows, parts), dtype=torch.int32, device=logits_NV.device),
        arrivals(logits_NV.device),
        vocab,
        logits_NV.stride(0),
        part,
        NOISE=not sampling.greedy,
        BLOCK_B=block,
        BLOCK_S=max(MIN_BLOCK_S, triton.next_power_of_2(parts)),
        num_warps=4,
        **target.launch_options,
    )
    return ids_N


def split_rows(num_rows: int, vocab: int, greedy: bool) -> tuple[int, int, int]:
    """(tokens of a tile, tokens of a program, programs of a row)"""
    block = 1024 if num_rows <= 4 else 4096 if greedy else 2048
    parts = max(1, min(triton.cdiv(vocab, block), 2048 // num_rows))
    part = triton.cdiv(triton.cdiv(vocab, parts), block) * block
    return block, part, triton.cdiv(vocab, part)


def _find_cuts(target: Target, logits_NV: Tensor, sampling: SamplingBatch) -> Tensor:
    """int64 [N]: the lowest key that each row keeps."""
    (num_rows, vocab), device = logits_NV.shape, logits_NV.device

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty((num_rows, *shape), dtype=dtype, device=device)

    lanes_NL = empty(torch.float32, PARTS.value * LANES.value)
    top_N, bound_N, count_N = empty(torch.float32), empty(torch.int32), empty(torch.int32)
    total_NS, keys_NC = empty(torch.float32, PARTS.value), empty(torch.int64, CAPACITY.value)
    cut_N = empty(torch.int64)
    part = triton.cdiv(vocab, PARTS.value)
    block = max(LANES.value, triton.next_power_of_2(part))
    row = (logits_NV, logits_NV.stride(0), sampling.temperature_N, vocab)
    options = target.launch_options
    _scan_kernel[(PARTS.value, num_rows)](*row, lanes_NL, part, BLOCK_B=block, num_warps=4, **options)
    _bound_kernel[(num_rows,)](lanes_NL, sampling.top_k_N, top_N, bound_N, count_N, num_warps=4, **options)
    _collect_kernel[(PARTS.value, num_rows)](
        *row, top_N, bound_N, total_NS, keys_NC, count_N, part, BLOCK_B=block, num_warps=4, **options
    )
    _cut_kernel[(num_rows,)](
        *row,
        sampling.top_k_N,
        sampling.top_p_N,
        sampling.min_p_N,
        top_N,
        bound_N,
        total_NS,
        keys_NC,
        count_N,
        cut_N,
        BLOCK_B=4096,
        # For 12.x, ptxas gives each of 256 threads at most 128 registers, a few less than they need.
        num_warps=16 if target.capability[0] == 12 else 8,
        **options,
    )
    return cut_N


@triton.jit
def _restrict_kernel(
    logits, allowed, allowed_row, restricted, vocab, stride, words, BLOCK_B: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    token_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inside_B = token_B < vocab
    depend(PDL)
    mask_row = tl.load(allowed_row + row).to(tl.int64)
    word_B = tl.load(allowed + mask_row * words + (token_B >> 5), mask=inside_B & (mask_row >= 0), other=-1)
    x_B = tl.load(logits + row * stride + token_B, mask=inside_B)
    x_B = tl.where(((word_B >> (token_B & 31)) & 1) != 0, x_B, float("-inf"))
    tl.store(restricted + row * vocab + token_B, x_B, mask=inside_B)


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def gumbel(token_B, seed, position):
    """As noise.py; -log(1 - v) is a series where 1 - v would round v away."""
    low, high = (seed & 0xFFFFFFFF).to(tl.uint32), ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = _mix((position & 0xFFFFFFFF).to(tl.uint32) ^ _mix(low ^ _mix(high)))
    hashed_B = _mix(_mix(token_B.to(tl.uint32) + first) ^ _mix(first + 0x9E3779B9))
    v_B = tl.minimum((hashed_B.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    series_B = v_B * (1 / 6) + 1 / 5
    series_B = series_B * v_B + 1 / 4
    series_B = series_B * v_B + 1 / 3
    series_B = series_B * v_B + 1 / 2
    series_B = (series_B * v_B + 1) * v_B
    return -tl.log(tl.where(v_B < 1 / 32, series_B, -tl.log(1 - v_B)))


@triton.jit
def _scaled(source, token_B):
    """Logits of a row over its temperature, never NaN; those past the vocabulary are -inf.

    source: (logits, stride, temperature, vocab, row)
    """
    logits, stride, temperature, vocab, row = source
    x_B = tl.load(logits + row.to(tl.int64) * stride + token_B, mask=token_B < vocab, other=float("-inf"))
    return apply_temperature(x_B, tl.load(temperature + row))


@triton.jit
def apply_temperature(x_B, heat):
    """Logits over a temperature, of which 0 is taken for 1; never NaN."""
    x_B = tl.div_rn(x_B, tl.where(heat == 0, 1.0, tl.maximum(heat, COOLEST)))
    return tl.where(x_B == x_B, x_B, float("-inf"))


@triton.jit
def _key32(x):
    """int32 in the order of the floats; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _key(x, token):
    """int64 in the order of the floats, the lower token above."""
    return (_key32(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _mass(x, top):
    return (tl.exp(x - top) * UNIT).to(tl.int64)


@triton.jit
def in_vocabulary(token, first):
    """The id of a token of a part, which begins with token `first`; None: the part is all."""
    return token if first is None else token + first


@triton.jit(do_not_specialize=["first"])
def _choose_kernel(
    logits,
    temperature,
    seed,
    position,
    cut,
    ids,
    values,
    first,
    best_value,
    best_id,
    arrivals,
    vocab,
    stride,
    part,
    NOISE: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    begin = tl.program_id(0) * part
    lane_B = tl.arange(0, BLOCK_B)
    depend(PDL)
    drawn = False
    if NOISE:
        drawn = tl.load(temperature + row) != 0
    value_B = tl.full((BLOCK_B,), float("-inf"), tl.float32)
    id_B = tl.minimum(begin + lane_B, vocab)
    for start in range(begin, tl.minimum(begin + part, vocab), BLOCK_B):
        token_B = start + lane_B
        if drawn:
            x_B = _scaled((logits, stride, temperature, vocab, row), token_B)
            noise_B = gumbel(in_vocabulary(token_B, first), tl.load(seed + row), tl.load(position + row))
            noisy_B = x_B + noise_B
            if cut is not None:
                noisy_B = tl.where(_key(x_B, token_B) >= tl.load(cut + row), noisy_B, float("-inf"))
            x_B = tl.where(token_B < vocab, noisy_B, float("-inf"))
        else:
            x_B = tl.load(logits + row.to(tl.int64) * stride + token_B, mask=token_B < vocab, other=float("-inf"))
        better_B = x_B > value_B
        id_B = tl.where(better_B, token_B, id_B)
        value_B = tl.where(better_B, x_B, value_B)
    value = tl.max(value_B, 0)
    id = tl.min(tl.where(value_B == value, id_B, vocab), 0)
    out, parts = (ids, values, first), (best_value, best_id, arrivals)
    settle(value, id, row, out, parts, vocab, BLOCK_S)


@triton.jit
def settle(value, id, row, out, parts, vocab, BLOCK_S: tl.constexpr):
    """The best of a row's parts; the lower id of equals. The program that arrives last stores it. -1: all are -inf.

    out: (ids, values or None, first token as in_vocabulary). parts: (best_value, best_id, arrivals). BLOCK_S: at least
    as many as programs of a row.
    """
    best_value, best_id, arrivals = parts
    ids, values, first = out
    part, count = tl.program_id(0), tl.num_programs(0)
    tl.store(best_value + row * count + part, value)
    tl.store(best_id + row * count + part, id)
    if arrives_last(arrivals + row, count):
        tl.store(arrivals + row, 0)
        part_S = tl.arange(0, BLOCK_S)
        live_S = part_S < count
        at_S = row * count + part_S
        value_S = tl.load(best_value + at_S, mask=live_S, other=float("-inf"), cache_modifier=".cg")
        id_S = tl.load(best_id + at_S, mask=live_S, other=vocab, cache_modifier=".cg")
        best = tl.max(value_S, 0)
        lowest = tl.min(tl.where(value_S == best, id_S, vocab), 0)
        tl.store(ids + row, tl.where(best > float("-inf"), in_vocabulary(lowest, first), -1).to(tl.int64))
        if values is not None:
            tl.store(values + row, best)


@triton.jit
def _scan_kernel(logits, stride, temperature, vocab, lanes, part, BLOCK_B: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1)
    lane_B = tl.arange(0, BLOCK_B)
    token_B = tl.where(lane_B < part, tl.program_id(0) * part + lane_B, vocab)
    depend(PDL)
    x_B = _scaled((logits, stride, temperature, vocab, row), token_B)
    top_L = tl.max(tl.reshape(x_B, (BLOCK_B // LANES, LANES)), 0)
    tl.store(lanes + (row * PARTS + tl.program_id(0)) * LANES + tl.arange(0, LANES), top_L)


@triton.jit
def _bound_kernel(lanes, top_k, top, bound, count, PDL: tl.constexpr):
    row = tl.program_id(0)
    depend(PDL)
    x_L = tl.load(lanes + row * PARTS * LANES + tl.arange(0, PARTS * LANES))
    key_L = _key32(x_L)
    wanted = tl.load(top_k + row)
    rank = tl.where(wanted > 0, tl.minimum(wanted, MAX_RANK), MAX_RANK).to(tl.int32)
    low = tl.min(key_L, 0).to(tl.int64)  # at least rank keys are >= low; fewer are > high
    high = tl.max(key_L, 0).to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        if tl.sum((key_L >= middle).to(tl.int32), 0) >= rank:
            low = middle
        else:
            high = middle - 1
    tl.store(top + row, tl.max(x_L, 0))
    tl.store(bound + row, low.to(tl.int32))
    tl.store(count + row, 0)


@triton.jit
def _collect_kernel(
    logits,
    stride,
    temperature,
    vocab,
    top,
    bound,
    total,
    keys,
    count,
    part,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1)
    lane_B = tl.arange(0, BLOCK_B)
    token_B = tl.where(lane_B < part, tl.program_id(0) * part + lane_B, vocab)
    depend(PDL)
    x_B = _scaled((logits, stride, temperature, vocab, row), token_B)
    tl.store(total + row * PARTS + tl.program_id(0), tl.sum(tl.exp(x_B - tl.load(top + row)), 0))
    taken_B = (token_B < vocab) & (_key32(x_B) >= tl.load(bound + row))
    place_B = tl.atomic_add(count + row + tl.zeros_like(token_B), 1, mask=taken_B, sem="relaxed")
    tl.store(keys + row * CAPACITY + place_B, _key(x_B, token_B), mask=taken_B & (place_B < CAPACITY))


@triton.jit
def _above(at, floor, among, WHOLE: tl.constexpr, BLOCK_B: tl.constexpr):
    """How many keys are above `at` and not below `floor`, and their mass; of the whole row or of those collected.

    among: (keys and masses of the collected tokens, source, its maximum)
    """
    key_C, mass_C, source, peak = among
    if WHOLE:
        vocab = source[3]
        count_B = tl.zeros((BLOCK_B,), tl.int32)
        mass_B = tl.zeros((BLOCK_B,), tl.int64)
        for start in range(0, vocab, BLOCK_B):
            token_B = start + tl.arange(0, BLOCK_B)
            x_B = _scaled(source, token_B)
            key_B = _key(x_B, token_B)
            inside_B = (key_B > at) & (key_B >= floor) & (token_B < vocab)
            count_B += inside_B.to(tl.int32)
            mass_B += tl.where(inside_B, _mass(x_B, peak), 0)
        count, mass = tl.sum(count_B, 0), tl.sum(mass_B, 0)
    else:
        inside_C = (key_C > at) & (key_C >= floor)
        count, mass = tl.sum(inside_C.to(tl.int32), 0), tl.sum(tl.where(inside_C, mass_C, 0), 0)
    return count, mass


@triton.jit
def _lowest(max_count, max_mass, floor, low, high, among, WHOLE: tl.constexpr, BLOCK_B: tl.constexpr):
    """The cut below which a key has max_count or more keys above it, or max_mass; it lies in (low, high].

    Bisection ends once one key is left between the bounds.
    """
    above_low, mass = _above(low, floor, among, WHOLE, BLOCK_B)
    above_high = tl.where((above_low < max_count) & (mass < max_mass), above_low, 0)
    while above_low - above_high > 1:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above, mass = _above(middle, floor, among, WHOLE, BLOCK_B)
        if (above < max_count) & (mass < max_mass):
            high = middle
            above_high = above
        else:
            low = middle
            above_low = above
    return low + 1


@triton.jit
def _cut(wanted, share, total, low, high, among, WHOLE: tl.constexpr, BLOCK_B: tl.constexpr):
    """The cut of top_k (`wanted`, 0 is off) and of top_p (`share`) among what top_k left; `total` is the row's mass."""
    kept = low + 1
    if wanted > 0:
        kept = _lowest(wanted, tl.full((), 1 << 62, tl.int64), kept, low, high, among, WHOLE, BLOCK_B)
        _, total = _above(kept - 1, kept, among, WHOLE, BLOCK_B)
    if share < 1:
        mass = tl.maximum((share * total.to(tl.float32)).to(tl.int64), 1)
        kept = _lowest(1 << 30, mass, kept, kept - 1, high, among, WHOLE, BLOCK_B)
    return kept


@triton.jit
def _cut_kernel(
    logits,
    stride,
    temperature,
    vocab,
    top_k,
    top_p,
    min_p,
    top,
    bound,
    total,
    keys,
    count,
    cut,
    BLOCK_B: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    depend(PDL)
    share, peak, collected = tl.load(top_p + row), tl.load(top + row), tl.load(count + row)
    wanted = tl.load(top_k + row)
    wanted = tl.where(wanted < vocab, wanted, 0).to(tl.int32)
    high = (_key32(peak).to(tl.int64) << 32) | 0x7FFFFFFF
    kept = _key32(peak + tl.log(tl.load(min_p + row))).to(tl.int64) << 32
    source = (logits, stride, temperature, vocab, row)
    if (wanted > 0) | (share < 1):
        place_C = tl.arange(0, CAPACITY)
        live_C = place_C < collected
        key_C = tl.load(keys + row * CAPACITY + place_C, mask=live_C, other=0)
        bits_C = (key_C >> 32).to(tl.int32)
        bits_C = bits_C ^ ((bits_C >> 31) & 0x7FFFFFFF)  # back from the order to the float
        mass_C = tl.where(live_C, _mass(bits_C.to(tl.float32, bitcast=True), peak), 0)
        key_C = tl.where(live_C, key_C, tl.full((), LOWEST, tl.int64))
        among = (key_C, mass_C, source, peak)
        whole = (tl.sum(tl.load(total + row * PARTS + tl.arange(0, PARTS)), 0) * UNIT).to(tl.int64)
        enough = tl.sum(mass_C, 0).to(tl.float32) >= share * whole.to(tl.float32)
        enough = tl.where(wanted > 0, collected >= wanted, enough) | (collected == vocab)
        if enough & (collected <= CAPACITY):
            low = (tl.load(bound + row).to(tl.int64) << 32) - 1
            found = _cut(wanted, share, whole, low, high, among, False, BLOCK_B)
        else:
            low = tl.full((), LOWEST, tl.int64)
            found = _cut(wanted, share, whole, low, high, among, True, BLOCK_B)
        kept = tl.maximum(kept, found)
    tl.store(cut + row, kept)
