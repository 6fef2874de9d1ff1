"""The first products of experts' adapters for kernels that multiply with the second factors themselves. In Triton.

Such a kernel computes tiles of one expert and a few rows (Entries), which may have several adapters. For the j-th of
these it adds the second factor times values in which all rows with other adapters are zeros. So the values are written
once for each j, and a list says which adapters an entry has:

    values [D, P, planes, R]   D: most adapters of an entry; planes: columns of a row, all but the first zeros
    lists [entries, 1 + D]     how many adapters; their slots, the highest first

Programs of the first product wait for the kernel before (gdc_wait) before all else. Those of the second one read
factors, keys of tokens and entries before they wait: the kernel of the first one has waited for these.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.interface import Entries, ExpertTokens, LowRankRows
from oscine.ops.launch import NUM_ARRIVALS, arrivals, arrives_last, let_next_begin, wait
from oscine.ops.norm.triton import rank_of
from oscine.ops.target import Target

LEAST_ROWS = 16  # of a product of tensor cores
# Up to so many rows: groups, and splits at most.
_CUTS = ((4, 1, 6), (8, 2, 6), (32, 8, 1), (1 << 30, 4, 3))
_STAGES = 4
_ONE_STEP = 8192  # elements of a factor that a program reads at once
_BUSY = 4  # programs of each processor, beyond which columns are not cut


class Cut(NamedTuple):
    """How the work of an entry is cut."""

    groups: int  # programs that take its adapters in turn
    splits: int  # programs that share the columns
    steps: int  # of a program
    block_c: int  # columns of a step


def cut_of(columns: int, rank: int, rows: int, most: int, entries: int, processors: int) -> Cut:
    """For entries of up to `rows` rows and `most` adapters. Measured on an NVIDIA H200 with 1, 8, 16 and 64 rows.

    Programs without work cost their launch, so there are as many groups as an entry is likely to have adapters.
    """
    groups, splits = next((groups, splits) for up_to, groups, splits in _CUTS if rows <= up_to)
    groups = min(most, groups)
    block_c = _ONE_STEP // max(rank, rows, LEAST_ROWS)
    parts = triton.cdiv(columns, block_c)
    splits = min(parts, splits, triton.cdiv(_BUSY * processors, entries * groups))
    steps = triton.cdiv(parts, splits)
    return Cut(groups, triton.cdiv(parts, steps), steps, block_c)


def warps_of(rows: int, rank: int) -> int:
    return 4 if rows * rank <= 4096 else 8  # else sums take all registers


def shrink_entries(
    target: Target, tokens: ExpertTokens, entries: Entries, keys_T: Tensor, into: Tensor, out_of: Tensor, *, first: bool
) -> LowRankRows:
    """As in products.py."""
    slots, experts, rank, columns = into.shape
    most, block_p = min(slots, entries.rows), max(LEAST_ROWS, entries.rows)
    values = into.new_empty(most, entries.pairs, entries.planes, rank)
    lists = keys_T.new_empty(entries.most, 1 + most)
    groups, splits, steps, block_c = cut_of(columns, rank, entries.rows, most, entries.most, target.sm_count)
    if entries.most * most > NUM_ARRIVALS:
        splits, steps = 1, triton.cdiv(columns, block_c)
    partial = None
    if splits > 1:
        partial = torch.empty((most, entries.pairs, splits, rank), dtype=torch.float32, device=into.device)
    _entries_kernel[(entries.most, groups, splits)](
        tokens.rows,
        into,
        out_of,
        keys_T,
        entries.table,
        entries.order_P,
        values,
        partial,
        arrivals(into.device),
        lists,
        entries.pairs,
        into.stride(0),
        out_of.stride(0),
        1.0 / tokens.factor,
        E=experts,
        K=entries.pairs // len(keys_T),
        CHOICE=entries.order_P is None and entries.table.dtype.is_floating_point,
        COLUMNS=columns,
        ROWS=out_of.shape[-2],
        RANK=rank,
        MOST=most,
        FIRST=first,
        PLANES=tokens.rows.dim() == 3,
        OUT_PLANES=entries.planes,
        STEPS=steps,
        SPLITS=splits,
        STAGES=_STAGES,
        BLOCK_P=block_p,
        BLOCK_C=block_c,
        num_warps=warps_of(block_p, rank),
        **target.launch_options,
    )
    return LowRankRows(values, lists, out_of)


@triton.jit
def _load_x(x, at_P, live_P, start, COLUMNS: tl.constexpr, PLANES: tl.constexpr, BLOCK_C: tl.constexpr):
    column_C = start + tl.arange(0, BLOCK_C)
    live_PC = live_P[:, None] & (column_C < COLUMNS)[None, :]
    if PLANES:
        at_PC = at_P.to(tl.int64)[:, None] * (2 * COLUMNS) + column_C[None, :]
        high = tl.load(x + at_PC, mask=live_PC, other=0.0).to(tl.float32)
        low = tl.load(x + at_PC + COLUMNS, mask=live_PC, other=0.0).to(tl.float32)
        return high + low * 0.0625
    return tl.load(x + at_P.to(tl.int64)[:, None] * COLUMNS + column_C[None, :], mask=live_PC, other=0.0).to(tl.float32)


@triton.jit
def _load_a(a, start, COLUMNS: tl.constexpr, RANK: tl.constexpr, PLANES: tl.constexpr, BLOCK_C: tl.constexpr):
    rank_R, column_C = tl.arange(0, RANK), start + tl.arange(0, BLOCK_C)
    inside_RC = (rank_R >= 0)[:, None] & (column_C < COLUMNS)[None, :]
    a_RC = tl.load(a + rank_R[:, None] * COLUMNS + column_C[None, :], mask=inside_RC, other=0.0)
    if PLANES:  # x has the order of ops/planes.py: of 16 columns, each of the first half before one of the second
        a_RC = tl.reshape(a_RC, (RANK, BLOCK_C // 16, 2, 8)).permute(0, 1, 3, 2).reshape(RANK, BLOCK_C)
    return a_RC


@triton.jit
def _prefetch(pointer, num_bytes, PDL: tl.constexpr):
    """Into the L2 cache; num_bytes: in multiples of 16."""
    if PDL:
        one: tl.constexpr = "{.reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0;"
        code: tl.constexpr = one + "@p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}"
        tl.inline_asm_elementwise(code, "=r,l,r", [pointer, num_bytes], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _entry_at(table, order, entry, E: tl.constexpr, CHOICE: tl.constexpr):
    """(expert, first row, number of rows) of an entry; no rows if there is none."""
    if order is not None:
        expert = tl.load(table + 4 + 4 * entry)
        first = tl.load(table + 4 + 4 * entry + 1)
        number = tl.load(table + 4 + 4 * entry + 2)
        number = tl.where(entry < tl.load(table), number, 0)
    elif CHOICE:
        expert_E = tl.arange(0, E)
        expert = tl.sum(tl.where(rank_of(tl.load(table + expert_E), E, E) == entry, expert_E, 0), 0)
        first, number = entry, 1
    else:
        expert, first, number = tl.load(table + entry).to(tl.int32), entry, 1
    return expert, first, number


@triton.jit
def _rows_of(table, order, keys, entry, E: tl.constexpr, K: tl.constexpr, CHOICE: tl.constexpr, BLOCK_P: tl.constexpr):
    """(expert, rows, which of them there are, their tokens, the slots of these tokens) of an entry."""
    expert, first, number = _entry_at(table, order, entry, E, CHOICE)
    place_P = tl.arange(0, BLOCK_P)
    live_P, row_P = place_P < number, first + place_P
    pair_P = row_P
    if order is not None:
        pair_P = tl.load(order + row_P, mask=live_P, other=0)
    return expert, row_P, live_P, pair_P // K, tl.load(keys + pair_P // K, mask=live_P, other=-1)


@triton.jit
def products_of(
    x,
    a,
    at_P,
    mine_P,
    split,
    scale,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    PLANES: tl.constexpr,
    STEPS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    WAITS: tl.constexpr,
):
    """[P, R] float32: scale * x times the factor `a` [R, COLUMNS], of a part of the columns.

    at_P: rows of x; those that are not `mine` give zeros. WAITS: for the kernel that writes x.
    """
    sum_PR = tl.zeros((BLOCK_P, RANK), tl.float32)
    if STEPS == 1:
        a_RC = _load_a(a, split * BLOCK_C, COLUMNS, RANK, PLANES, BLOCK_C)
        wait(WAITS)
        x_PC = _load_x(x, at_P, mine_P, split * BLOCK_C, COLUMNS, PLANES, BLOCK_C)
        sum_PR = tl.dot((x_PC * scale).to(a_RC.dtype), tl.trans(a_RC), sum_PR, input_precision="ieee")
    else:
        wait(WAITS)
        for step in tl.range(STEPS, num_stages=STAGES):
            start = (split * STEPS + step) * BLOCK_C
            x_PC = _load_x(x, at_P, mine_P, start, COLUMNS, PLANES, BLOCK_C)
            a_RC = _load_a(a, start, COLUMNS, RANK, PLANES, BLOCK_C)
            sum_PR = tl.dot((x_PC * scale).to(a_RC.dtype), tl.trans(a_RC), sum_PR, input_precision="ieee")
    return sum_PR


@triton.jit
def _sum_of_all(sum_PR, partial, arrived, row_P, live_P, split, RANK: tl.constexpr, SPLITS: tl.constexpr):
    """(whether this program is the last one with its rows and adapter, the sum of all of them)."""
    rank_R = tl.arange(0, RANK)
    at_PR = row_P.to(tl.int64)[:, None] * (SPLITS * RANK) + rank_R[None, :]
    live_PR = live_P[:, None] & (rank_R >= 0)[None, :]
    tl.store(partial + at_PR + split * RANK, sum_PR, mask=live_PR)
    last = arrives_last(arrived, SPLITS)
    if last:
        tl.store(arrived, 0)
        sum_PR = tl.zeros_like(sum_PR)
        for other in tl.static_range(SPLITS):
            sum_PR += tl.load(partial + at_PR + other * RANK, mask=live_PR, other=0.0, cache_modifier=".cg")
    return last, sum_PR


@triton.jit
def _store_values(values, sum_PR, row_P, live_P, RANK: tl.constexpr, OUT_PLANES: tl.constexpr):
    rank_R = tl.arange(0, RANK)
    at_PR = row_P.to(tl.int64)[:, None] * (OUT_PLANES * RANK) + rank_R[None, :]
    live_PR = live_P[:, None] & (rank_R >= 0)[None, :]
    tl.store(values + at_PR, sum_PR.to(values.dtype.element_ty), mask=live_PR)
    for plane in tl.static_range(1, OUT_PLANES):
        zero_PR = tl.zeros_like(sum_PR).to(values.dtype.element_ty)
        tl.store(values + plane * RANK + at_PR, zero_PR, mask=live_PR)


@triton.jit
def _finish(
    sum_PR,
    values,
    partial,
    arrived,
    row_P,
    live_P,
    split,
    RANK: tl.constexpr,
    SPLITS: tl.constexpr,
    OUT_PLANES: tl.constexpr,
):
    last = True
    if SPLITS > 1:
        last, sum_PR = _sum_of_all(sum_PR, partial, arrived, row_P, live_P, split, RANK, SPLITS)
    if last:
        _store_values(values, sum_PR, row_P, live_P, RANK, OUT_PLANES)


@triton.jit(do_not_specialize=["num_pairs"])
def _entries_kernel(
    x,
    into,
    out_of,
    keys,
    table,
    order,
    values,
    partial,
    arrived,
    lists,
    num_pairs,
    into_stride,
    out_stride,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    CHOICE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    RANK: tl.constexpr,
    MOST: tl.constexpr,
    FIRST: tl.constexpr,
    PLANES: tl.constexpr,
    OUT_PLANES: tl.constexpr,
    STEPS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """FIRST: x has a row for each token, and later kernels read without waiting what this one waits for. Else x has
    rows of pairs."""
    wait(PDL and FIRST)
    let_next_begin(PDL)
    entry, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    expert, row_P, live_P, token_P, slot_P = _rows_of(table, order, keys, entry, E, K, CHOICE, BLOCK_P)
    own_list = lists + entry * (1 + MOST)
    slot = tl.max(slot_P, 0)
    count = 0
    while slot >= 0:
        if count % tl.num_programs(1) == group:
            a = into + slot.to(tl.int64) * into_stride + expert * (RANK * COLUMNS)
            b = out_of + slot.to(tl.int64) * out_stride + expert * (ROWS * RANK)
            if split == 0:
                _prefetch(b, ROWS * RANK * 2, PDL)
            sum_PR = products_of(
                x, a, token_P if FIRST else row_P, slot_P == slot, split, scale, COLUMNS, RANK, PLANES, STEPS, STAGES,
                BLOCK_P, BLOCK_C, PDL and not FIRST,
            )  # fmt: skip
            own_P, own = count * num_pairs + row_P, arrived + entry * MOST + count
            _finish(sum_PR, values, partial, own, own_P, live_P, split, RANK, SPLITS, OUT_PLANES)
        if (group == 0) & (split == 0):
            tl.store(own_list + 1 + count, slot)
        count += 1
        slot = tl.max(tl.where(slot_P < slot, slot_P, -1), 0)
    wait(PDL)  # also without work: kernels before may still use the list's memory; and the next kernel comes after them
    if (group == 0) & (split == 0):
        tl.store(own_list, count)
