"""The MXFP4 format (OCP Microscaling Formats v1.0): packed tensors to float32.

Blocks of 32 values share the E8M0 scale 2^(s - 127); 16 bytes hold them, the low nibble is the even value. A nibble
is E2M1: a sign bit above an index into 0, 0.5, 1, 1.5, 2, 3, 4, 6. Scale 255 is NaN.
"""

import functools

import torch
from torch import Tensor

BLOCK = 32  # values that share one scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """uint8 blocks [..., K / 32, 16] and scales [..., K / 32] -> float32 [..., K].

    One lookup turns a byte into two float32 values, moved as one 8-byte element: four times quicker than to index
    nibble by nibble.
    """
    pairs, powers = _tables(blocks.device)
    values = pairs.index_select(0, blocks.flatten().int()).view(torch.float32).view(*scales.shape, BLOCK)
    values.mul_(powers.index_select(0, scales.flatten().int()).view(*scales.shape, 1))
    return values.flatten(-2)


@functools.cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """The two values of each byte as one int64 [256], and the power of two of each scale, float32 [256]."""
    magnitudes = torch.tensor(MAGNITUDES)
    nibbles = torch.cat((magnitudes, -magnitudes))
    byte = torch.arange(256)
    pairs = torch.stack((nibbles[byte & 15], nibbles[byte >> 4]), dim=-1).view(torch.int64).squeeze(-1)
    powers = torch.ldexp(torch.ones(256), torch.arange(256) - 127)
    powers[255] = torch.nan
    return pairs.to(device), powers.to(device)
