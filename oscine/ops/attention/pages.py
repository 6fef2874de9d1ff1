"""Addresses of a sequence's keys in the paged cache, shared by the attention kernels.

In FP8 (ops/kv/fp8.py) the scales of keys and values are powers of two. They are not multiplied with the elements but,
without a rounding of their own, with scores and probabilities, which are fewer. Their loads are too small for
asynchronous copies, so kernels load them one block ahead of their use.

N is the number of keys of a block.
"""

import triton
import triton.language as tl

from oscine.ops.kv.triton import power_of_two


@triton.jit
def page_of(table_ptr, key, end, PAGE: tl.constexpr, ALIGNED: tl.constexpr):
    """The page of this key, read a block ahead of its use; 0 where unused: past the end, or blocks not ALIGNED."""
    page = 0
    if ALIGNED:
        page = tl.load(table_ptr + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def key_rows(
    table_ptr, page, first, index, end, stride_page, PAGE: tl.constexpr, ALIGNED: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """Element offsets of the keys first + index of one head and layer, of their scales in FP8, and which of them come
    before end.

    index: 0 .. N - 1 in any shape. table_ptr: this sequence's row of page ids. ALIGNED promises that the block lies in
    one page (first is a multiple of N, and PAGE too), which is then given instead of one lookup per key.
    """
    inside = first + index < end
    if ALIGNED:
        start = page.to(tl.int64) * stride_page
        place = first % PAGE + index
    else:
        start = tl.load(table_ptr + (first + index) // PAGE, mask=inside, other=0).to(tl.int64) * stride_page
        place = (first + index) % PAGE
    return start + place * HEAD_DIM, start + PAGE * HEAD_DIM + place, inside


@triton.jit
def scales_of(
    key_ptr,
    value_ptr,
    table_ptr,
    page,
    first,
    index,
    end,
    stride_page,
    PAGE: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The scales of the keys first + index, and of their values; of no use from `end` on. Arguments as of key_rows."""
    _, offsets, _ = key_rows(table_ptr, page, first, index, end, stride_page, PAGE, ALIGNED, HEAD_DIM)
    return power_of_two(tl.load(key_ptr + offsets)), power_of_two(tl.load(value_ptr + offsets))
