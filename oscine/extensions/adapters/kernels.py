"""The products of low-rank adapters in Triton, for any GPU from sm_80 on. Definition: products.py.

A program multiplies up to BLOCK_P rows with one key (tables.py) with tensor cores. A row without an adapter costs a
program that ends at once, or none of its own.

What a program may read before it waits for the kernel before it (gdc_wait):

    factors, and keys of tokens      always: they are older than the step
    keys and tables of pairs         after the first product, which waits for them before it lets others begin

Shape suffixes as in products.py; P rows of a program; C columns and N matrix rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.adapters.entries import products_of, shrink_entries
from oscine.extensions.adapters.products import Norm, Rows
from oscine.extensions.adapters.tables import BLOCK_P, rows_of, with_table
from oscine.ops.interface import Entries, ExpertTokens, LowRankRows
from oscine.ops.launch import let_next_begin, wait
from oscine.ops.target import Target

_BLOCK = 128  # columns, or matrix rows, of a tile; half as many of high ranks, which else would take all registers
_HIGH_RANK = 64
_SPLITS = 8  # of the columns, at most
_CHUNKS = 6  # of the matrix rows of an expert, at least
_STAGES = 4  # of what a program reads step by step
_FEW_ROWS = 64  # of tokens, whose second product has smaller tiles
_ONE_STEP = 8192  # elements of the first factor that a program reads at once
_PROGRAM = {"num_warps": 4, "maxnreg": 128}  # without the limit ptxas 12.9 prefers to spill


def program_of(rank: int) -> dict[str, int]:
    return _PROGRAM if rank < _HIGH_RANK else {"num_warps": 8}


def block_of(rank: int) -> int:
    """Columns, or matrix rows, of a tile."""
    return _BLOCK if rank < _HIGH_RANK else _BLOCK // 2


class Cut(NamedTuple):
    """How the columns of the first product are cut."""

    block_c: int  # columns of a step
    steps: int  # of a program
    splits: int  # programs


def cut_of(columns: int, rank: int, num_blocks: int) -> Cut:
    """Few programs read all of their part at once. More of them leave less time to each, and read step by step."""
    is_short = num_blocks <= BLOCK_P
    block_c = _ONE_STEP // rank if is_short else block_of(rank)
    parts = triton.cdiv(columns, block_c)
    steps = triton.cdiv(parts, _SPLITS)
    return Cut(block_c, steps, triton.cdiv(parts, steps))


class Kernels:
    """A Backend."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def rows(self, keys_T: Tensor, num_slots: int, ids_TK: Tensor | None = None, experts: int = 1) -> Rows:
        rows = Rows(keys_T, None if ids_TK is None else ids_TK.flatten(), experts)
        return with_table(self._target, rows, num_slots)

    def shrink(self, x: Tensor, rows: Rows, into: Tensor, segments: int) -> Tensor:
        """As in products.py, but with partial sums: float32 [splits, P, segments * R]."""
        count, num_columns = rows.size, x.shape[-1]
        rank = into.shape[-2] // segments
        block_c, steps, splits = cut_of(num_columns, rank, _num_blocks(rows))
        y = torch.empty((splits, count, segments * rank), dtype=torch.float32, device=x.device)
        if count:
            _shrink_kernel[(_num_blocks(rows), segments, splits)](
                x,
                into,
                rows.keys_T,
                rows.ids_P,
                rows.order_P,
                rows.blocks_B3,
                y,
                count,
                into.stride(0),
                E=rows.experts,
                K=rows.per_token,
                PER_TOKEN=count // len(x),
                COLUMNS=num_columns,
                RANK=rank,
                SEGMENTS=segments,
                STEPS=steps,
                STAGES=_STAGES,
                BLOCK_P=BLOCK_P,
                BLOCK_C=block_c,
                **self._target.program(program_of(rank)),
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
        norm: Norm | None = None,
    ) -> None:
        """As in products.py, of what `shrink` has left."""
        first, second = (ends[0], ends[1]) if ends else (out_of.shape[-2],) * 2
        block_n = 64 if rows.size <= _FEW_ROWS else block_of(out_of.shape[-1])
        while first % block_n or second % block_n:  # a tile has rows of one segment
            block_n //= 2
        places = Places(out.stride(0), 0)
        self._expand(y, rows, out_of, out, places, (block_n, 1), adds=adds, ends=ends, norm=norm)

    def shrink_entries(
        self, tokens: ExpertTokens, entries: Entries, keys_T: Tensor, into: Tensor, out_of: Tensor, *, first: bool
    ) -> LowRankRows:
        return shrink_entries(self._target, tokens, entries, keys_T, into, out_of, first=first)

    def through(
        self,
        tokens: Tensor,
        rows: Rows,
        into: Tensor,
        out_of: Tensor,
        out_TKN: Tensor,
        *,
        adds: bool,
        weights_P: Tensor | None = None,
    ) -> None:
        y = self.shrink(tokens, rows, into, 1)
        num_rows, rank = out_of.shape[-2:]
        block_n, places = block_of(rank), Places(out_TKN.stride(0), out_TKN.stride(1))
        tiles = triton.cdiv(num_rows, block_n)
        chunks = max(_CHUNKS, triton.cdiv(4 * self._target.sm_count, max(1, _num_blocks(rows))))
        shape = block_n, triton.cdiv(tiles, chunks)
        self._expand(y, rows, out_of, out_TKN, places, shape, adds=adds, weights_P=weights_P)

    def _expand(
        self,
        y: Tensor,
        rows: Rows,
        out_of: Tensor,
        out: Tensor,
        places: "Places",
        shape: tuple[int, int],
        *,
        adds: bool,
        ends: tuple[int, ...] = (),
        norm: Norm | None = None,
        weights_P: Tensor | None = None,
    ) -> None:
        """shape: matrix rows of a tile, tiles of a program."""
        count, (num_rows, rank), (block_n, tiles) = rows.size, out_of.shape[-2:], shape
        if count:
            _expand_kernel[(_num_blocks(rows), triton.cdiv(num_rows, block_n * tiles))](
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
                places.token_stride,
                places.pair_stride,
                0.0 if norm is None else norm.eps,
                ends[0] if ends else num_rows,
                ends[1] if ends else num_rows,
                tiles,
                E=rows.experts,
                K=rows.per_token,
                ROWS=num_rows,
                RANK=rank,
                SEGMENTS=max(1, len(ends)),
                SPLITS=y.shape[0],
                SQUARES=0 if norm is None else norm.squares_TS.shape[1],
                WIDTH=1 if norm is None else norm.width,
                ADDS=adds,
                STAGES=0 if tiles == 1 else _STAGES,
                BLOCK_P=BLOCK_P,
                BLOCK_N=block_n,
                **self._target.program(program_of(rank)),
                **self._target.launch_options,
            )


