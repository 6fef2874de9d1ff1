"""Quantisation to MXFP4 and back. oscine.ops.moe.mxfp4 describes the format and expands it."""

import torch
from torch import Tensor

from oscine.ops.moe.mxfp4 import BLOCK, MAGNITUDES, dequantize

__all__ = ["dequantize", "quantize"]

LARGEST_EXPONENT = 2  # of E2M1: 4 and 6 are 2^2 times 1 and 1.5


def quantize(values: Tensor) -> tuple[Tensor, Tensor]:
    """Finite floats [..., K], K a multiple of 32 -> uint8 blocks [..., K / 32, 16] and scales [..., K / 32].

    OCP Microscaling Formats v1.0, section 6.3: the scale is 2^(floor(log2(max |v|)) - 2), values round to nearest,
    ties to even, and saturate at 6 scales. Values that MXFP4 holds exactly come back from dequantize unchanged.
    """
    assert values.shape[-1] % BLOCK == 0
    grouped = values.float().reshape(*values.shape[:-1], values.shape[-1] // BLOCK, BLOCK)
    exponents = grouped.abs().amax(-1).frexp().exponent - 1 - LARGEST_EXPONENT
    scales = (exponents + 127).clamp(0, 254)
    nibbles = _nearest(torch.ldexp(grouped, 127 - scales[..., None]))
    blocks = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    return blocks, scales.to(torch.uint8)


def _nearest(scaled: Tensor) -> Tensor:
    """The E2M1 nibble of each value, uint8. A midpoint belongs to the neighbour with an even index."""
    magnitudes = torch.tensor(MAGNITUDES, device=scaled.device)
    midpoints = (magnitudes[1:] + magnitudes[:-1]) / 2
    size = scaled.abs().contiguous()
    below, above = torch.bucketize(size, midpoints), torch.bucketize(size, midpoints, right=True)
    index = torch.where(below % 2 == 0, below, above)
    return (index + 8 * scaled.signbit()).to(torch.uint8)
