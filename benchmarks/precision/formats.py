"""Number formats of activations, emulated: a Rounding gives the values that a format holds, in float32.

A format is the type of its elements, and the columns that share a scale.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Rounding = Callable[[Tensor], Tensor]  # [..., K] float32 -> the same
E4M3_LARGEST, INT8_LARGEST = 448.0, 127.0
LEAST_SCALE = 2.0**-100  # of columns that are all zero


def unchanged(values: Tensor) -> Tensor:
    return values


def fp16(values: Tensor) -> Tensor:
    return values.half().float()


def e4m3(values: Tensor) -> Tensor:
    return values.clamp(-E4M3_LARGEST, E4M3_LARGEST).to(torch.float8_e4m3fn).float()


def int8(values: Tensor) -> Tensor:
    return values.round().clamp(-INT8_LARGEST, INT8_LARGEST)


def with_factor(elements: Rounding, factor: float) -> Rounding:
    """One factor for all values, known beforehand."""
    return lambda values: elements(values * factor) / factor


def with_scales(elements: Rounding, *, block: int | None = None, power_of_two: bool = True) -> Rounding:
    """A scale for each `block` columns, or for a row: the least with which no element saturates.

    MXFP8 is e4m3 with block 32. This is how NVIDIA's libraries choose its scales.
    """
    largest = {e4m3: E4M3_LARGEST, int8: INT8_LARGEST}[elements]

    def rounded(values: Tensor) -> Tensor:
        width = values.shape[-1]
        size = block or width
        blocks = functional.pad(values, (0, -width % size)).unflatten(-1, (-1, size))
        scales = (blocks.abs().amax(-1, keepdim=True) / largest).clamp(min=LEAST_SCALE)
        if power_of_two:
            scales = scales.log2().ceil().exp2()
        return (elements(blocks / scales) * scales).flatten(-2)[..., :width]

    return rounded


def mxfp8_by_exponent(values: Tensor) -> Tensor:
    """MXFP8 with the scales that the OCP standard's conversion has: the largest of 32 columns is from 256 to 512.

    So those above 448 saturate. https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
    """
    width = values.shape[-1]
    blocks = functional.pad(values, (0, -width % 32)).unflatten(-1, (-1, 32))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=LEAST_SCALE)
    exponents = torch.frexp(largest).exponent - 9
    return torch.ldexp(e4m3(torch.ldexp(blocks, -exponents)), exponents).flatten(-2)[..., :width]


# Of x, the input of the experts, and of h, the output of SwiGLU, whose limit of 7 bounds h by 56: 448 / 8.
FP8 = with_scales(e4m3), with_factor(e4m3, 8.0)
MXFP8 = (with_scales(e4m3, block=32),) * 2
OTHERS: dict[str, tuple[Rounding, Rounding]] = {
    "e4m3, power of two per row": (with_scales(e4m3), with_scales(e4m3)),
    "e4m3, float32 per row": (with_scales(e4m3, power_of_two=False),) * 2,
    "e4m3, float32 per 96 columns": (with_scales(e4m3, block=96, power_of_two=False),) * 2,
    "MXFP8, scales by exponent": (mxfp8_by_exponent,) * 2,
    "e4m3, float32 per 32": (with_scales(e4m3, block=32, power_of_two=False),) * 2,
    "x as e4m3, h as fp16": (with_scales(e4m3), fp16),
    "x exact, h as e4m3": (unchanged, with_scales(e4m3)),
    "int8, float32 per row": (with_scales(int8, power_of_two=False),) * 2,
    "int8, float32 per 96": (with_scales(int8, block=96, power_of_two=False),) * 2,
    "int8, power of two per 32": (with_scales(int8, block=32),) * 2,
    "int8, float32 per 32": (with_scales(int8, block=32, power_of_two=False),) * 2,
    "x as int8, float32 per 32, h as fp16": (with_scales(int8, block=32, power_of_two=False), fp16),
}