class Places(NamedTuple):
    """Where results go: elements between those of tokens, and of the pairs of a token."""

    token_stride: int
    pair_stride: int


def _num_blocks(rows: Rows) -> int:
    return rows.size if rows.blocks_B3 is None else len(rows.blocks_B3)


@triton.jit(do_not_specialize=["count"])
def _shrink_kernel(
    x,
    into,
    keys,
    ids,
    order,
    blocks,
    y,
    count,
    slot_stride,
    E: tl.constexpr,
    K: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    wait(PDL and ids is not None)  # for the experts and the table; later kernels read these without waiting
    let_next_begin(PDL)
    segment, split = tl.program_id(1), tl.program_id(2)
    key, row_P, live_P, works = rows_of(keys, ids, order, blocks, count, tl.program_id(0), E, K, BLOCK_P)
    if (key >= 0) & works:
        a = into + (key // E).to(tl.int64) * slot_stride
        a += ((key % E).to(tl.int64) * SEGMENTS + segment) * (RANK * COLUMNS)
        sum_PR = products_of(
            x, a, row_P // PER_TOKEN, live_P, split, 1.0, COLUMNS, RANK, False, STEPS, STAGES, BLOCK_P, BLOCK_C, PDL
        )
        rank_R = tl.arange(0, RANK)
        at_PR = (split * count + row_P[:, None]) * (SEGMENTS * RANK) + (segment * RANK + rank_R)[None, :]
        tl.store(y + at_PR, sum_PR, mask=live_P[:, None] & (rank_R >= 0)[None, :])
    wait(PDL)  # also without work, so that the next kernel comes after the one before


@triton.jit
def _load_y(y, pair_P, live_P, first, y_stride, split_stride, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """The sums of all parts of the columns."""
    rank_R = tl.arange(0, RANK)
    at_PR = pair_P[:, None] * y_stride + (first + rank_R)[None, :]
    valid_PR = live_P[:, None] & (rank_R >= 0)[None, :]
    y_PR = tl.load(y + at_PR, mask=valid_PR, other=0.0)
    for split in tl.static_range(1, SPLITS):
        y_PR += tl.load(y + split * split_stride + at_PR, mask=valid_PR, other=0.0)
    return y_PR


@triton.jit
def _scaled(y_PR, row_P, live_P, weights, squares, eps, SQUARES: tl.constexpr, WIDTH: tl.constexpr):
    """Divided by the norms of rows, or times their weights, if these are given."""
    if squares is not None:
        square_P = tl.zeros((y_PR.shape[0],), tl.float32)
        for part in tl.static_range(SQUARES):
            square_P += tl.load(squares + row_P * SQUARES + part, mask=live_P, other=0.0)
        y_PR *= tl.rsqrt(square_P / WIDTH + eps)[:, None]
    if weights is not None:
        y_PR *= tl.load(weights + row_P, mask=live_P, other=0.0)[:, None]
    return y_PR


@triton.jit
def _load_b(b, start, ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    row_N, rank_R = start + tl.arange(0, BLOCK_N), tl.arange(0, RANK)
    return tl.load(b + row_N[:, None] * RANK + rank_R[None, :], mask=(row_N < ROWS)[:, None], other=0.0)


@triton.jit
def _store_tile(out, at_P, live_P, start, sum_PN, ROWS: tl.constexpr, ADDS: tl.constexpr):
    row_N = start + tl.arange(0, sum_PN.shape[1])
    out_PN = out + at_P[:, None] + row_N[None, :]
    live_PN = live_P[:, None] & (row_N < ROWS)[None, :]
    if ADDS:
        sum_PN += tl.load(out_PN, mask=live_PN, other=0.0).to(tl.float32)
    tl.store(out_PN, sum_PN.to(out.dtype.element_ty), mask=live_PN)


@triton.jit(do_not_specialize=["count", "first", "second", "tiles"])
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
    token_stride,
    pair_stride,
    eps,
    first,
    second,
    tiles,
    E: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SQUARES: tl.constexpr,
    WIDTH: tl.constexpr,
    ADDS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """`first`, `second`: where the second and the third segment begin. Without ADDS, other rows become zeros. A program
    has one tile, whose factors it reads before it waits, or several (STAGES), of one segment."""
    let_next_begin(PDL)
    start = tl.program_id(1) * BLOCK_N * tiles
    key, row_P, live_P, works = rows_of(keys, ids, order, blocks, count, tl.program_id(0), E, K, BLOCK_P)
    segment = 0 if SEGMENTS == 1 else (start >= first).to(tl.int32) + (start >= second).to(tl.int32)
    at_P = (row_P // K).to(tl.int64) * token_stride + (row_P % K).to(tl.int64) * pair_stride  # where results begin
    if (key >= 0) & works:
        b = out_of + (key // E).to(tl.int64) * slot_stride + (key % E).to(tl.int64) * (ROWS * RANK)
        if STAGES == 0:
            b_NR = _load_b(b, start, ROWS, RANK, BLOCK_N)
        wait(PDL)
        y_PR = _load_y(y, row_P, live_P, segment * RANK, SEGMENTS * RANK, count * SEGMENTS * RANK, RANK, SPLITS)
        y_PR = _scaled(y_PR, row_P, live_P, weights, squares, eps, SQUARES, WIDTH).to(out_of.dtype.element_ty)
        if STAGES == 0:
            _store_tile(out, at_P, live_P, start, tl.dot(y_PR, tl.trans(b_NR), input_precision="ieee"), ROWS, ADDS)
        else:
            for tile in tl.range(0, tiles, num_stages=STAGES):
                b_NR = _load_b(b, start + tile * BLOCK_N, ROWS, RANK, BLOCK_N)
                sum_PN = tl.dot(y_PR, tl.trans(b_NR), input_precision="ieee")
                _store_tile(out, at_P, live_P, start + tile * BLOCK_N, sum_PN, ROWS, ADDS)
    else:
        wait(PDL)
        for tile in range(tiles if (not ADDS) & works else 0):
            zeros_PN = tl.zeros((BLOCK_P, BLOCK_N), tl.float32)
            _store_tile(out, at_P, live_P, start + tile * BLOCK_N, zeros_PN, ROWS, False)
