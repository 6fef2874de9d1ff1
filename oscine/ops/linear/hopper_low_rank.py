"""What adapters add to a product of few tokens (LowRank), inside the kernel of the product.

Each token's values of rank R meet the rows of its own second factor. Nothing before the step writes factors and keys,
so a kernel reads them before it waits for the one before it.

With one token, the kernel needs no launch before it: each program multiplies its part of the columns with both factors.
Both products are linear, so the parts add up. The price: each program reads a part of the first factor from the L2
cache.

Shape suffixes: N rows of a program, T tokens of a program, R rank, C columns of a program.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.interface import AddedProducts

MAX_TOKENS = 8  # of a tile
MAX_RANK = 16  # more values would take all registers


def joins(added: AddedProducts, max_tokens: int) -> bool:
    """Whether the kernel of a product takes them along, with a tile of so many tokens."""
    return max_tokens <= MAX_TOKENS and added.out_of.shape[-1] <= MAX_RANK


def multiplies_alone(added: AddedProducts, num_tokens: int, columns: int) -> bool:
    """Whether each program, with `columns` columns, can multiply with both factors. Assumes that the kernel `joins`."""
    return num_tokens == 1 and columns & (columns - 1) == 0 and added.into.shape[1] == added.out_of.shape[-1]


@gluon.jit
def row_at(i, first_row, IN_WORDS: gl.constexpr):
    """The row of the matrix at position i of a program. Weights in 12 bits have another order."""
    return first_row + (((i >> 3) & 1) * 32 + (i >> 4) * 8 + (i & 7) if IN_WORDS else i)


@gluon.constexpr_function
def first_layout(columns: int) -> gl.BlockedLayout:
    """Of [R, C] in four warps: a thread has 8 adjacent columns."""
    lanes = min(32, columns // 8)
    warps = max(1, min(4, columns // 256))
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4 // warps, warps], [1, 0])


@gluon.jit
def own_factors(
    keys_ptr,
    first_ptr,
    second_ptr,
    first_row,
    num_rows,
    first_column,
    num_columns,
    first_stride,
    second_stride,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    RANK: gl.constexpr,
    IN_WORDS: gl.constexpr,
):
    """Both factors of the only token, [R, C] and [N, R]; zeros if it has no adapter. Strides: of slots.

    IN_WORDS: the kernel's weights have 12 bits and take many registers, so the first factor goes to shared memory.
    """
    first: gl.constexpr = first_layout(COLUMNS)
    second: gl.constexpr = gl.BlockedLayout([1, RANK], [32, 1], [gl.num_warps(), 1], [1, 0])
    key = gl.load(keys_ptr)
    slot = gl.maximum(key, 0).to(gl.int64)
    rank_R = gl.arange(0, RANK, gl.SliceLayout(1, first))
    column_C = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, first))
    at_RC = slot * first_stride + rank_R[:, None] * num_columns + column_C[None, :]
    wanted_RC = ((column_C < num_columns) & (key >= 0))[None, :] & (rank_R >= 0)[:, None]
    first_RC = gl.load(first_ptr + at_RC, wanted_RC, other=0.0)
    row_N = row_at(gl.arange(0, ROWS, gl.SliceLayout(1, second)), first_row, IN_WORDS)
    rank_R = gl.arange(0, RANK, gl.SliceLayout(0, second))
    at_NR = slot * second_stride + row_N[:, None] * RANK + rank_R[None, :]
    wanted_NR = ((row_N < num_rows) & (key >= 0))[:, None] & (rank_R >= 0)[None, :]
    second_NR = gl.load(second_ptr + at_NR, wanted_NR, other=0.0)
    if IN_WORDS:
        flat: gl.constexpr = gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0])
        first_factor = gl.allocate_shared_memory(first_RC.dtype, [RANK, COLUMNS], flat)
        first_factor.store(first_RC)
    else:
        first_factor = first_RC
    return first_factor, second_NR


@gluon.jit
def own_columns(x_ptr, first_column, num_columns, COLUMNS: gl.constexpr):
    """[C] of the only token."""
    column_C = first_column + gl.arange(0, COLUMNS, gl.SliceLayout(0, first_layout(COLUMNS)))
    return gl.load(x_ptr + column_C, column_C < num_columns, other=0.0)


@gluon.jit
def own_sums(x_C, first_factor, second_NR, layout: gl.constexpr, IN_WORDS: gl.constexpr):
    """[N] float32 of `layout`: what the columns of this program add to its rows."""
    first_RC = first_factor.load(first_layout(first_factor.shape[1])) if IN_WORDS else first_factor
    y_R = gl.sum(first_RC.to(gl.float32) * x_C.to(gl.float32)[None, :], 1)
    y_R = gl.convert_layout(y_R, gl.SliceLayout(0, second_NR.type.layout))
    return gl.convert_layout(gl.sum(second_NR.to(gl.float32) * y_R[None, :], 1), layout)


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
