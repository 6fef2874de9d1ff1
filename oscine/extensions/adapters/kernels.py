"""The products of low-rank adapters in Triton, for any GPU from sm_80 on. Definition: products.py.

Rows with one key share the factors of an adapter, or of one of its experts. A program multiplies up to BLOCK_P such
rows with tensor cores. How it finds them depends on how many rows there are:

    few rows     Each row has a program. Every BLOCK_P-th row of a key works for those up to the next such one; the
                 programs of others end.
    more rows    Of few keys: a kernel writes once which rows each program has.
    many rows    Rows are sorted by key once. A program has BLOCK_P sorted rows, and goes through their keys.

All launches have the same grid for a number of rows, whatever their keys, so a CUDA graph serves any mix of adapters.
A row without an adapter costs a program that ends at once, or none of its own.

Keys and factors are older than the kernel before, so a program finds its rows and reads factors before it waits for it.

Shape suffixes as in products.py; P rows of a program, Q all rows; C columns and N matrix rows of a tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.adapters.products import Norm, Rows
from oscine.ops.launch import let_next_begin, wait
from oscine.ops.target import Target

FEW_ROWS = 1024  # each program looks at the keys of so many rows in some microseconds
TABLE_KEYS = 64  # at most, and at least so many rows, of a table of blocks
TABLE_ROWS = 17
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

    def rows(self, keys_P: Tensor, experts: int, per_token: int = 1, num_keys: int = 0) -> Rows:
        count = len(keys_P)
        if count > FEW_ROWS:
            return Rows(keys_P, experts, per_token, keys_P.argsort().int())
        if count < TABLE_ROWS or not 0 < num_keys <= TABLE_KEYS:
            return Rows(keys_P, experts, per_token)
        num_blocks = min(count, count // _BLOCK_P + num_keys)
        order_P, blocks_B3 = torch.empty_like(keys_P), keys_P.new_empty(num_blocks, 3)
        _table_kernel[(1,)](
            keys_P,
            order_P,
            blocks_B3,
            count,
            num_blocks,
            num_keys,
            BLOCK_Q=triton.next_power_of_2(count),
            BLOCK_B=triton.next_power_of_2(num_blocks),
            BLOCK_P=_BLOCK_P,
            num_warps=4,
            **self._target.launch_options,
        )
        return Rows(keys_P, experts, per_token, order_P, blocks_B3)

    def shrink(
        self, x: Tensor, rows: Rows, into: Tensor, segments: int, pairs: Tensor | None = None, factor: float = 1.0
    ) -> Tensor:
        """As in products.py, but with partial sums: float32 [splits, P, segments * R]."""
        count, num_columns = len(rows.keys_P), x.shape[-1]
        rank = into.shape[-2] // segments
        if count <= _FEWEST_ROWS:
            block_c = _ONE_STEP // rank
            splits = triton.cdiv(num_columns, block_c)
        else:
            block_c = block_of(rank)
            most = _SPLITS if rows.blocks_B3 is not None else 2 if count <= FEW_ROWS else 1
            splits = min(most, triton.cdiv(num_columns, block_c))
        steps = triton.cdiv(triton.cdiv(num_columns, block_c), splits)
        y = torch.empty((splits, count, segments * rank), dtype=torch.float32, device=x.device)
        places = None
        if pairs is not None and rows.order_P is not None:  # rows are sorted by key: where each one is in x
            places = torch.empty_like(pairs).index_copy_(
                0, pairs.long(), torch.arange(count, dtype=pairs.dtype, device=x.device)
            )
            pairs = None
        if count:
            _shrink_kernel[(self._programs(count, rows), segments, splits)](
                x,
                into,
                rows.keys_P,
                rows.order_P,
                rows.blocks_B3,
                pairs,
                places,
                y,
                count,
                into.stride(0),
                1.0 / factor,
                E=rows.experts,
                PER_TOKEN=rows.per_token,
                COLUMNS=num_columns,
                RANK=rank,
                SEGMENTS=segments,
                PLANES=x.dim() == 3,
                STEPS=steps,
                BLOCK_Q=triton.next_power_of_2(count) if rows.order_P is None else 1,
                BLOCK_P=_BLOCK_P,
                BLOCK_C=block_c,
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
        """As in products.py, of what `shrink` has left. With blocks, rows without an adapter are not written."""
        count, (num_rows, rank) = len(rows.keys_P), out_of.shape[-2:]
        first, second = (ends[0], ends[1]) if ends else (num_rows, num_rows)
        block_n = 64 if count <= 64 else block_of(rank)
        while first % block_n or second % block_n:  # a tile has rows of one segment
            block_n //= 2
        if not count:
            return
        _expand_kernel[(self._programs(count, rows), triton.cdiv(num_rows, block_n))](
            y,
            out_of,
            rows.keys_P,
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
            ROWS=num_rows,
            RANK=rank,
            SEGMENTS=max(1, len(ends)),
            SPLITS=y.shape[0],
            SQUARES=0 if norm is None else norm.squares_TS.shape[1],
            WIDTH=1 if norm is None else norm.width,
            ADDS=adds,
            BLOCK_Q=triton.next_power_of_2(count) if rows.order_P is None else 1,
            BLOCK_P=_BLOCK_P,
            BLOCK_N=block_n,
            num_warps=4,
            **self._target.launch_options,
        )

    def _programs(self, count: int, rows: Rows) -> int:
        if rows.blocks_B3 is not None:
            return len(rows.blocks_B3)
        return count if rows.order_P is None else triton.cdiv(count, _BLOCK_P)


@triton.jit(do_not_specialize=["count", "num_blocks", "num_keys"])
def _table_kernel(
    keys,
    order,
    blocks,
    count,
    num_blocks,
    num_keys,
    BLOCK_Q: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """Rows sorted by key, without those below 0; and blocks [B, 3] of rows with one key: key, first place, rows."""
    wait(PDL)  # and lets no kernel begin early: later ones read the table before they wait
    row_Q, block_B = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_B)
    key_Q = tl.load(keys + row_Q, mask=row_Q < count, other=-1)
    place_Q, key_B, start_B, rows_B = tl.full((BLOCK_Q,), -1, tl.int32), block_B * 0, block_B * 0, block_B * 0
    first_row, first_block = 0, 0
    for key in range(num_keys):
        mine_Q = (key_Q == key).to(tl.int32)
        number = tl.sum(mine_Q, 0)
        place_Q = tl.where(mine_Q > 0, first_row + tl.cumsum(mine_Q, 0) - 1, place_Q)
        within_B = (block_B - first_block) * BLOCK_P
        mine_B = (within_B >= 0) & (within_B < number)
        key_B = tl.where(mine_B, key, key_B)
        start_B = tl.where(mine_B, first_row + within_B, start_B)
        rows_B = tl.where(mine_B, tl.minimum(number - within_B, BLOCK_P), rows_B)
        first_row += number
        first_block += tl.cdiv(number, BLOCK_P)
    tl.store(order + place_Q, row_Q, mask=place_Q >= 0)
    inside_B = block_B < num_blocks
    tl.store(blocks + 3 * block_B, key_B, mask=inside_B)
    tl.store(blocks + 3 * block_B + 1, start_B, mask=inside_B)
    tl.store(blocks + 3 * block_B + 2, rows_B, mask=inside_B)


@triton.jit
def _block_rows(blocks, order, program, BLOCK_P: tl.constexpr):
    """Of a table: (the key of a program's rows, which rows, which of them there are)."""
    number = tl.load(blocks + 3 * program + 2)
    place_P = tl.arange(0, BLOCK_P)
    live_P = place_P < number
    row_P = tl.load(order + tl.load(blocks + 3 * program + 1) + place_P, mask=live_P, other=0)
    return tl.where(number > 0, tl.load(blocks + 3 * program), -1), row_P, live_P


@triton.jit
def _key_of(keys, row, live, pairs):
    """The keys of rows, which are those of pairs where they are given."""
    pair = row if pairs is None else tl.load(pairs + row, mask=live, other=0)
    return tl.load(keys + pair, mask=live, other=-1)


@triton.jit
def _members(keys, pairs, count, program, BLOCK_Q: tl.constexpr):
    """Of few rows: (the key of the program's row, how many earlier rows have it, how many rows have it)."""
    row_Q = tl.arange(0, BLOCK_Q)
    key_Q = _key_of(keys, row_Q, row_Q < count, pairs)
    key = tl.max(tl.where(row_Q == program, key_Q, -1), 0)
    mine_Q = (key_Q == key) & (row_Q < count)
    before = tl.sum((mine_Q & (row_Q < program)).to(tl.int32), 0)
    return key, before, tl.sum(mine_Q.to(tl.int32), 0)


@triton.jit
def _some(keys, pairs, count, key, program, number, start, BLOCK_P: tl.constexpr, BLOCK_S: tl.constexpr):
    """The rows from the `start`-th of a key on, which is `program`; there are `number` of them all."""
    wanted_P = start + tl.arange(0, BLOCK_P)
    row_P = tl.where(wanted_P == start, program, 0)
    if number - start > 1:
        row_P = tl.zeros((BLOCK_P,), tl.int32)
        before = 0
        for begin in range(0, count, BLOCK_S):
            row_S = begin + tl.arange(0, BLOCK_S)
            mine_S = (_key_of(keys, row_S, row_S < count, pairs) == key) & (row_S < count)
            rank_S = before + tl.cumsum(mine_S.to(tl.int32), 0) - 1
            found_PS = mine_S[None, :] & (rank_S[None, :] == wanted_P[:, None])
            row_P += tl.sum(tl.where(found_PS, row_S[None, :], 0), 1)
            before += tl.sum(mine_S.to(tl.int32), 0)
    return row_P


@triton.jit
def _rows_of(keys, order, blocks, pairs, count, program, BLOCK_Q: tl.constexpr, BLOCK_P: tl.constexpr):
    """(the key of a program's rows, which rows, which of them there are, whether the program has any)."""
    if blocks is not None:
        key, row_P, live_P = _block_rows(blocks, order, program, BLOCK_P)
        works = key >= 0
    else:
        key, start, number = _members(keys, pairs, count, program, BLOCK_Q)
        row_P, works = tl.zeros((BLOCK_P,), tl.int32), start % BLOCK_P == 0
        live_P = start + tl.arange(0, BLOCK_P) < number
        if works:
            row_P = _some(keys, pairs, count, key, program, number, start, BLOCK_P, 64)
    return key, row_P, live_P, works


@triton.jit
def _sorted_rows(keys, order, count, program, BLOCK_P: tl.constexpr):
    """Of many rows: those of a program, their keys (-1 past the end), and which of them there are."""
    place_P = program * BLOCK_P + tl.arange(0, BLOCK_P)
    inside_P = place_P < count
    pair_P = tl.load(order + place_P, mask=inside_P, other=0)
    return pair_P, tl.where(inside_P, tl.load(keys + pair_P), -1), inside_P


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
    order,
    blocks,
    pairs,
    places,
    y,
    count,
    slot_stride,
    scale,
    E: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PLANES: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """`pairs`: the pair of each row of x; `places`: the row of x of each pair; else row p is of pair p."""
    let_next_begin(PDL)
    program = tl.program_id(0)
    if blocks is not None or order is None:
        wait(PDL and E > 1)  # the keys of pairs may be of the kernel before
        key, row_P, live_P, works = _rows_of(keys, order, blocks, pairs, count, program, BLOCK_Q, BLOCK_P)
        if (key >= 0) & works:
            pair_P = row_P if pairs is None else tl.load(pairs + row_P, mask=live_P, other=0)
            _shrink_rows(
                x, into, y, key, pair_P, row_P // PER_TOKEN, live_P, count, slot_stride, scale,
                E, COLUMNS, RANK, SEGMENTS, PLANES, STEPS, BLOCK_P, BLOCK_C, PDL,
            )  # fmt: skip
        else:
            wait(PDL)
    else:
        wait(PDL)
        pair_P, key_P, _ = _sorted_rows(keys, order, count, program, BLOCK_P)
        at_P = pair_P // PER_TOKEN if places is None else tl.load(places + pair_P)
        key = tl.max(key_P, 0)
        while key >= 0:
            _shrink_rows(
                x, into, y, key, pair_P, at_P, key_P == key, count, slot_stride, scale,
                E, COLUMNS, RANK, SEGMENTS, PLANES, STEPS, BLOCK_P, BLOCK_C, False,
            )  # fmt: skip
            key = tl.max(tl.where(key_P < key, key_P, -1), 0)


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
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`first`, `second`: where the second and the third segment begin. Without ADDS, other rows become zeros, but for
    those that no block has."""
    let_next_begin(PDL)
    program = tl.program_id(0)
    if blocks is not None or order is None:
        key, pair_P, live_P, works = _rows_of(keys, order, blocks, None, count, program, BLOCK_Q, BLOCK_P)
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
        pair_P, key_P, inside_P = _sorted_rows(keys, order, count, program, BLOCK_P)
        if not ADDS:
            _write_zeros(out, pair_P, (key_P < 0) & inside_P, out_stride, ROWS, BLOCK_P, BLOCK_N)
        key = tl.max(key_P, 0)
        while key >= 0:
            _expand_rows(
                y, out_of, weights, squares, out, key, pair_P, key_P == key, count, slot_stride, out_stride, eps, first,
                second, E, ROWS, RANK, SEGMENTS, SPLITS, SQUARES, WIDTH, ADDS, BLOCK_P, BLOCK_N, False,
            )  # fmt: skip
            key = tl.max(tl.where(key_P < key, key_P, -1), 0)
