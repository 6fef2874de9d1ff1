"""Keys and values in FP8 (e4m3), with a scale per token and KV head (docs/decisions/0028).

A page of a layer is [2, G, R, D] bytes. Of each head, the first P rows are its tokens, and the bytes after them are the
P exponents of their scales. The scale of a row x is a power of two, so multiplying and dividing by it is exact:

    scale = 2^(exponent - 127), the least with max |x| / scale <= 448, the largest value of e4m3
    byte  = e4m3(x / scale)                                        rounded to nearest even

NaN stays NaN, and does not count in the maximum. With calibrated exponents (docs/decisions/0042) the exponent is that
of the layer, kind and head, and larger values become +-448 times its scale. A page is read in the same way then.
Shape suffixes as in ops/interface.py; R rows of a head.
"""

import torch
from torch import Tensor

from oscine.kv_dtype import tokens_of_rows

LARGEST = 448.0  # value of e4m3
LEAST_EXPONENT = 1  # so that 1 / scale is a normal number
MAX_EXPONENT = 247  # of a finite row
# Added to the bits of a float32, it carries into the exponent where the mantissa is above 1.75: 448 is 1.75 * 2^8.
CARRY, TOP_EXPONENT = 0x1FFFFF, 8


def is_fp8(kv_pages: Tensor) -> bool:
    return kv_pages.dtype == torch.uint8


def page_size_of(kv_pages: Tensor) -> int:
    """Tokens of a page. kv_pages: [..., R, D], or [..., P, D] in another dtype."""
    rows, head_dim = kv_pages.shape[-2:]
    return tokens_of_rows(rows, head_dim) if is_fp8(kv_pages) else rows


def elements_and_exponents(pages: Tensor) -> tuple[Tensor, Tensor]:
    """Views of pages [..., R, D]: the bytes of e4m3 [..., P, D], and of the scales [..., P]."""
    page_size = page_size_of(pages)
    return pages[..., :page_size, :], pages[..., page_size:, :].flatten(-2)[..., :page_size]


def quantise(x: Tensor, exponents: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[..., D] of any float dtype -> bytes [..., D] and exponents [...].

    `exponents`: calibrated ones, of a shape that fits the rows; larger values are clamped.
    """
    x = x.float()
    if exponents is None:
        exponents = exponent_for(x.abs().nan_to_num(0.0, torch.inf).amax(-1))
    else:
        exponents = exponents.int().expand(x.shape[:-1])
        largest = LARGEST * power_of_two(exponents)[..., None]
        x = x.clamp(-largest, largest)
    scaled = x * power_of_two(254 - exponents)[..., None]
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), exponents.to(torch.uint8)


def exponent_for(most: Tensor) -> Tensor:
    """Exponents of the scales of rows, int32; `most`: the largest magnitude of each, float32."""
    return (((most.view(torch.int32) + CARRY) >> 23) - TOP_EXPONENT).clamp(min=LEAST_EXPONENT)


def power_of_two(exponents: Tensor) -> Tensor:
    """2^(exponent - 127), float32."""
    return (exponents.int() << 23).view(torch.float32)


def dequantise(elements: Tensor, exponents: Tensor) -> Tensor:
    """[..., D] and [...] -> [..., D] float32."""
    return elements.contiguous().view(torch.float8_e4m3fn).float() * power_of_two(exponents)[..., None]
