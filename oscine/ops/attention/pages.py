"""Where the keys of a sequence lie in the paged cache: addressing shared by the attention kernels.

Knows page tables and strides; nothing of scores.

Shape suffixes: N keys of a block.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

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
    table_ptr,
    page,
    first,
    end,
    stride_page,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ALIGNED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Element offsets [N] of keys first .. first + N - 1 of one head and layer, and which of them come before end.

    table_ptr: this sequence's row of page ids. ALIGNED promises that the block lies in one page (first is a multiple
    of BLOCK_N, and PAGE too), which is then given instead of one lookup a key.
    """
    key_N = first + tl.arange(0, BLOCK_N)
    inside_N = key_N < end
    if ALIGNED:
        rows_N = page.to(tl.int64) * stride_page + (first % PAGE + tl.arange(0, BLOCK_N)) * HEAD_DIM
    else:
        page_N = tl.load(table_ptr + key_N // PAGE, mask=inside_N, other=0).to(tl.int64)
        rows_N = page_N * stride_page + (key_N % PAGE) * HEAD_DIM
    return rows_N, inside_N
