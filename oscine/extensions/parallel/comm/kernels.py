"""Kernels that only exchange messages between ranks.

They may follow each other on one buffer: a slot has two halves, used in turns. Each program has its own cell of each
half and counts its turns there. It writes a half again two turns later. In the turn between it has received what the
others sent after they had cleared that half.
"""

import triton
import triton.language as tl

from oscine.ops.comm.push import poll, push
from oscine.ops.comm.sums import of_rank, sum_over_ranks
from oscine.ops.launch import depend

CELL_BYTES = 4096  # of a program, in a half of a slot
BEST_ROWS = 256  # of a program
WARPS = 8  # 16 bytes of a cell per thread


@triton.jit
def _turn(turns, half):
    """(turn of this program, byte offset of its half)."""
    turn = tl.load(turns + tl.program_id(0))
    return turn, (turn & 1) * half


@triton.jit
def _end(turns, turn):
    tl.debug_barrier()  # all threads have read the turn
    tl.store(turns + tl.program_id(0), turn + 1)


@triton.jit(do_not_specialize=["rank"])
def all_reduce_kernel(
    x,
    y,
    total,
    turns,
    addresses,
    slot,
    half,
    rank,
    state,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of `total` elements, a cell of BLOCK in each program."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < total
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    depend(PDL)
    part = tl.load(x + element, mask=inside, other=0)
    turn, begin = _turn(turns, half)
    place = tl.where(inside, begin + element * SIZE, -1)
    row = tl.program_id(0)
    added = sum_over_ranks(part, place, row, addresses, slot, rank, state, RANKS, TWO_SHOT, 16 // SIZE)
    tl.store(y + element, added.to(y.dtype.element_ty), mask=inside)
    _end(turns, turn)


@triton.jit(do_not_specialize=["rank"])
def all_gather_kernel(
    x,
    y,
    total,
    turns,
    addresses,
    slot,
    half,
    rank,
    state,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """x: float32, rows of COLUMNS, `total` elements, a cell of BLOCK in each program. y: rows of RANKS * COLUMNS."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < total
    depend(PDL)
    part = tl.load(x + element, mask=inside, other=0)
    turn, begin = _turn(turns, half)
    place = tl.where(inside, begin + element * 4, -1)
    own = push((part,), place, addresses, 1, 4, 4)
    others = poll(own, place, addresses[0], slot, state, RANKS - 1, True, 1, 4, 4)
    at = y + (element // COLUMNS).to(tl.int64) * (RANKS * COLUMNS) + element % COLUMNS
    tl.store(at + rank * COLUMNS, own[0], mask=inside)
    for other in tl.static_range(RANKS - 1):
        source = tl.where(rank <= other, other + 1, other)
        tl.store(at + source * COLUMNS, others[other], mask=inside)
    _end(turns, turn)


@triton.jit(do_not_specialize=["rank", "num_rows"])
def best_kernel(
    values,
    ids,
    best,
    num_rows,
    turns,
    addresses,
    slot,
    half,
    rank,
    state,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row's message is its value, -inf for NaN, and its id + 2, which is never zero: the id -1 is no token."""
    row_N = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside_N = row_N < num_rows
    depend(PDL)
    value_N = tl.load(values + row_N, mask=inside_N, other=0)
    value_N = tl.where(value_N == value_N, value_N, float("-inf"))
    id_N = tl.load(ids + row_N, mask=inside_N, other=0).to(tl.int32) + 2
    turn, begin = _turn(turns, half)
    place_N = tl.where(inside_N, begin + row_N * 8, -1)
    own = push((value_N.to(tl.int32, bitcast=True), id_N), place_N, addresses, 2, 1, 2)
    others = poll(own, place_N, addresses[0], slot, state, RANKS - 1, True, 2, 1, 2)
    top_N = of_rank(own[0], others, rank, 0, RANKS, 2, 0).to(tl.float32, bitcast=True)
    top_id_N = of_rank(own[1], others, rank, 0, RANKS, 2, 1)
    for source in tl.static_range(1, RANKS):
        next_N = of_rank(own[0], others, rank, source, RANKS, 2, 0).to(tl.float32, bitcast=True)
        next_id_N = of_rank(own[1], others, rank, source, RANKS, 2, 1)
        top_id_N = tl.where(next_N > top_N, next_id_N, top_id_N)
        top_N = tl.where(next_N > top_N, next_N, top_N)
    best_N = tl.where(top_N > float("-inf"), top_id_N - 2, -1)
    tl.store(best + row_N, best_N.to(tl.int64), mask=inside_N)
    _end(turns, turn)
