"""What adapters add to a product of few tokens (LowRank), inside the kernel of the product.

Each token's values of rank R meet the rows of its own second factor. Nothing before the step writes factors and keys,
so a kernel reads them before it waits for the one before it.

Shape suffixes: N rows of a program, T tokens of a program, R rank.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.interface import AddedProducts

MAX_TOKENS = 8  # of a tile
MAX_RANK = 16  # more values would take all registers


def joins(added: AddedProducts, max_tokens: int) -> bool:
    """Whether the kernel of a product takes them along, with a tile of so many tokens."""
    return max_tokens <= MAX_TOKENS and added.out_of.shape[-1] <= MAX_RANK


@gluon.jit
def second_factors(
    keys_ptr,
    second_ptr,
    token_T,
    num_tokens,
    row_N,
    num_rows,
    slot_stride,
    RANK: gl.constexpr,
    layout: gl.constexpr,
):
    """[N, T, R] of `layout`; zeros for tokens without an adapter."""
    rank_R = gl.arange(0, RANK, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    key_T = gl.load(keys_ptr + token_T, token_T < num_tokens, other=-1)
    at_NT = gl.maximum(key_T, 0).to(gl.int64)[None, :] * slot_stride + row_N[:, None] * RANK
    wanted_NT = (key_T >= 0)[None, :] & (row_N < num_rows)[:, None]
    at_NTR = at_NT[:, :, None] + rank_R[None, None, :]
    return gl.load(second_ptr + at_NTR, wanted_NT[:, :, None] & (rank_R >= 0)[None, None, :], other=0.0)


@gluon.jit
def low_rank_sums(
    keys_ptr,
    low_ptr,
    factors_NTR,
    num_tokens,
    segment,
    SEGMENTS: gl.constexpr,
    SPLITS: gl.constexpr,
    layout: gl.constexpr,
):
    """[N, T] float32: the factors times those values of a segment, which the kernel before wrote."""
    TOKENS: gl.constexpr = factors_NTR.shape[1]
    RANK: gl.constexpr = factors_NTR.shape[2]
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(1, gl.SliceLayout(0, layout)))
    rank_R = gl.arange(0, RANK, gl.SliceLayout(0, gl.SliceLayout(0, layout)))
    has_T = gl.load(keys_ptr + token_T, token_T < num_tokens, other=-1) >= 0
    at_TR = (token_T[:, None] * SEGMENTS + segment) * RANK + rank_R[None, :]
    valid_TR = has_T[:, None] & (rank_R >= 0)[None, :]
    y_TR = gl.zeros([TOKENS, RANK], gl.float32, gl.SliceLayout(0, layout))
    for split in gl.static_range(SPLITS):
        y_TR += gl.load(low_ptr + split * num_tokens * (SEGMENTS * RANK) + at_TR, valid_TR, other=0.0)
    return gl.sum(factors_NTR.to(gl.float32) * y_TR[None, :, :], 2)
