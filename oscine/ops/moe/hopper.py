"""The mixture of experts on Hopper: schedule and launches of the Gluon GEMMs.

Knows which tile shapes suit how many tokens; not the insides of kernels (hopper_gemm.py) and weights
(hopper_repack.py).

    few tokens:  gemm(x, gate_up) -> h, and which pair each of its rows is of;  gemm(h, down) -> y
    more tokens: sort: x rows by expert, and a table of entries (expert, first row, rows <= N); then the same two

h has one row for each pair of a token and an expert, those of an expert beside each other. x and h are multiplied as
fp16, or where an expert has few tokens as two planes of FP8 each (planes.py): to expand weights to FP8 takes
half as many instructions, and twice as many columns find room in the same product. With the option of FP8 activations
they are one plane, for any number of tokens, and the weights have a layout of their own.

Shape suffixes: T tokens, H hidden, I intermediate, E experts, K experts per token, J partial sums of a token.
"""

import functools
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops import planes
from oscine.ops.interface import Entries, ExpertTokens, LowRankRows, MxExperts, Routing
from oscine.ops.linear.hopper_stream import descriptor
from oscine.ops.moe import fp8
from oscine.ops.moe.hopper_gemm import gemm
from oscine.ops.moe.hopper_repack import UNIT, gate_up_order, padded_rows, repack
from oscine.ops.moe.hopper_tiles import DIRECT_PAIRS
from oscine.ops.target import Target

CAN_CHOOSE = True  # the experts of a single token, from the router's logits
FEWEST_COLUMNS = 8  # of a product
MAX_LIMIT = 64  # of SwiGLU
SPREAD = 2048  # with up to this number of pairs a program of the sort moves one row; above, four
THIN = 1472  # intermediate columns of an expert, up to which few tokens have tiles of their own: half of 2,880


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of all experts, in units, and the epilogue's values per row."""

    nibbles: Tensor  # uint8 [E * unit rows * k units * 8, 256]
    scales: Tensor  # int32 [E * unit rows * k units, 32]
    rows: Tensor  # int32 [E, unit rows * 64]; a row's bias as bf16 in the lower half, its scale in the upper one
    unit_rows: int  # of one expert
    k_units: int
    descriptors: dict[int, tuple[TensorDescriptor, TensorDescriptor]]  # by the units of a stage


