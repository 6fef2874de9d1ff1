"""The products of low-rank adapters in Triton, for any GPU from sm_80 on. Definition: products.py.

Rows with one key share the factors of an adapter, or of one of its experts. A program multiplies up to BLOCK_P such
rows with tensor cores. How it finds them depends on how many rows there are:

    up to BLOCK_P    Each row has a program. The first row of a key works for all of them; the programs of others end.
    more             A kernel writes once which rows each program has: a table of blocks.
    very many        Rows are sorted by key once. A program has BLOCK_P sorted rows, and goes through their keys.

All launches have the same grid for a number of rows, whatever their keys, so a CUDA graph serves any mix of adapters.
A row without an adapter costs a program that ends at once, or none of its own.

What a program may read before it waits for the kernel before it (gdc_wait):

    factors, and keys of tokens      always: they are older than the step
    keys of pairs                    if the kernel before is one of these two products: `shrink` of the experts' first
                                     product lets the next kernel begin only after it has waited for the router
    tokens of the second product     if they are said to be ready (ExpertTokens)

For the same reason the kernel after these two, the experts' first product, need not wait for its tokens.

Shape suffixes as in products.py; P rows of a program, Q all rows; C columns and N matrix rows of a tile; B blocks.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.adapters.products import Norm, Rows
from oscine.ops.interface import ExpertTokens
from oscine.ops.launch import let_next_begin, wait
from oscine.ops.target import Target

TABLE_ROWS = 8192  # at most, of a table: each of its programs looks at all keys
_TABLE_STEP = 1024  # keys that it looks at together
_BLOCK_P = 16
_BLOCK = 128  # columns, or matrix rows, of a tile; half as many of high ranks, which else would take all registers
_HIGH_RANK = 64
_SPLITS = 8  # of the columns, while there are few programs
_ONE_STEP = 8192  # elements of the first factor that a program reads at once, before it waits, of _FEWEST_ROWS rows
_FEWEST_ROWS = 64
_ONE_STEP_PROGRAM = {"num_warps": 4, "maxnreg": 128}  # without the limit ptxas 12.9 prefers to spill


def block_of(rank: int) -> int:
    """Columns, or matrix rows, of a tile."""
    return _BLOCK if rank < _HIGH_RANK else _BLOCK // 2


class Kernels:
    """A Backend."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def rows(self, keys_T: Tensor, num_slots: int, ids_TK: Tensor | None = None, experts: int = 1) -> Rows:
        rows = Rows(keys_T, None if ids_TK is None else ids_TK.flatten(), experts)
        count, num_keys = rows.count, num_slots * experts
        if count <= _BLOCK_P:
            return rows
        if count > TABLE_ROWS:
            return rows._replace(order_P=rows.keys_P.argsort().int())
        most = count // _BLOCK_P + num_keys + 1
        order_P, blocks_B3 = keys_T.new_empty(count), keys_T.new_empty(min(count, most), 3)
        dense = most <= count
        _table_kernel[(num_keys + 1,)](
            keys_T,
            rows.ids_P,
            order_P,
            blocks_B3,
            count,
            num_keys,
            E=experts,
            K=rows.per_token,
            DENSE=dense,
            STEP=min(_TABLE_STEP, triton.next_power_of_2(count)),
            BLOCK_B=triton.next_power_of_2(count // _BLOCK_P + 1 if dense else count),
            BLOCK_P=_BLOCK_P,
            num_warps=4,
            **self._target.launch_options,
        )
        return rows._replace(order_P=order_P, blocks_B3=blocks_B3)

    def shrink(self, x: Tensor, rows: Rows, into: Tensor, segments: int, hidden: ExpertTokens | None = None) -> Tensor:
        """As in products.py, but with partial sums: float32 [splits, P, segments * R]."""
        count, num_columns = rows.count, x.shape[-1]
        rank = into.shape[-2] // segments
        if count <= _FEWEST_ROWS:
            block_c = _ONE_STEP // rank
            splits = triton.cdiv(num_columns, block_c)
        else:
            block_c = block_of(rank)
            splits = min(_SPLITS if rows.blocks_B3 is not None else 1, triton.cdiv(num_columns, block_c))
        steps = triton.cdiv(triton.cdiv(num_columns, block_c), splits)
        y = torch.empty((splits, count, segments * rank), dtype=torch.float32, device=x.device)
        pairs, places = (None, None) if hidden is None else _indices(rows, hidden)
        if count:
            _shrink_kernel[(_num_programs(rows), segments, splits)](
                x,
                into,
                rows.keys_T,
                rows.ids_P,
                rows.order_P,
                rows.blocks_B3,
                pairs,
                places,
                y,
                count,
                into.stride(0),
                1.0 if hidden is None else 1.0 / hidden.factor,
                E=rows.experts,
                K=rows.per_token,
                PER_TOKEN=rows.per_token if hidden is None else 1,
                COLUMNS=num_columns,
                RANK=rank,
                SEGMENTS=segments,
                PLANES=x.dim() == 3,
                STEPS=steps,
                BLOCK_P=_BLOCK_P,
                BLOCK_C=block_c,
                CHOSEN=rows.ids_P is not None and hidden is None,
                READY=hidden is not None and hidden.is_ready,
                **self._target.program(_ONE_STEP_PROGRAM if steps == 1 else {"num_warps": 4}),
                **self._target.launch_options,
            )
        return y

    def expand(
        self,
        y: Tensor,
        rows: Rows,
        out_of: Tensor,
        out: Tensor,
        *,
        adds: bool,
        ends: tuple[int, ...] = (),
        weights_P: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """As in products.py, of what `shrink` has left."""
        count, (num_rows, rank) = rows.count, out_of.shape[-2:]
        first, second = (ends[0], ends[1]) if ends else (num_rows, num_rows)
        block_n = 64 if count <= 64 else block_of(rank)
        while first % block_n or second % block_n:  # a tile has rows of one segment
            block_n //= 2
        if not count:
            return
        _expand_kernel[(_num_programs(rows), triton.cdiv(num_rows, block_n))](
            y,
            out_of,
            rows.keys_T,
            rows.ids_P,
            rows.order_P,
            rows.blocks_B3,
            weights_P,
            None if norm is None else norm.squares_TS,
            out,
            count,
            out_of.stride(0),
            out.stride(0),
            0.0 if norm is None else norm.eps,
            first,
            second,
            E=rows.experts,
            K=rows.per_token,
            ROWS=num_rows,
            RANK=rank,
            SEGMENTS=max(1, len(ends)),
            SPLITS=y.shape[0],
            SQUARES=0 if norm is None else norm.squares_TS.shape[1],
            WIDTH=1 if norm is None else norm.width,
            ADDS=adds,
            BLOCK_P=_BLOCK_P,
            BLOCK_N=block_n,
            num_warps=4,
            **self._target.launch_options,
        )


def _num_programs(rows: Rows) -> int:
    if rows.blocks_B3 is not None:
        return len(rows.blocks_B3)
    return rows.count if rows.order_P is None else triton.cdiv(rows.count, _BLOCK_P)


def _indices(rows: Rows, hidden: ExpertTokens) -> tuple[Tensor | None, Tensor | None]:
    """The pair of each row of the second product's tokens; or the row of each pair, where pairs are sorted by key."""
    if rows.order_P is None or hidden.pairs_P is None:
        return hidden.pairs_P, None
    if hidden.places_P is not None:
        return None, hidden.places_P
    numbers = torch.arange(rows.count, dtype=hidden.pairs_P.dtype, device=hidden.pairs_P.device)
    return None, torch.empty_like(hidden.pairs_P).index_copy_(0, hidden.pairs_P.long(), numbers)


@triton.jit
def _key_of(keys, ids, row, live, E: tl.constexpr, K: tl.constexpr):
    """The keys of rows; below 0 where there is no adapter, or no row."""
    key = tl.load(keys + row // K, mask=live, other=-1)
    if ids is not None:
        key = tl.where(key < 0, -1, key * E + tl.load(ids + row, mask=live, other=0).to(tl.int32))
    return key


@triton.jit(do_not_specialize=["count", "num_keys"])
def _table_kernel(
    keys,
    ids,
    order,
    blocks,
    count,
    num_keys,
    E: tl.constexpr,
    K: tl.constexpr,
    DENSE: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows sorted by key, those without one last; and blocks [B, 3] of rows with one key: key, first place, rows.

    A program writes what concerns its key; the last one, what concerns rows without. Blocks of a key whose first row
    has place s begin at s / BLOCK_P + key (DENSE), or are each BLOCK_P-th one from s on. Those between have no rows.
    """
    wait(PDL)
    let_next_begin(PDL and E > 1)  # else later kernels read the table before they wait
    program = tl.program_id(0)
    key = tl.where(program < num_keys, program, -1)
    before, number = 0, 0
    for begin in range(0, count, STEP):
        row_Q = begin + tl.arange(0, STEP)
        key_Q = _key_of(keys, ids, row_Q, row_Q < count, E, K)
        before += tl.sum(((key_Q >= 0) & (key_Q < program)).to(tl.int32), 0)
        number += tl.sum(((key_Q == key) & (row_Q < count)).to(tl.int32), 0)
    place = before
    for begin in range(0, count, STEP):
        row_Q = begin + tl.arange(0, STEP)
        mine_Q = (_key_of(keys, ids, row_Q, row_Q < count, E, K) == key) & (row_Q < count)
        rank_Q = tl.cumsum(mine_Q.to(tl.int32), 0) - 1
        tl.store(order + place + rank_Q, row_Q, mask=mine_Q)
        place += tl.sum(mine_Q.to(tl.int32), 0)
    block_B = tl.arange(0, BLOCK_B)
    if DENSE:
        first, start_B = before // BLOCK_P + program, block_B * BLOCK_P
        end = (before + number) // BLOCK_P + program + 1
        rows_B = tl.maximum(tl.minimum(number - start_B, BLOCK_P), 0)
    else:
        first, start_B, end = before, block_B, before + number
        rows_B = tl.where(block_B % BLOCK_P == 0, tl.minimum(number - start_B, BLOCK_P), 0)
    at_B, inside_B = blocks + 3 * (first + block_B), first + block_B < end
    tl.store(at_B, block_B * 0 + key, mask=inside_B)
    tl.store(at_B + 1, before + start_B, mask=inside_B)
    tl.store(at_B + 2, rows_B, mask=inside_B)


@triton.jit
def _rows_of(
    keys, ids, order, blocks, pairs, count, program, E: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr
):  # fmt: skip
    """(the key of a program's rows, which rows, which of them there are, whether the program has any)."""
    place_P = tl.arange(0, BLOCK_P)
    if blocks is not None:
        number = tl.load(blocks + 3 * program + 2)
        key = tl.load(blocks + 3 * program)
        live_P = place_P < number
        row_P = tl.load(order + tl.load(blocks + 3 * program + 1) + place_P, mask=live_P, other=0)
        works = number > 0
    else:
        row_P, inside_P = place_P, place_P < count
        pair_P = row_P if pairs is None else tl.load(pairs + row_P, mask=inside_P, other=0)
        key_P = _key_of(keys, ids, pair_P, inside_P, E, K)
        key = tl.max(tl.where(row_P == program, key_P, -1), 0)
        live_P = (key_P == key) & inside_P
        works = tl.min(tl.where(live_P, row_P, BLOCK_P), 0) == program
    return key, row_P, live_P, works


@triton.jit
def _sorted_rows(keys, ids, order, count, program, E: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr):
    """Of very many rows: those of a program, their keys (-1 past the end), and which of them there are."""
    place_P = program * BLOCK_P + tl.arange(0, BLOCK_P)
    inside_P = place_P < count
    pair_P = tl.load(order + place_P, mask=inside_P, other=0)
    return pair_P, _key_of(keys, ids, pair_P, inside_P, E, K), inside_P


@triton.jit
def _load_x(x, at_P, live_P, column_C, inside_C, COLUMNS: tl.constexpr, PLANES: tl.constexpr):
    live_PC = live_P[:, None] & inside_C[None, :]
    if PLANES:
        at_PC = at_P.to(tl.int64)[:, None] * (2 * COLUMNS) + column_C[None, :]
        high = tl.load(x + at_PC, mask=live_PC, other=0.0).to(tl.float32)
        low = tl.load(x + at_PC + COLUMNS, mask=live_PC, other=0.0).to(tl.float32)
        return high + low * 0.0625
    return tl.load(x + at_P.to(tl.int64)[:, None] * COLUMNS + column_C[None, :], mask=live_PC, other=0.0).to(tl.float32)


@triton.jit
def _load_a(a, a_R, column_C, COLUMNS: tl.constexpr, PLANES: tl.constexpr):
    inside_C = column_C < COLUMNS
    if PLANES:  # the places of x in the order of ops/planes.py
        column_C = (column_C & -16) | ((column_C >> 1) & 7) | ((column_C & 1) << 3)
    return tl.load(a + a_R[:, None] + column_C[None, :], mask=inside_C[None, :], other=0.0)


@triton.jit
def _shrink_rows(
    x,
    into,
    y,
    key,
    pair_P,
    at_P,
    live_P,
    count,
    slot_stride,
    scale,
    E: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PLANES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Rows with one key: their products with a part of the columns. WAITS: for the kernel before, which writes x."""
    segment, split = tl.program_id(1), tl.program_id(2)
    rank_R = tl.arange(0, RANK)
    a = into + (key // E).to(tl.int64) * slot_stride + (key % E).to(tl.int64) * (SEGMENTS * RANK * COLUMNS)
    a_R = (segment * RANK + rank_R) * COLUMNS
    sum_PR = tl.zeros((BLOCK_P, RANK), tl.float32)
    if STEPS == 1:
        column_C = split * BLOCK_C + tl.arange(0, BLOCK_C)
        a_RC = _load_a(a, a_R, column_C, COLUMNS, PLANES)
        wait(WAITS)
        x_PC = _load_x(x, at_P, live_P, column_C, column_C < COLUMNS, COLUMNS, PLANES)
        sum_PR = tl.dot((x_PC * scale).to(a_RC.dtype), tl.trans(a_RC), sum_PR, input_precision="ieee")
    else:
        wait(WAITS)
        for step in range(STEPS):
            column_C = (split * STEPS + step) * BLOCK_C + tl.arange(0, BLOCK_C)
            x_PC = _load_x(x, at_P, live_P, column_C, column_C < COLUMNS, COLUMNS, PLANES)
            a_RC = _load_a(a, a_R, column_C, COLUMNS, PLANES)
            sum_PR = tl.dot((x_PC * scale).to(a_RC.dtype), tl.trans(a_RC), sum_PR, input_precision="ieee")
    at_PR = (split * count + pair_P)[:, None] * (SEGMENTS * RANK) + (segment * RANK + rank_R)[None, :]
    tl.store(y + at_PR, sum_PR, mask=live_P[:, None] & (rank_R >= 0)[None, :])


@triton.jit(do_not_specialize=["count"])
def _shrink_kernel(
    x,
    into,
    keys,
    ids,
    order,
    blocks,
    pairs,
    places,
    y,
    count,
    slot_stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PLANES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    CHOSEN: tl.constexpr,
    READY: tl.constexpr,
    PDL: tl.constexpr,
):
    """`pairs`: the pair of each row of x; `places`: the row of x of each pair; else row p is of pair p.

    CHOSEN: the kernel before may have chosen the experts. READY: x is older than the kernel before.
    """
    wait(PDL and CHOSEN)
    let_next_begin(PDL)
    program = tl.program_id(0)
    WAITS: tl.constexpr = PDL and not (CHOSEN or READY)
    if blocks is not None or order is None:
        key, row_P, live_P, works = _rows_of(keys, ids, order, blocks, pairs, count, program, E, K, BLOCK_P)
        if (key >= 0) & works:
            pair_P = row_P if pairs is None else tl.load(pairs + row_P, mask=live_P, other=0)
            at_P = row_P // PER_TOKEN if places is None else tl.load(places + row_P, mask=live_P, other=0)
            _shrink_rows(
                x, into, y, key, pair_P, at_P, live_P, count, slot_stride, scale,
                E, COLUMNS, RANK, SEGMENTS, PLANES, STEPS, BLOCK_P, BLOCK_C, WAITS,
            )  # fmt: skip
        else:
            wait(WAITS)
    else:
        wait(WAITS)
        pair_P, key_P, _ = _sorted_rows(keys, ids, order, count, program, E, K, BLOCK_P)
        at_P = pair_P // PER_TOKEN if places is None else tl.load(places + pair_P)
        key = tl.max(key_P, 0)
        while key >= 0:
            _shrink_rows(
                x, into, y, key, pair_P, at_P, key_P == key, count, slot_stride, scale,
                E, COLUMNS, RANK, SEGMENTS, PLANES, STEPS, BLOCK_P, BLOCK_C, False,
            )  # fmt: skip
            key = tl.max(tl.where(key_P < key, key_P, -1), 0)
    wait(PDL and READY)  # so that the next kernel comes after the one before


@triton.jit
def _expand_rows(
    y,
    out_of,
    weights,
    squares,
    out,
    key,
    pair_P,
    live_P,
    count,
    slot_stride,
    out_stride,
    eps,
    first,
    second,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WAITS: tl.constexpr,
):
    """Rows with one key: a tile of their results. WAITS: for the kernel before, which writes y."""
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside_N = row_N < ROWS
    rank_R = tl.arange(0, RANK)
    start = tl.program_id(1) * BLOCK_N
    segment = (start >= first).to(tl.int32) + (start >= second).to(tl.int32)
    if SEGMENTS == 1:
        segment = 0
    b = out_of + (key // E).to(tl.int64) * slot_stride + (key % E).to(tl.int64) * (ROWS * RANK)
    b_NR = tl.load(b + row_N[:, None] * RANK + rank_R[None, :], mask=inside_N[:, None], other=0.0)
    wait(WAITS)
    y_PR = tl.zeros((BLOCK_P, RANK), tl.float32)
    for split in tl.static_range(SPLITS):
        at_PR = (split * count + pair_P)[:, None] * (SEGMENTS * RANK) + (segment * RANK + rank_R)[None, :]
        y_PR += tl.load(y + at_PR, mask=live_P[:, None] & (rank_R >= 0)[None, :], other=0.0)
    if squares is not None:
        square_P = tl.zeros((BLOCK_P,), tl.float32)
        for part in tl.static_range(SQUARES):
            square_P += tl.load(squares + pair_P * SQUARES + part, mask=live_P, other=0.0)
        y_PR *= tl.rsqrt(square_P / WIDTH + eps)[:, None]
    if weights is not None:
        y_PR *= tl.load(weights + pair_P, mask=live_P, other=0.0)[:, None]
    sum_PN = tl.dot(y_PR.to(b_NR.dtype), tl.trans(b_NR), input_precision="ieee")
    out_PN = out + pair_P.to(tl.int64)[:, None] * out_stride + row_N[None, :]
    live_PN = live_P[:, None] & inside_N[None, :]
    if ADDS:
        sum_PN += tl.load(out_PN, mask=live_PN, other=0.0).to(tl.float32)
    tl.store(out_PN, sum_PN.to(out.dtype.element_ty), mask=live_PN)


@triton.jit
def _write_zeros(out, pair_P, live_P, out_stride, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    row_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    out_PN = out + pair_P.to(tl.int64)[:, None] * out_stride + row_N[None, :]
    zeros_PN = tl.zeros((BLOCK_P, BLOCK_N), out.dtype.element_ty)
    tl.store(out_PN, zeros_PN, mask=live_P[:, None] & (row_N < ROWS)[None, :])


@triton.jit(do_not_specialize=["count", "first", "second"])
def _expand_kernel(
    y,
    out_of,
    keys,
    ids,
    order,
    blocks,
    weights,
    squares,
    out,
    count,
    slot_stride,
    out_stride,
    eps,
    first,
    second,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`first`, `second`: where the second and the third segment begin. Without ADDS, other rows become zeros."""
    let_next_begin(PDL)
    program = tl.program_id(0)
    if blocks is not None or order is None:
        key, pair_P, live_P, works = _rows_of(keys, ids, order, blocks, None, count, program, E, K, BLOCK_P)
        if (key >= 0) & works:
            _expand_rows(
                y, out_of, weights, squares, out, key, pair_P, live_P, count, slot_stride, out_stride, eps, first,
                second, E, ROWS, RANK, SEGMENTS, SPLITS, SQUARES, WIDTH, ADDS, BLOCK_P, BLOCK_N, PDL,
            )  # fmt: skip
        else:
            wait(PDL)
            if (not ADDS) & works:
                _write_zeros(out, pair_P, live_P, out_stride, ROWS, BLOCK_P, BLOCK_N)
    else:
        wait(PDL)
        pair_P, key_P, inside_P = _sorted_rows(keys, ids, order, count, program, E, K, BLOCK_P)
        if not ADDS:
            _write_zeros(out, pair_P, (key_P < 0) & inside_P, out_stride, ROWS, BLOCK_P, BLOCK_N)
        key = tl.max(key_P, 0)
        while key >= 0:
            _expand_rows(
                y, out_of, weights, squares, out, key, pair_P, key_P == key, count, slot_stride, out_stride, eps, first,
                second, E, ROWS, RANK, SEGMENTS, SPLITS, SQUARES, WIDTH, ADDS, BLOCK_P, BLOCK_N, False,
            )  # fmt: skip
            key = tl.max(tl.where(key_P < key, key_P, -1), 0)
