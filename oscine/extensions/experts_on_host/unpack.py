"""Converts the layout of experts for CPUs (packed.py) to the layout of triton.py, on a GPU."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.extensions.experts_on_host.packed import BLOCK_BYTES, ROWS

BLOCK_WORDS = tl.constexpr(BLOCK_BYTES // 4)


def unpack(packed: Tensor, blocks: Tensor, scales: Tensor) -> None:
    """uint8 [E, packed bytes] -> blocks [E, N, B, 16], as triton.prepare_experts leaves them, and scales [E, N, B]."""
    num_experts, num_rows, num_blocks = scales.shape
    groups = triton.cdiv(num_rows, ROWS)
    unpack_kernel[(num_experts * groups,)](
        packed.view(torch.int32),
        packed,
        blocks.view(torch.int32),
        scales,
        groups,
        num_rows,
        num_blocks,
        BLOCK_B=triton.next_power_of_2(num_blocks),
        num_warps=8,
        enable_fp_fusion=True,
    )


@triton.jit
def unpack_kernel(words, packed_bytes, blocks, scales, groups, num_rows, num_blocks, BLOCK_B: tl.constexpr):
    """One program converts one group of 8 rows."""
    expert, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    block_B, row_8 = tl.arange(0, BLOCK_B), tl.arange(0, 8)
    first = (tl.program_id(0).to(tl.int64) * num_blocks + block_B) * BLOCK_WORDS  # word of each block
    out_8 = expert.to(tl.int64) * num_rows + group * 8 + row_8
    live_8B = (group * 8 + row_8 < num_rows)[:, None] & (block_B < num_blocks)[None, :]
    from_8B = words + first[None, :] + 2 + row_8[:, None]
    p0 = tl.load(from_8B, mask=live_8B)
    p1 = tl.load(from_8B + 8, mask=live_8B)
    p2 = tl.load(from_8B + 16, mask=live_8B)
    p3 = tl.load(from_8B + 24, mask=live_8B)
    even = tl.join(_low(p0, p2), _low(p1, p3))  # values 0-3 and 16-19, 8-11 and 24-27
    odd = tl.join(_high(p0, p2), _high(p1, p3))
    words_8B4 = tl.reshape(tl.join(even, odd), (8, BLOCK_B, 4))
    out_8B = out_8[:, None] * num_blocks + block_B[None, :]
    tl.store(blocks + out_8B[:, :, None] * 4 + tl.arange(0, 4)[None, None, :], words_8B4, mask=live_8B[:, :, None])
    tl.store(scales + out_8B, tl.load(packed_bytes + first[None, :] * 4 + row_8[:, None], mask=live_8B), mask=live_8B)


@triton.jit
def _low(lower, upper):
    return (lower & 0x0F0F0F0F) | ((upper & 0x0F0F0F0F) << 4)


@triton.jit
def _high(lower, upper):
    return ((lower >> 4) & 0x0F0F0F0F) | (upper & 0xF0F0F0F0 - (1 << 32))