@dataclass(frozen=True, slots=True)
class HopperExperts:
    gate_up: Matrix
    down: Matrix
    hidden: int
    intermediate: int
    experts: int
    fp8: bool  # activations are one plane of FP8


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the GEMMs are cut; the constants of hopper_gemm.Config that are free to choose."""

    tokens: int  # N: of a tile
    planes: int = 0  # of FP8 that each token is: 2, which are two columns, or 1; 0: tokens are fp16
    units: int = 3  # of k in a stage
    stages: int = 4
    # short tiles have loops of their own: up to N / 2 tokens; unsorted, one token; for N from 128 on also up to N / 4
    halves: bool = False
    # 0, or between N / 2 and N: tiles of up to so many tokens have a loop of their own; TMA loads quarters of N tokens
    middle: int = 0
    # dynamic tile scheduler: programs take tiles one by one, which balances few tiles per program
    dynamic: bool = False
    splits: int = 1  # of k in the second product; partial sums that the caller adds up
    consumers: int = 3  # warpgroups of a program that multiply, 64 rows of weights each: 1 or 3
    programs: int = 2  # of an SM
    registers: int = 64  # a thread, when launched
    consumer_registers: int = 72
    ahead: int = 0  # products of a stage that may be in flight when the next one starts; each takes registers
    staged: bool = False  # results are collected in shared memory, and stored in whole sectors
    window: int = (
        0  # stages of weights that a program may have under way, so that all get their first ones early; 0: all
    )


def prepare_experts(target: Target, experts: MxExperts) -> HopperExperts:
    """Repacks one layer's experts for the target's type of activations.

    Raises ValueError for dimensions not in multiples of 32, and for scales that are no number.
    """
    num_experts, rows, k_blocks = experts.gate_up_scales.shape
    intermediate, hidden = rows // 2, k_blocks * 32
    if intermediate % 32 or experts.down_scales.shape[1] != hidden:
        sizes = f"{experts.down_scales.shape[1]} and {intermediate}"
        raise ValueError(f"the Hopper experts need hidden and intermediate sizes in multiples of 32, not {sizes}")
    one_plane = target.activation_dtype == "fp8"
    if one_plane and hidden % UNIT:
        raise ValueError(f"the Hopper experts need a hidden size in multiples of {UNIT} for FP8, not {hidden}")
    order = gate_up_order(intermediate, experts.gate_up_blocks.device, tables=one_plane)
    return HopperExperts(
        gate_up=_matrix(experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias, order, one_plane),
        down=_matrix(experts.down_blocks, experts.down_scales, experts.down_bias, None, one_plane),
        hidden=hidden,
        intermediate=intermediate,
        experts=num_experts,
        fp8=one_plane,
    )


def _matrix(blocks: Tensor, scales: Tensor, bias: Tensor, row_order: Tensor | None, tables: bool) -> Matrix:
    units = repack(blocks, scales, row_order, tables=tables)
    rows = torch.stack((padded_rows(bias, row_order).bfloat16(), units.row_scales), -1).view(torch.int32).squeeze(-1)
    return Matrix(units.nibbles, units.scales, rows, rows.shape[1] // UNIT, (scales.shape[2] + 1) // 2, {})


def moe(target: Target, x_TH: Tensor, routing: Routing, experts: HopperExperts, swiglu_limit: float) -> Tensor:
    """bf16 [T, H] -> bf16 [T, J, H]; the sum over J is the result.

    Routing may leave out counts and ranks of up to 256 pairs: each program of the sort then finds them itself. It may
    leave out `prepared`, the planes of x, which takes another launch where they are wanted. Raises ValueError for
    limits so large that products of the clamped halves leave the range of FP8.
    """
    if not 0 < swiglu_limit <= MAX_LIMIT:
        raise ValueError(f"the Hopper experts take a SwiGLU limit of at most {MAX_LIMIT}, not {swiglu_limit}")
    tokens, per_token = routing.expert_ids_TK.shape
    chosen = plan_fp8 if experts.fp8 else plan
    tiling = chosen(tokens, per_token, experts.experts, experts.intermediate)
    return run(target, x_TH, routing, experts, swiglu_limit, tiling)


def plan(tokens: int, per_token: int, experts: int, intermediate: int) -> Tiling:
    """By static sizes only, so that a CUDA graph can replay any routing. Measured on an NVIDIA H200.

    Small programs share a processor where weights dominate, so that the second GEMM's can fetch weights beside the
    first's. Where most experts have one token, or few rows as those of a rank, programs of one warpgroup balance
    better.
    With more tokens of an expert, one program of three warpgroups leaves them the registers for larger tiles.
    """
    is_thin = intermediate <= THIN
    if tokens == 1 and is_thin:
        return Tiling(4, planes=2, consumers=1, programs=4)
    if tokens == 1:
        return Tiling(4, planes=2, splits=2, stages=8, consumers=1, programs=3, window=3)
    if is_direct(tokens, per_token, 4):  # measured on an NVIDIA H100
        return Tiling(4, planes=2, stages=8, dynamic=True, consumers=1, programs=3)
    if tokens <= planes.FEW_TOKENS:
        splits = 1 if is_thin else 3
        return Tiling(8, planes=2, splits=splits, dynamic=True, halves=True, consumers=1, programs=4)
    if planes.are_few(tokens, per_token, experts):
        return Tiling(8, planes=2, dynamic=True, halves=True)
    rows = tokens * per_token / experts  # of an expert, on average
    if rows <= 8:
        return Tiling(16, halves=True, dynamic=True)
    if rows <= 16:
        return Tiling(32, stages=3, halves=True, dynamic=True)
    if rows <= 48:  # measured: 32 and 64
        return large(64, units=3, stages=4)
    return large(128, units=3, stages=3)


def plan_fp8(tokens: int, per_token: int, experts: int, intermediate: int) -> Tiling:
    """The same for activations that are one plane of FP8."""
    rows = tokens * per_token / experts  # of an expert, on average
    if tokens <= planes.FEW_TOKENS:
        return Tiling(8, planes=1, splits=1 if intermediate <= THIN else 3, dynamic=tokens > 1, consumers=1, programs=4)
    if rows <= 2:
        return Tiling(8, planes=1, dynamic=True, consumers=1, programs=4)
    if rows <= 8:
        return Tiling(16, planes=1, dynamic=True, halves=True, consumers=1, programs=4)
    if rows <= 16:
        return Tiling(32, planes=1, dynamic=True, halves=True)
    if rows <= 64:
        return replace(large(64, units=3, stages=5, planes=1), dynamic=False)
    return large(128, units=3, stages=4, planes=1)


def large(tokens: int, units: int, stages: int, planes: int = 0) -> Tiling:
    """One program of an SM: registers for many tokens."""
    middle = 0 if planes else 5 * tokens // 8
    shape = Tiling(tokens, planes=planes, units=units, stages=stages, halves=True, middle=middle, dynamic=True)
    return replace(shape, ahead=2, programs=1, registers=128, consumer_registers=152, staged=True)


def is_direct(tokens: int, per_token: int, most: int) -> bool:
    """Whether tiles of so many tokens are all tokens, so that nothing is sorted. One token has no tiles of others."""
    return 1 < tokens <= most <= DIRECT_PAIRS // per_token


def run(target: Target, x_TH: Tensor, routing: Routing, experts: HopperExperts, limit: float, tiling: Tiling) -> Tensor:
    """The op with a tiling given; benchmarks call it to try others."""
    (tokens, per_token), pairs = routing.expert_ids_TK.shape, routing.expert_ids_TK.numel()
    added = routing.added
    assert added is None or not experts.fp8
    # the rows of what is added have the order of entries
    direct = tiling.planes > 0 and added is None and is_direct(tokens, per_token, tiling.tokens)
    splits = nonempty_splits(tiling, experts.down.k_units)
    assert not tiling.middle or not (direct or tokens == 1 or tiling.planes == 2)
    y_TJH = x_TH.new_empty(tokens, per_token * splits, experts.hidden)
    if tokens == 0:
        return y_TJH
    # x is made fp16 when it is sorted
    x = Tokens(x_TH, None)
    if tiling.planes:
        x = Tokens(*(routing.prepared or planes.split(target, x_TH, tiling.planes)))
    if tokens == 1 or direct:
        assert tiling.planes
        ids, entries = routing.expert_ids_TK, min(experts.experts, pairs)
        table = ids if routing.logits_TE is None else routing.logits_TE
        order = torch.empty(pairs, dtype=torch.int32, device=x_TH.device) if direct else ids
    else:
        x, order, table, entries = _sort(x, routing, experts.experts, tiling)
    columns = experts.gate_up.unit_rows * (UNIT // 2) if experts.fp8 else experts.intermediate
    h = Tokens(_empty_tokens(pairs, columns, tiling, x_TH.device), None)
    work = Work(table, entries, order, routing, limit, direct)
    if added is None:
        _launch(target, tiling, 1, experts.gate_up, x, h.rows, True, work)
        _launch(target, tiling, splits, experts.down, h, y_TJH, False, work)
        return y_TJH
    lone = tokens == 1
    cut = Entries(table, None if lone else order, pairs, entries, 1 if lone else tiling.tokens, max(tiling.planes, 1))
    _launch(target, tiling, 1, experts.gate_up, x, h.rows, True, work, added.shrink_first(x_TH, cut))
    own = ExpertTokens(h.rows, fp8.h_factor(limit) if tiling.planes else 1.0)
    _launch(target, tiling, splits, experts.down, h, y_TJH, False, work, added.shrink_second(own, cut))
    return y_TJH


class Work(NamedTuple):
    """What both products know of the tokens' experts."""

    table: Tensor
    entries: int  # at most
    order: Tensor
    routing: Routing
    limit: float
    direct: bool


