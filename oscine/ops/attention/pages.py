"""Addresses of a sequence's keys in the paged cache, shared by the attention kernels.

N is the number of keys of a block.
"""

import triton
import triton.language as tl


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
    """Element offsets of the keys first + index of one head and layer, and which of them come before end.

    index: 0 .. N - 1 in any shape. table_ptr: this sequence's row of page ids. ALIGNED promises that the block lies in
    one page (first is a multiple of N, and PAGE too), which is then given instead of one lookup per key.
    """
    inside = first + index < end
    if ALIGNED:
        rows = page.to(tl.int64) * stride_page + (first % PAGE + index) * HEAD_DIM
    else:
        pages = tl.load(table_ptr + (first + index) // PAGE, mask=inside, other=0).to(tl.int64)
        rows = pages * stride_page + ((first + index) % PAGE) * HEAD_DIM
    return rows, inside
