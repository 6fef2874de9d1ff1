"""The layout of experts for CPUs (../native/products.c), for code that converts it for GPUs.

A block of 8 rows x 32 columns is 136 bytes: 8 scales, then words of four bytes [4 (p), 8 (row)]. Byte c of a word has
column 8p + c in its low nibble and column 8p + 4 + c in its high nibble.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oscine.ops.moe.mxfp4 import BLOCK

ROWS = 8
BLOCK_BYTES = ROWS * (1 + BLOCK // 2)


@dataclass(frozen=True, slots=True)
class HostMatrix:
    """The weights of one product, of all experts."""

    packed: Tensor  # uint8 [E, bytes] in host memory
    bias: Tensor  # [E, N], on the device that computes the steps
    num_blocks: int  # blocks of 32 columns per row

    @property
    def num_scales(self) -> int:
        return self.bias.numel() * self.num_blocks


def published(matrix: HostMatrix) -> tuple[Tensor, Tensor]:
    """Converts back to the published layout: blocks uint8 [E, N, B, 16] and scales [E, N, B]."""
    num_experts, num_rows = matrix.bias.shape
    of_blocks = matrix.packed.view(num_experts, -(-num_rows // ROWS), matrix.num_blocks, BLOCK_BYTES)
    scales = of_blocks[..., :ROWS].transpose(2, 3).flatten(1, 2)[:, :num_rows]
    nibbles = (
        of_blocks[..., ROWS:].view(*of_blocks.shape[:-1], 4, ROWS, 4).permute(0, 1, 4, 2, 3, 5)
    )  # [E, group, row, B, p, c]
    columns = torch.stack((nibbles & 15, nibbles >> 4), -2).flatten(4).flatten(1, 2)[:, :num_rows]
    return columns[..., 0::2] | columns[..., 1::2] << 4, scales.contiguous()
