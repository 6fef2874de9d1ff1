"""The projection out of attention and the head on Hopper: few tokens by streaming the weights, many by cuBLAS.

Both are bound by the weights' way from memory up to 64 tokens. out_proj then splits its sums over J programs, so that
every SM has a share of the few rows; the next norm adds them up.

Shape suffixes: T or N tokens, J partial sums, F rows of the weight matrix.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.interface import Shapes, Use
from oscine.ops.linear import triton as portable
from oscine.ops.linear.stream import CHUNK, descriptor, start_ring, streamable, unstreamable


@dataclass(frozen=True, slots=True)
class LinearTile:
    """How a product is cut."""

    max_tokens: int  # columns of the tensor cores' operand: 8, 16, 32, ...
    rows: int  # weight rows of a program, 64 or more
    splits: int  # of the sum
    chunks: int  # of 64 columns a stage
    stages: int  # at most; under way in each program
    warps: int  # 4 for each 64 or 128 rows


# From the fewest tokens up. Rings of half an SM's shared memory let the next kernel's weights come in beside them.
OUT_PROJ_TILES = (
    LinearTile(max_tokens=8, rows=64, splits=4, chunks=2, stages=5, warps=4),
    LinearTile(max_tokens=16, rows=64, splits=4, chunks=2, stages=5, warps=4),
    LinearTile(max_tokens=32, rows=64, splits=4, chunks=2, stages=4, warps=4),
    LinearTile(max_tokens=64, rows=64, splits=4, chunks=2, stages=3, warps=4),
)
LM_HEAD_TILES = (
    LinearTile(max_tokens=8, rows=64, splits=1, chunks=2, stages=5, warps=4),
    LinearTile(max_tokens=16, rows=64, splits=1, chunks=2, stages=5, warps=4),
    LinearTile(max_tokens=32, rows=64, splits=1, chunks=2, stages=4, warps=4),
    LinearTile(max_tokens=64, rows=64, splits=1, chunks=2, stages=3, warps=4),
)


@gluon.jit
def stream_kernel(
    weight,
    tokens,
    bias_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    SPLITS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):
    """out[token, split, row], float32, = bias[row] in split 0 + the sum over the split's share of columns."""
    split = gl.program_id(1)
    first_row = gl.program_id(0) * ROWS
    zero = gl.to_tensor(0)
    ring = start_ring(
        weight, tokens, zero, first_row, zero, split * (STEPS * CHUNKS * 64), ROWS, TOKENS, CHUNKS, STAGES, STEPS
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, TOKENS, 16])
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    ring.depend()
    if HAS_BIAS:
        bias = gl.load(bias_ptr + row, (row < num_rows) & (split == 0), other=0.0).to(gl.float32)
    sums = ring.multiply(layout)
    if HAS_BIAS:
        sums += bias[:, None]
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, layout))
    at = (token.to(gl.int64) * SPLITS + split) * num_rows
    inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    gl.store(out_ptr + at[None, :] + row[:, None], sums, inside)


def stream(x: Tensor, weight: Tensor, bias: Tensor | None, tile: LinearTile) -> Tensor:
    """[T, J, F] float32; J is the tile's splits. Needs T <= max_tokens and `streamable` inputs."""
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    steps = -(-num_columns // (CHUNK * tile.chunks * tile.splits))
    out = torch.empty(num_tokens, tile.splits, num_rows, dtype=torch.float32, device=x.device)
    stream_kernel[(-(-num_rows // tile.rows), tile.splits)](
        descriptor(weight[None, None], [1, 1, tile.rows, CHUNK]),
        descriptor(x[None], [1, tile.max_tokens, CHUNK]),
        weight if bias is None else bias,
        out,
        num_rows,
        num_tokens,
        ROWS=tile.rows,
        TOKENS=tile.max_tokens,
        SPLITS=tile.splits,
        CHUNKS=tile.chunks,
        STAGES=min(tile.stages, steps),
        STEPS=steps,
        HAS_BIAS=bias is not None,
        num_warps=tile.warps,
        launch_pdl=True,
    )
    return out


def choose_tile(tiles: tuple[LinearTile, ...], x: Tensor, weight: Tensor) -> LinearTile | None:
    """None: cuBLAS, since there are more tokens than tiles take, or none, or TMA cannot read the inputs."""
    if not len(x) or not streamable(x, weight):
        return None
    return next((tile for tile in tiles if len(x) <= tile.max_tokens), None)


def out_proj_use(shapes: Shapes) -> Use:
    columns = shapes.query_heads * shapes.head_dim
    return Use(f"up to {OUT_PROJ_TILES[-1].max_tokens} tokens", "triton", unstreamable(columns, shapes.dtype))


def lm_head_use(shapes: Shapes) -> Use:
    return Use(f"up to {LM_HEAD_TILES[-1].max_tokens} rows", "triton", unstreamable(shapes.hidden, shapes.dtype))


def out_proj(x: Tensor, weight: Tensor, bias_H: Tensor) -> Tensor:
    """[T, Q * D] x [H, Q * D] -> partial sums [T, J, H], float32; [T, H] in x's dtype where cuBLAS is better."""
    tile = choose_tile(OUT_PROJ_TILES, x, weight)
    return portable.out_proj(x, weight, bias_H) if tile is None else stream(x, weight, bias_H, tile)


def lm_head(x_NH: Tensor, weight_VH: Tensor) -> Tensor:
    """[N, H] x [V, H] -> logits [N, V], float32."""
    tile = choose_tile(LM_HEAD_TILES, x_NH, weight_VH)
    return portable.lm_head(x_NH, weight_VH) if tile is None else stream(x_NH, weight_VH, None, tile)[:, 0]
