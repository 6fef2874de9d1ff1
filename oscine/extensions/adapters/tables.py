"""Which rows of a product share the factors of an adapter, or of one of its experts: those with one key. In Triton.

Up to BLOCK_P rows need nothing: a program looks at all keys. Of more rows, a kernel writes once which of them are
together in a block of up to BLOCK_P, so that a CUDA graph serves any mix of adapters.

Shape suffixes: P rows of a block, Q all rows, B blocks.
"""

import triton
import triton.language as tl

from oscine.extensions.adapters.products import Rows
from oscine.ops.launch import let_next_begin, wait
from oscine.ops.target import Target

BLOCK_P = 16
_STEP = 1024  # rows, or blocks, at a time


def with_table(target: Target, rows: Rows, num_slots: int) -> Rows:
    """The same rows, with a table if they do not fit in a block."""
    count, num_keys = rows.count, num_slots * rows.experts
    if count <= BLOCK_P:
        return rows
    most = min(count, count // BLOCK_P + num_keys + 1)
    order_P, blocks_B3 = rows.keys_T.new_empty(count), rows.keys_T.new_empty(1 + most, 3)
    table_kernel[(num_keys + 1,)](
        rows.keys_T,
        rows.ids_P,
        order_P,
        blocks_B3,
        count,
        num_keys,
        most,
        E=rows.experts,
        K=rows.per_token,
        BINS=max(128, triton.next_power_of_2(num_keys + 2)),
        STEP=max(128, min(_STEP, triton.next_power_of_2(count))),
        BLOCK_P=BLOCK_P,
        num_warps=4,
        **target.launch_options,
    )
    return rows._replace(order_P=order_P, blocks_B3=blocks_B3)


@triton.jit
def _key_of(keys, ids, row, live, E: tl.constexpr, K: tl.constexpr):
    """The keys of rows; below 0 where there is no adapter, or no row."""
    key = tl.load(keys + row // K, mask=live, other=-1)
    if ids is not None:
        key = tl.where(key < 0, -1, key * E + tl.load(ids + row, mask=live, other=0).to(tl.int32))
    return key


@triton.jit(do_not_specialize=["count", "num_keys", "most"])
def table_kernel(
    keys,
    ids,
    order,
    blocks,
    count,
    num_keys,
    most,
    E: tl.constexpr,
    K: tl.constexpr,
    BINS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """The fields of Rows. A program writes what concerns its key; the last one, what concerns rows without."""
    wait(PDL)
    let_next_begin(PDL and E > 1)  # else later kernels read the table before they wait
    program = tl.program_id(0)
    bin_N = tl.arange(0, BINS)
    rows_N = tl.zeros((BINS,), tl.int32)
    for begin in range(0, count, STEP):
        row_Q = begin + tl.arange(0, STEP)
        key_Q = _key_of(keys, ids, row_Q, row_Q < count, E, K)
        key_Q = tl.where(row_Q < count, tl.where(key_Q < 0, num_keys, key_Q), num_keys + 1)
        rows_N += tl.histogram(key_Q, BINS)
    rows_N = tl.where(bin_N <= num_keys, rows_N, 0)
    blocks_N = (rows_N + BLOCK_P - 1) // BLOCK_P
    place = tl.sum(tl.where(bin_N < program, rows_N, 0), 0)
    block = tl.sum(tl.where(bin_N < program, blocks_N, 0), 0)
    number = tl.sum(tl.where(bin_N == program, rows_N, 0), 0)
    key = tl.where(program < num_keys, program, -1)
    at_Q = tl.arange(0, STEP)
    for begin in range(0, tl.cdiv(number, BLOCK_P), STEP):
        block_B = begin + at_Q
        at_B, valid_B = blocks + 3 * (1 + block + block_B), block_B * BLOCK_P < number
        tl.store(at_B, block_B * 0 + key, mask=valid_B)
        tl.store(at_B + 1, place + block_B * BLOCK_P, mask=valid_B)
        tl.store(at_B + 2, tl.minimum(number - block_B * BLOCK_P, BLOCK_P), mask=valid_B)
    if program == num_keys:
        used = block + tl.cdiv(number, BLOCK_P)
        tl.store(blocks, used)
        for begin in range(used, most, STEP):
            tl.store(blocks + 3 * (1 + begin + at_Q) + 2, at_Q * 0, mask=begin + at_Q < most)
    if number > 0:
        for begin in range(0, count, STEP):
            row_Q = begin + at_Q
            key_Q = _key_of(keys, ids, row_Q, row_Q < count, E, K)
            mine_Q = (row_Q < count) & (tl.maximum(key_Q, -1) == key)
            tl.store(order + place + tl.cumsum(mine_Q.to(tl.int32), 0) - 1, row_Q, mask=mine_Q)
            place += tl.sum(mine_Q.to(tl.int32), 0)


@triton.jit
def rows_of(keys, ids, order, blocks, pairs, count, block, E: tl.constexpr, K: tl.constexpr, BLOCK_P: tl.constexpr):
    """(the key of a block's rows, which rows, which of them there are, whether there is any).

    Without a table, block i has the rows with the key of row i, if that one is the first. `pairs`: what keys are of.
    """
    row_P = tl.arange(0, BLOCK_P)
    if blocks is not None:
        own = blocks + 3 * (1 + block)
        number = tl.load(own + 2)
        live_P = row_P < number
        key = tl.where(number > 0, tl.load(own), -1)
        row_P = tl.load(order + tl.load(own + 1) + row_P, mask=live_P, other=0)
        works = number > 0
    else:
        inside_P = row_P < count
        pair_P = row_P if pairs is None else tl.load(pairs + row_P, mask=inside_P, other=0)
        key_P = tl.maximum(_key_of(keys, ids, pair_P, inside_P, E, K), -1)
        key = tl.max(tl.where(row_P == block, key_P, -1), 0)
        live_P = (key_P == key) & inside_P
        works = tl.min(tl.where(live_P, row_P, BLOCK_P), 0) == block
    return key, row_P, live_P, works
