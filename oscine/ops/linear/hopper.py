"""The projection out of attention and the head on Hopper: few tokens by streaming the weights, many by cuBLAS.

Up to 64 tokens, memory bandwidth bounds both: they read the weights. out_proj then splits its sums over J programs, so
that every SM has a share of the few rows. The next norm adds them up. Up to 32 tokens its weights may have 12 bits
(hopper_bf12.py).

Shape suffixes: T or N tokens, J partial sums, F rows of the weight matrix.
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.interface import AddedProducts, LowRank, Shapes, Use
from oscine.ops.linear import reference
from oscine.ops.linear import triton as portable
from oscine.ops.linear.hopper_bf12 import Bf12Matrix, dense_of, pack
from oscine.ops.linear.hopper_bf12_stream import start_words, word_descriptor
from oscine.ops.linear.hopper_low_rank import (
    joins,
    low_rank_sums,
    multiplies_alone,
    own_columns,
    own_factors,
    own_sums,
    row_at,
    second_factors,
)
from oscine.ops.linear.hopper_stream import CHUNK, Tile, descriptor, start_ring, streamable, tile_for, unstreamable

prepare_dense = reference.prepare_dense

# From the fewest tokens up. Rings of half an SM's shared memory let the next kernel's weights come in beside them.
LM_HEAD_TILES = (
    Tile(max_tokens=8, stages=5),
    Tile(max_tokens=16, stages=5),
    Tile(max_tokens=32, stages=4),
    Tile(max_tokens=64, stages=3),
)
OUT_PROJ_TILES = tuple(replace(tile, parts=4) for tile in LM_HEAD_TILES)
# The same of weights in 12 bits. With more tokens those in bfloat16 are as fast or faster.
OUT_PROJ_BF12_TILES = (
    Tile(max_tokens=8, parts=8, stages=4, early=4),
    Tile(max_tokens=16, parts=8, stages=4),
    Tile(max_tokens=32, parts=8, stages=3, early=1),
)


@gluon.jit(do_not_specialize=["num_tokens"])
def stream_kernel(
    weight,
    tokens,
    scale_ptr,
    bias_ptr,
    out_ptr,
    keys_ptr,
    low_ptr,
    second_ptr,
    first_ptr,
    x_ptr,
    num_rows,
    num_tokens,
    num_columns,
    slot_stride,
    first_stride,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLITS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    EARLY: gl.constexpr,
    RANK: gl.constexpr,
    LOW_SPLITS: gl.constexpr,
):
    """out[token, split, row], float32, = bias[row] in split 0 + the sum over the split's share of columns.

    RANK above 0: adapters add to it. With `low_ptr` one more split holds that (LowRank); with `first_ptr` each split
    adds its own share.
    """
    split = gl.program_id(1)
    first_row = gl.program_id(0) * ROWS
    if LOW_SPLITS and split == SPLITS - 1:
        _add_low_rank(
            out_ptr, keys_ptr, low_ptr, second_ptr, first_row, num_rows, num_tokens, slot_stride,
            ROWS, TOKENS, SPLITS, RANK, LOW_SPLITS,
        )  # fmt: skip
        return
    COLUMNS: gl.constexpr = STEPS * CHUNKS * 64
    first_column = split * COLUMNS
    zero = gl.to_tensor(0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, layout)
    row = row_at(gl.arange(0, ROWS, row_layout), first_row, scale_ptr is not None)
    if scale_ptr is None:
        ring = start_ring(weight, tokens, zero, first_row, zero, first_column, ROWS, TOKENS, CHUNKS, STAGES, STEPS)
    else:
        words = start_words(weight, tokens, first_row // 16, first_column, TOKENS, CHUNKS, STAGES, STEPS, EARLY)
        scale = gl.load(scale_ptr + row)
    if first_ptr is not None:
        first, second = own_factors(
            keys_ptr, first_ptr, second_ptr, first_row, num_rows, first_column, num_columns, first_stride, slot_stride,
            ROWS, COLUMNS, RANK, scale_ptr is not None,
        )  # fmt: skip
    if scale_ptr is None:
        ring.depend()
    else:
        operands = words.depend(layout)
    if first_ptr is not None:
        x = own_columns(x_ptr, first_column, num_columns, COLUMNS)
    if HAS_BIAS:
        bias = gl.load(bias_ptr + row, (row < num_rows) & (split == 0), other=0.0).to(gl.float32)
    sums = ring.multiply(layout) if scale_ptr is None else words.multiply(operands, layout) * scale[:, None]
    if HAS_BIAS:
        sums += bias[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    if first_ptr is not None:
        added = own_sums(x, first, second, row_layout, scale_ptr is not None)
        sums += gl.where((token == 0)[None, :], added[:, None], 0.0)
    at = (token.to(gl.int64) * SPLITS + split) * num_rows
    inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    gl.store(out_ptr + at[None, :] + row[:, None], sums, inside)


@gluon.jit
def _add_low_rank(
    out_ptr,
    keys_ptr,
    low_ptr,
    second_ptr,
    first_row,
    num_rows,
    num_tokens,
    slot_stride,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLITS: gl.constexpr,
    RANK: gl.constexpr,
    LOW_SPLITS: gl.constexpr,
):
    """The last split."""
    gdc_launch_dependents()
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [256 // RANK, 1, RANK // 8], [gl.num_warps(), 1, 1], [2, 1, 0])
    row_N = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    token_T = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    factors = second_factors(keys_ptr, second_ptr, token_T, num_tokens, row_N, num_rows, slot_stride, RANK, layout)
    gdc_wait()
    sums = low_rank_sums(keys_ptr, low_ptr, factors, num_tokens, 0, 1, LOW_SPLITS, layout)
    at = (token_T.to(gl.int64) * SPLITS + SPLITS - 1) * num_rows
    inside = (row_N < num_rows)[:, None] & (token_T < num_tokens)[None, :]
    gl.store(out_ptr + at[None, :] + row_N[:, None], sums, inside)


def stream(
    x: Tensor,
    weight: Tensor | Bf12Matrix,
    bias: Tensor | None,
    tile: Tile,
    low: LowRank | None = None,
    own: AddedProducts | None = None,
) -> Tensor:
    """[T, J, F] float32; J is the tile's parts, and one for `low`. Needs T <= max_tokens and `streamable` inputs.

    own: what adapters add to the only token, if the kernel multiplies with both factors.
    """
    num_tokens, num_columns = x.shape
    num_rows, splits = weight.shape[0], tile.parts + (low is not None)
    out = torch.empty(num_tokens, splits, num_rows, dtype=torch.float32, device=x.device)
    keys_T, y_STR, second = (None, None, None) if low is None else low
    first = None if own is None else own.into
    if own is not None:
        keys_T, second = own.keys_T, own.out_of
    if isinstance(weight, Bf12Matrix):
        boxes, scale_F = word_descriptor(weight, 1, tile.chunks), weight.scale_F
    else:
        boxes, scale_F = descriptor(weight[None, None], [1, 1, tile.rows, CHUNK]), None
    stream_kernel[(-(-num_rows // tile.rows), splits)](
        boxes,
        descriptor(x[None], [1, tile.max_tokens, CHUNK]),
        scale_F,
        out if bias is None else bias,
        out,
        keys_T,
        y_STR,
        second,
        first,
        None if first is None else x,
        num_rows,
        num_tokens,
        num_columns,
        0 if second is None else second.stride(0),
        0 if first is None else first.stride(0),
        ROWS=tile.rows,
        SPLITS=splits,
        **tile.projection_constants(-(-num_columns // tile.parts)),
        HAS_BIAS=bias is not None,
        RANK=0 if second is None else second.shape[-1],
        LOW_SPLITS=0 if y_STR is None else len(y_STR),
        num_warps=tile.warps,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return out


def prepare_projection(weight: Tensor, dtype: torch.dtype) -> Tensor | Bf12Matrix:
    """The matrix in `dtype`. In bfloat16 it has a copy in 12 bits beside it, if its shape and values allow (pack)."""
    dense = reference.prepare_dense(weight, dtype)
    return pack(dense) if dtype == torch.bfloat16 else dense


def choose_tile(tiles: tuple[Tile, ...], x: Tensor, weight: Tensor) -> Tile | None:
    """None: cuBLAS, since there are more tokens than tiles take, or none, or TMA cannot read the inputs."""
    if not len(x) or not streamable(x, weight):
        return None
    return tile_for(len(x), tiles)


def out_proj_use(shapes: Shapes) -> Use:
    columns = shapes.query_heads * shapes.head_dim
    return Use(f"up to {OUT_PROJ_TILES[-1].max_tokens} tokens", "triton", unstreamable(columns, shapes.dtype))


def lm_head_use(shapes: Shapes) -> Use:
    return Use(f"up to {LM_HEAD_TILES[-1].max_tokens} rows", "triton", unstreamable(shapes.hidden, shapes.dtype))


def out_proj(x: Tensor, weight: Tensor | Bf12Matrix, bias_H: Tensor, added: AddedProducts | None = None) -> Tensor:
    """[T, Q * D] x [H, Q * D] -> partial sums [T, J, H], float32; [T, H] in x's dtype where cuBLAS is better."""
    dense, tile = dense_of(weight), None
    if isinstance(weight, Bf12Matrix):
        tile = choose_tile(OUT_PROJ_BF12_TILES, x, dense)
    if tile is None:
        weight, tile = dense, choose_tile(OUT_PROJ_TILES, x, dense)
    if tile is None:
        return reference.out_proj(x, dense, bias_H, added)
    if added is None:
        return stream(x, weight, bias_H, tile)
    if joins(added, tile.max_tokens):
        if multiplies_alone(added, len(x), tile.part_columns(x.shape[1])):
            return stream(x, weight, bias_H, tile, own=added)
        return stream(x, weight, bias_H, tile, added.shrink(x))
    y = stream(x, weight, bias_H, tile)
    added.add(x, y)
    return y


def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """[N, H] x [V, H] -> logits [N, V], float32."""
    tile = choose_tile(LM_HEAD_TILES, x_NH, weight_VH)
    return portable.lm_head(x_NH, weight_VH) if tile is None else stream(x_NH, weight_VH, None, tile)[:, 0]
