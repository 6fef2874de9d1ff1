"""What FP8 activations are, in plain torch: x and h as the experts multiply them with --activation-dtype fp8.

x has a scale for each row, a power of two. h has one for all rows, which follows from SwiGLU's limit: its kernel sees
32 columns of a row at a time, and no scale of a row is known then.
"""

import math

import torch
from torch import Tensor

from oscine.ops.interface import Shapes, Use, unmet

LARGEST = 448  # of e4m3


def round_rows(x: Tensor) -> Tensor:
    """float32 [T, H] -> the same in steps of e4m3, the largest of a row being from 128 to 256."""
    exponent_T1 = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent - 8
    return torch.ldexp(_rounded(torch.ldexp(x, -exponent_T1)), exponent_T1)


def round_h(h: Tensor, limit: float) -> Tensor:
    """float32, what SwiGLU gives with this limit -> the same in steps of e4m3."""
    factor = h_factor(limit)
    return _rounded(h * factor) / factor


def h_factor(limit: float) -> float:
    """The largest power of two with which no |h| <= limit * (limit + 1) leaves e4m3."""
    return 2.0 ** math.floor(math.log2(LARGEST / (limit * (limit + 1))))


def _rounded(x: Tensor) -> Tensor:
    return x.to(torch.float8_e4m3fn).float()


def moe_use(shapes: Shapes) -> Use | None:
    """Of experts that have kernels of their own for FP8 activations alone: the portable ones serve exact activations,
    the default.
    """
    lacking = unmet(("--activation-dtype", "fp8", shapes.activation_dtype))
    return Use("no step", "triton", lacking) if lacking else None
