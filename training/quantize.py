"""MXFP4 as the published checkpoints store it: rounding for training, and the same rounding as bytes for export.

32 values along the last axis share the scale 2^(s - 127); a value is E2M1: 0 .5 1 1.5 2 3 4 6 and their negatives.
"""

import torch
from torch import Tensor

BLOCK = 32
_BIAS = 127  # of the E8M0 scale


def fake_quantize(weight: Tensor) -> Tensor:
    """The nearest MXFP4 values, same shape and dtype float32; gradients pass straight through."""
    codes, exponents = _round(weight.detach())
    return weight + (_values(codes, exponents).view_as(weight) - weight.detach())


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[..., K] float32 -> blocks uint8 [..., K/32, 16] (low nibble: even k) and scales uint8 [..., K/32]."""
    codes, exponents = _round(weight)
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents.squeeze(-1) + _BIAS).to(torch.uint8)


def dequantize(blocks: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantize`: float32 [..., K]."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2).int()
    return _values(codes, scales.int().unsqueeze(-1) - _BIAS).flatten(-2)


def _round(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes int32 [..., K/32, 32] (bit 3 is the sign) and exponents int32 [..., K/32, 1].

    The scale is the smallest power of two that leaves no magnitude above 7, which rounds down to 6: saturation costs
    no more than rounding between 4 and 6 does.
    """
    x = weight.float().unflatten(-1, (-1, BLOCK))
    bits = x.abs().amax(-1, keepdim=True).view(torch.int32)
    over_seven = ((bits & 0x7FFFFF) > 0x600000).int()  # mantissa above 1.75
    exponents = ((bits >> 23) - _BIAS - 2 + over_seven).clamp(min=-_BIAS + 1)
    x = x * _power_of_two(-exponents)
    size = x.abs()
    # Halfway goes to the even code.
    code = (size > 0.25).int() + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5)
    return code + 8 * (x < 0).int(), exponents


def _values(codes: Tensor, exponents: Tensor) -> Tensor:
    magnitude = codes & 7
    value = torch.where(magnitude < 4, 0.5 * magnitude, magnitude - 2.0)
    value = torch.where(magnitude == 7, 6.0, value)
    return torch.where(codes > 7, -value, value) * _power_of_two(exponents)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Exactly 2^e for -126 <= e <= 127."""
    return ((exponents + _BIAS) << 23).view(torch.float32)
