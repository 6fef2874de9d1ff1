"""Which rows of a product share the factors of an adapter, or of one of its experts: those with one key. In Triton.

Up to BLOCK_P rows need no table: a program looks at all keys. Of more rows, a kernel writes once which of them are
together in a block of up to BLOCK_P. The number of blocks does not depend on keys, so a CUDA graph serves any mix of
adapters; those without rows cost a program that ends at once.

Shape suffixes: P rows of a block, Q all rows, B blocks.
"""

from dataclasses import replace

import triton
import triton.language as tl

from oscine.extensions.adapters.products import Rows
from oscine.ops.launch import let_next_begin, wait
from oscine.ops.target import Target

BLOCK_P = 16
_STEP = 1024  # rows at a time


def with_table(target: Target, rows: Rows, num_slots: int) -> Rows:
    """The same rows, with a table if they do not fit in a block."""
    count, num_keys = rows.size, num_slots * rows.experts
    if count <= BLOCK_P:
        return rows
    most = count // BLOCK_P + num_keys + 1
    order_P, blocks_B3 = rows.keys_T.new_empty(count), rows.keys_T.new_empty(min(count, most), 3)
    table_kernel[(num_keys + 1,)](
        rows.keys_T,
        rows.ids_P,
        order_P,
        blocks_B3,
        count,
        num_keys,
        E=rows.experts,
        K=rows.per_token,
        DENSE=most <= count,
        STEP=min(_STEP, triton.next_power_of_2(count)),
        BLOCK_P=BLOCK_P,
        num_warps=4,
        **target.launch_options,
    )
    return replace(rows, order_P=order_P, blocks_B3=blocks_B3)


@triton.jit
def _key_of(keys, ids, row, live, E: tl.constexpr, K: tl.constexpr):
    """The keys of rows; below 0 where there is no adapter, or no row."""
    key = tl.maximum(tl.load(keys + row // K, mask=live, other=-1), -1)
    if ids is not None:
        key = tl.where(key < 0, -1, key * E + tl.load(ids + row, mask=live, other=0).to(tl.int32))
    return key


@triton.jit(do_not_specialize=["count", "num_keys"])
def table_kernel(
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
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """The fields of Rows. A program writes what concerns its key; the last one, what concerns rows without.

    Blocks of a key whose first row has place s begin at s / BLOCK_P + key (DENSE), or are each BLOCK_P-th one from s
    on. Those between have no rows.
    """
    wait(PDL)
    let_next_begin(PDL and E > 1)  # else later kernels read the table before they wait
    program = tl.program_id(0)
    key = tl.where(program < num_keys, program, -1)
    before, number = 0, 0
    at_Q = tl.arange(0, STEP)
    for begin in range(0, count, STEP):
        key_Q = _key_of(keys, ids, begin + at_Q, begin + at_Q < count, E, K)
        before += tl.sum(((key_Q >= 0) & (key_Q < program)).to(tl.int32), 0)
        number += tl.sum(((key_Q == key) & (begin + at_Q < count)).to(tl.int32), 0)
    first = before // BLOCK_P + program if DENSE else before
    end = (before + number) // BLOCK_P + program + 1 if DENSE else before + number
    step: tl.constexpr = BLOCK_P if DENSE else 1
    for begin in range(first, end, STEP):
        start_B = (begin - first + at_Q) * step
        rows_B = tl.maximum(tl.minimum(number - start_B, BLOCK_P), 0)
        at_B, inside_B = blocks + 3 * (begin + at_Q), begin + at_Q < end
        tl.store(at_B, at_Q * 0 + key, mask=inside_B)
        tl.store(at_B + 1, before + start_B, mask=inside_B)
        tl.store(at_B + 2, tl.where(start_B % BLOCK_P == 0, rows_B, 0), mask=inside_B)
    place = before
    for begin in range(0, count if number > 0 else 0, STEP):
        row_Q = begin + at_Q
        mine_Q = (_key_of(keys, ids, row_Q, row_Q < count, E, K) == key) & (row_Q < count)
        tl.store(order + place + tl.cumsum(mine_Q.to(tl.int32), 0) - 1, row_Q, mask=mine_Q)
        place += tl.sum(mine_Q.to(tl.int32), 0)


@triton.jit
def rows_of(keys, ids, order, blocks, count, block, E: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr):
    """(the key of a block's rows, which rows, which of them there are, whether there is any).

    Without a table, block i has the rows with the key of row i, if that one is the first.
    """
    row_P = tl.arange(0, BLOCK_P)
    if blocks is not None:
        own = blocks + 3 * block
        key, place, number = tl.load(own), tl.load(own + 1), tl.load(own + 2)
        live_P = row_P < number
        row_P = tl.load(order + place + row_P, mask=live_P, other=0)
        works = number > 0
    else:
        inside_P = row_P < count
        key_P = _key_of(keys, ids, row_P, inside_P, E, K)
        key = tl.max(tl.where(row_P == block, key_P, -1), 0)
        live_P = (key_P == key) & inside_P
        works = tl.min(tl.where(live_P, row_P, BLOCK_P), 0) == block
    return key, row_P, live_P, works