class Tokens(NamedTuple):
    """The activations that a product multiplies."""

    rows: Tensor  # fp16 [rows, H], or planes [rows, P, H] of FP8
    scales: Tensor | None  # of the rows of planes; None for h, of which all have the same


def _empty_tokens(rows: int, columns: int, tiling: Tiling, device: torch.device) -> Tensor:
    if tiling.planes:
        return torch.empty((rows, tiling.planes, columns), dtype=torch.float8_e4m3fn, device=device)
    return torch.empty((rows, columns), dtype=torch.float16, device=device)


def nonempty_splits(tiling: Tiling, k_units: int) -> int:
    """The tiling's splits, or as many as have stages: a tile taken dynamically is named by its first."""
    stages = -(-k_units // tiling.units)
    return -(-stages // -(-stages // tiling.splits))


def _launch(
    target: Target,
    tiling: Tiling,
    splits: int,
    matrix: Matrix,
    tokens: Tokens,
    out: Tensor,
    gated: bool,
    work: Work,
    low: LowRankRows | None = None,
) -> None:
    nibbles, scales = _descriptors(matrix, tiling.units)
    ids_TK, weights_TK = work.routing[:2]
    (num_tokens, per_token), logits_TE = weights_TK.shape, work.routing.logits_TE
    tiles = triton.cdiv(matrix.unit_rows, tiling.consumers) * splits
    grid = min(work.entries * tiles, target.sm_count * tiling.programs)
    gemm[(grid,)](
        nibbles,
        scales,
        *token_descriptors(tokens.rows, tiling, lone=work.direct or num_tokens == 1),
        work.table,
        out,
        matrix.rows,
        weights_TK if tokens.scales is None else tokens.scales,
        work.order,
        ids_TK,
        weights_TK,
        tile_counters(out.device),
        *((None,) * 3 if low is None else _added(low, tiling)),
        num_tokens,
        **constants(tiling, splits, matrix.k_units, matrix.unit_rows, out.shape[-1], per_token, work.limit),
        GATED=gated,
        RANK=0 if low is None else low.out_of.shape[-1],
        MOST=0 if low is None else len(low.values_DPR),
        SINGLE=num_tokens == 1,
        DIRECT=work.direct,
        CHOICE=0 if logits_TE is None else logits_TE.shape[1],
        num_warps=4,
        maxnreg=tiling.registers,
        launch_pdl=True,
        enable_fp_fusion=True,
    )


def _added(low: LowRankRows, tiling: Tiling) -> tuple[TensorDescriptor, TensorDescriptor, Tensor]:
    """(factors, values, lists)."""
    columns = tiling.tokens * max(tiling.planes, 1)
    values = low.values_DPR.flatten(0, 2)
    return descriptor(low.out_of, [1, 1, 64, 16]), descriptor(values, [columns, 16]), low.lists


def token_descriptors(rows: Tensor, tiling: Tiling, lone: bool) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Boxes for a tile's tokens, and for entries of few: a half or a quarter, or a lone one.

    Most experts of a few tokens have one. TMA takes longer for boxes with more rows, even if they are zeros. So the box
    of a lone token has only its own one or two rows. The other columns are undefined, and no result depends on them.
    Swizzling does not move the first two rows of a tile, so this box is not swizzled.
    """
    most = tiling.tokens * max(tiling.planes, 1)
    columns = rows.flatten(0, 1) if tiling.planes else rows
    tokens = descriptor(columns, [most, UNIT])
    if lone:
        assert tiling.planes <= 2
        return tokens, descriptor(rows, [1, tiling.planes, UNIT], swizzled=False)
    narrow = most // 4 if tiling.middle else most // 2
    assert narrow >= FEWEST_COLUMNS or not (tiling.halves or tiling.middle)
    return tokens, descriptor(columns, [max(narrow, FEWEST_COLUMNS), UNIT])


@functools.cache
def tile_counters(device: torch.device) -> Tensor:
    """How many tiles of the two products are taken. Shared by all layers, so these must run on one stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


def constants(
    tiling: Tiling, splits: int, k_units: int, unit_rows: int, rows: int, per_token: int, limit: float
) -> dict[str, float]:
    """The constexprs of the kernel that do not depend on which of the two GEMMs it is."""
    return {
        "N": tiling.tokens,
        "PLANES": tiling.planes,
        "UNITS": tiling.units,
        "STAGES": tiling.stages,
        "HALVES": tiling.halves,
        "MIDDLE": tiling.middle,
        "DYNAMIC": tiling.dynamic,
        "SPLITS": splits,
        "K_UNITS": k_units,
        "UNIT_ROWS": unit_rows,
        "ROWS": rows,
        "EXPERTS_PER_TOKEN": per_token,
        "LIMIT": limit,
        "CONSUMERS": tiling.consumers,
        "CONSUMER_REGS": tiling.consumer_registers,
        "STAGED": tiling.staged,
        "AHEAD": tiling.ahead,
        "WINDOW": tiling.window,
    }


def _descriptors(matrix: Matrix, units: int) -> tuple[TensorDescriptor, TensorDescriptor]:
    if units not in matrix.descriptors:
        box = triton.next_power_of_2(units)
        nibbles = TensorDescriptor.from_tensor(matrix.nibbles, [8, 256], gl.NVMMASharedLayout(0, 8, 2))
        scales = TensorDescriptor.from_tensor(matrix.scales, [box, 32], gl.NVMMASharedLayout(0, 32, 2))
        matrix.descriptors[units] = nibbles, scales
    return matrix.descriptors[units]


def _sort(x: Tokens, routing: Routing, experts: int, tiling: Tiling) -> tuple[Tokens, Tensor, Tensor, int]:
    """(rows of x by expert, their pairs [T * K], the table of entries, the most entries there can be)."""
    pairs, ids = routing.expert_ids_TK.numel(), routing.expert_ids_TK
    counted = routing.counts_E is not None
    assert counted or pairs <= 256, "many tokens are counted by the router"
    entries = min(experts, pairs) + pairs // tiling.tokens
    hidden, device = x.rows.shape[-1], x.rows.device
    sorted_x = _empty_tokens(pairs, hidden, tiling, device)
    words = hidden * tiling.planes // 2 if tiling.planes else hidden
    scales = None if x.scales is None else torch.empty(pairs, dtype=torch.float32, device=device)
    order = torch.empty(pairs, dtype=torch.int32, device=device)
    table = torch.empty(4 + 4 * entries, dtype=torch.int32, device=device)
    rows = 1 if pairs <= SPREAD else 4
    sort_kernel[(triton.cdiv(pairs, rows),)](
        x.rows.flatten(1).view(torch.int16) if tiling.planes else x.rows,
        x.scales,
        ids,
        routing.counts_E if counted else ids,
        routing.ranks_TK if counted else ids,
        sorted_x.flatten(1).view(torch.int16) if tiling.planes else sorted_x,
        scales,
        order,
        table,
        pairs,
        K=ids.shape[1],
        H=words,
        E=experts,
        TILE=tiling.tokens,
        ROWS=rows,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_H=1024,
        BLOCK_P=1 if counted else triton.next_power_of_2(pairs),
        PDL=True,
        num_warps=4,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return Tokens(sorted_x, scales), order, table, entries


@triton.jit(do_not_specialize=["pairs"])
def sort_kernel(
    x_ptr,
    scales_ptr,
    ids_ptr,
    counts_ptr,
    ranks_ptr,
    sorted_ptr,
    sorted_scales_ptr,
    order_ptr,
    table_ptr,
    pairs,
    K: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Counting sort of the (token, expert) pairs, and of the rows of x: 16-bit words, which stay so or become fp16.

    The first program writes the table: the number of entries in word 0; from word 4 on, for each entry (expert, first
    row, rows, unused).
    BLOCK_P 1: counts and ranks are given; else at least `pairs`, and they are found here, from all ids.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.arange(0, BLOCK_E)
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = pair < pairs
    ids = tl.load(ids_ptr + pair, valid, other=0)
    if BLOCK_P == 1:
        counts = tl.load(counts_ptr + expert, expert < E, other=0)
        rank = tl.load(ranks_ptr + pair, valid, other=0)
    else:
        other = tl.arange(0, BLOCK_P)
        all_ids = tl.load(ids_ptr + other, other < pairs, other=-1)
        counts = tl.sum((all_ids[:, None] == expert[None, :]).to(tl.int32), 0)
        before = (all_ids[None, :] == ids[:, None]) & (other[None, :] < pair[:, None])
        rank = tl.sum(before.to(tl.int32), 1)
    starts = tl.cumsum(counts, 0) - counts
    row = tl.sum(tl.where(ids[:, None] == expert[None, :], starts[None, :], 0), 1) + rank
    tl.store(order_ptr + row, pair, valid)
    if scales_ptr is not None:
        tl.store(sorted_scales_ptr + row, tl.load(scales_ptr + pair // K, valid), valid)
    source = (pair // K).to(tl.int64) * H
    target = row.to(tl.int64) * H
    for begin in tl.static_range(0, H, BLOCK_H):
        column = begin + tl.arange(0, BLOCK_H)
        mask = valid[:, None] & (column < H)[None, :]
        values = tl.load(x_ptr + source[:, None] + column[None, :], mask)
        if sorted_ptr.dtype.element_ty == tl.float16:
            limited = tl.clamp(values.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL)
            values = limited.to(tl.float16)
        tl.store(sorted_ptr + target[:, None] + column[None, :], values, mask)
    if tl.program_id(0) == 0:
        tiles = (counts + TILE - 1) // TILE
        first = tl.cumsum(tiles, 0) - tiles
        tl.store(table_ptr, tl.sum(tiles, 0))
        for i in range(tl.max(tiles, 0)):
            busy = i < tiles
            entry = table_ptr + 4 + 4 * (first + i)
            tl.store(entry, expert, busy)
            tl.store(entry + 1, starts + i * TILE, busy)
            tl.store(entry + 2, tl.minimum(counts - i * TILE, TILE), busy)
