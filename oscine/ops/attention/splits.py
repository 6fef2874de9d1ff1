"""The number of splits (split-KV) of each context in a decode step, computed on the device.

All contexts together are divided into equal parts: one per 32 blocks, but at least MIN_PARTS and at most MAX_PARTS. A
context gets a split for each part of its length, rounded up, but not more than it has blocks, nor more than MAX_SPLITS:

    splits_s = min(ceil(parts * blocks_s / sum of blocks), blocks_s, MAX_SPLITS)

So contexts of equal length have the same number, and a long one among short ones is read by many programs. In total
there are at most S + MAX_PARTS - 1 splits for S contexts: the grid does not depend on lengths, and a captured launch
serves them all. Splits are in the order of their contexts.
"""

import triton
import triton.language as tl

MAX_SPLITS = 32  # of a context: one program adds up their results
_PART_BLOCKS = tl.constexpr(32)
_CHUNK = tl.constexpr(256)  # sequences that are read at once


def max_total_splits(num_sequences: int, max_parts: int) -> int:
    """Upper bound of the splits of all contexts."""
    return num_sequences + max_parts - 1


@triton.jit
def split_of(
    index,
    lens_ptr,
    num_sequences,
    BLOCK_N: tl.constexpr,
    MIN_PARTS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    WINDOW: tl.constexpr = 0,
):
    """(sequence, which of its splits, how many it has) of the index-th split of all. Past the last: 0 splits.

    lens_ptr: int32, tokens of each sequence. A block has BLOCK_N of them. WINDOW: tokens that are read; 0 means all.
    """
    total = 0
    for first in range(0, num_sequences, _CHUNK):
        total += tl.sum(_blocks(lens_ptr, first, num_sequences, BLOCK_N, WINDOW))
    parts = tl.minimum(tl.maximum(total // _PART_BLOCKS, MIN_PARTS), MAX_PARTS)
    before, sequence, start, splits = 0, 0, 0, 0
    for first in range(0, num_sequences, _CHUNK):
        blocks_S = _blocks(lens_ptr, first, num_sequences, BLOCK_N, WINDOW)
        splits_S = tl.minimum(tl.cdiv(blocks_S * parts, total), tl.minimum(blocks_S, MAX_SPLITS))
        end_S = before + tl.cumsum(splits_S)
        mine_S = (end_S > index) & (end_S - splits_S <= index)
        sequence += tl.sum((end_S <= index).to(tl.int32))
        start += tl.sum(tl.where(mine_S, end_S - splits_S, 0))
        splits += tl.sum(tl.where(mine_S, splits_S, 0))
        before += tl.sum(splits_S)
    return sequence, index - start, splits


@triton.jit
def _blocks(lens_ptr, first, num_sequences, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Blocks of the sequences from `first` on: at least 1 of each, 0 past the last."""
    sequence_S = first + tl.arange(0, _CHUNK)
    real_S = sequence_S < num_sequences
    len_S = tl.load(lens_ptr + sequence_S, mask=real_S, other=0)
    if WINDOW:
        len_S = tl.minimum(len_S, WINDOW)
    return tl.where(real_S, tl.maximum(tl.cdiv(len_S, BLOCK_N), 1), 0)
