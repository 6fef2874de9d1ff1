"""Logits of int8 weights on Hopper, in Gluon: half the bytes of the head, exact in what is multiplied.

Each row of weights has a scale, and so has each token. A token is two int8 planes: x = scale (128 high + low). The
planes are adjacent columns of the tensor cores' operand, whose sums are integers.

hopper.py bounds the error of the logits, and uses them.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.linear.hopper_stream import CHUNK_BYTES, Tile, descriptor, start_ring

# From the fewest tokens up; a token is two columns of the operand. Measured on an NVIDIA H200.
TILES = (
    Tile(max_tokens=8, stages=5),
    Tile(max_tokens=16, stages=4),
    Tile(max_tokens=32, rows=128, chunks=1, stages=4, warps=8),
    Tile(max_tokens=64, rows=128, chunks=1, stages=3, warps=8),
)


@gluon.jit(do_not_specialize=["num_tokens"])
def screen_kernel(
    weight,
    planes,
    row_scale_ptr,
    token_scale_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
):
    """out[token, row], float32."""
    first_row = gl.program_id(0) * ROWS
    zero = gl.to_tensor(0)
    ring = start_ring(weight, planes, zero, first_row, zero, zero, ROWS, 2 * TOKENS, CHUNKS, STAGES, STEPS)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * TOKENS, 32])
    ring.depend()
    sums = gl.permute(gl.reshape(ring.multiply(layout), [ROWS, 2, TOKENS]), [0, 2, 1])
    high, low = gl.split(sums)
    values = high.to(gl.float32) * 128.0 + low.to(gl.float32)
    row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
    token = gl.arange(0, TOKENS, gl.SliceLayout(0, values.type.layout))
    row_scale = gl.load(row_scale_ptr + row, row < num_rows, other=0.0)
    token_scale = gl.load(token_scale_ptr + token, token < num_tokens, other=0.0)
    inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
    at = token.to(gl.int64)[None, :] * num_rows + row[:, None]
    gl.store(out_ptr + at, values * row_scale[:, None] * token_scale[None, :], inside)


def logits(planes_2NH: Tensor, token_scale_N: Tensor, codes_VH: Tensor, row_scale_V: Tensor, tile: Tile) -> Tensor:
    """[N, V] float32; int8 planes and codes of rows that are multiples of 16 bytes, N <= tile.max_tokens."""
    _, num_tokens, num_columns = planes_2NH.shape
    num_rows = len(codes_VH)
    out_NV = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=codes_VH.device)
    screen_kernel[(-(-num_rows // tile.rows),)](
        descriptor(codes_VH[None, None], [1, 1, tile.rows, CHUNK_BYTES]),
        descriptor(planes_2NH, [2, tile.max_tokens, CHUNK_BYTES]),
        row_scale_V,
        token_scale_N,
        out_NV,
        num_rows,
        num_tokens,
        ROWS=tile.rows,
        **tile.constants(num_columns, CHUNK_BYTES),
        num_warps=tile.warps,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return out_NV
