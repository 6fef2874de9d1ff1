"""How many programs share each of several contexts that are decoded at once, in Triton.

All contexts together are cut into PARTS, and a context has as many splits as it has begun parts, but no more than it
has blocks, nor than MOST:

    splits_s = min(ceil(PARTS * blocks_s / sum of blocks), blocks_s, MOST)

So contexts of one length have the same number, a long one among short ones is read by many programs, and together
there are fewer than PARTS more than contexts, whatever the lengths are: a captured launch serves them all. Splits are
in the order of their contexts.
"""

import triton
import triton.language as tl

MAX_SPLITS = 32  # of a context: one program adds up their results
_AT_ONCE = tl.constexpr(256)  # sequences


def most_splits(num_sequences: int, parts: int) -> int:
    """Of all contexts."""
    return num_sequences + parts - 1


@triton.jit
def split_of(index, lens_ptr, num_sequences, BLOCK_N: tl.constexpr, PARTS: tl.constexpr, MOST: tl.constexpr):
    """(sequence, which of its splits, how many it has) of the index-th split of all. Past the last: 0 splits.

    lens: int32, tokens of each sequence.
    """
    total = 0
    for first in range(0, num_sequences, _AT_ONCE):
        total += tl.sum(_blocks(lens_ptr, first, num_sequences, BLOCK_N))
    before, sequence, start, splits = 0, 0, 0, 0
    for first in range(0, num_sequences, _AT_ONCE):
        blocks_S = _blocks(lens_ptr, first, num_sequences, BLOCK_N)
        splits_S = tl.minimum(tl.cdiv(blocks_S * PARTS, total), tl.minimum(blocks_S, MOST))
        end_S = before + tl.cumsum(splits_S)
        mine_S = (end_S > index) & (end_S - splits_S <= index)
        sequence += tl.sum((end_S <= index).to(tl.int32))
        start += tl.sum(tl.where(mine_S, end_S - splits_S, 0))
        splits += tl.sum(tl.where(mine_S, splits_S, 0))
        before += tl.sum(splits_S)
    return sequence, index - start, splits


@triton.jit
def _blocks(lens_ptr, first, num_sequences, BLOCK_N: tl.constexpr):
    """Of some sequences: one at least of each, none of those past the last."""
    sequence_S = first + tl.arange(0, _AT_ONCE)
    real_S = sequence_S < num_sequences
    len_S = tl.load(lens_ptr + sequence_S, mask=real_S, other=0)
    return tl.where(real_S, tl.maximum(tl.cdiv(len_S, BLOCK_N), 1), 0)
