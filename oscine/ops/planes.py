"""Activations as two planes of FP8, for products of FP8 times FP8. In Triton: sm_89 and newer.

    x[t, i] = (values[t, 0, p(i)] + values[t, 1, p(i)] / 16) * scale[t]
    p(i) = (i & ~15) | (i & 7) << 1 | (i >> 3) & 1      of each 16 columns the two halves are interleaved

    scale = 2^(floor(log2(max |x|)) - 7)                so that |x| / scale < 256: no value of e4m3 saturates
    high  = e4m3(x / scale)
    low   = e4m3((x / scale - high) * 16)

The eight significant bits of a bfloat16 are those of its two planes, four each: a row is held exactly but for what is
less than 2^-13 of its largest, and that to 2^-21 of the largest. A row may be zeros (its scale is any), and where an
infinity or a NaN is in it, its planes are anything.

Norms store planes on the way, with `store_planes`; `split` is for tokens that come without.

Shape suffixes: T tokens, H hidden, a multiple of 32.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.launch import depend
from oscine.ops.target import Target

FEW_TOKENS = 16  # these have planes in any case
MEAN_TOKENS = 4  # of an expert, up to which there are planes


class Planes(NamedTuple):
    values_T2H: Tensor  # float8_e4m3fn
    scale_T: Tensor  # float32; powers of two


def wanted(tokens: int, per_token: int, experts: int) -> bool:
    """Whether experts multiply in FP8: more tokens of an expert are quicker in fp16.

    With few tokens the time goes into weights, which are less work to expand to FP8. With more it goes into products.
    Two planes need twice as many, and a scale for each.
    """
    return tokens <= FEW_TOKENS or tokens * per_token <= MEAN_TOKENS * experts


def empty_planes(num_tokens: int, hidden: int, device: torch.device) -> Planes:
    return Planes(
        torch.empty((num_tokens, 2, hidden), dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_tokens, dtype=torch.float32, device=device),
    )


def split(target: Target, x_TH: Tensor) -> Planes:
    """Of bfloat16, contiguous."""
    num_tokens, hidden = x_TH.shape
    planes = empty_planes(num_tokens, hidden, x_TH.device)
    if num_tokens:
        _split_kernel[(num_tokens,)](
            x_TH,
            *planes,
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=16,
            **target.launch_options,
        )
    return planes


@triton.jit
def store_planes(y_H, values, scale, token, H: tl.constexpr, BLOCK_H: tl.constexpr):
    """y_H: the whole row, float32 [BLOCK_H] of bfloat16 values, zeros from H on."""
    # As integers, magnitudes are ordered like floats; the exponent of the largest is then its upper bits. A scale
    # and its inverse are normal numbers: rows below 2^-119 have the least scale.
    largest = tl.max(y_H.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = tl.maximum((largest >> 23) - 7, 1)
    tl.store(scale + token, (exponent << 23).to(tl.float32, bitcast=True))
    scaled_H = y_H * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high_H = scaled_H.to(tl.float8e4nv)
    low_H = ((scaled_H - high_H.to(tl.float32)) * 16).to(tl.float8e4nv)
    column_H = tl.arange(0, BLOCK_H)
    place_H = values + token * 2 * H + column_H
    tl.store(place_H, _interleave(high_H, BLOCK_H), mask=column_H < H)
    tl.store(place_H + H, _interleave(low_H, BLOCK_H), mask=column_H < H)


@triton.jit
def _interleave(plane_H, BLOCK_H: tl.constexpr):
    """Of each 16 columns, 0 8 1 9 2 10 ..."""
    return plane_H.reshape(BLOCK_H // 16, 2, 8).permute(0, 2, 1).reshape(BLOCK_H)


@triton.jit
def _split_kernel(x, values, scale, H: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    depend(PDL)
    x_H = tl.load(x + token * H + column_H, mask=column_H < H, other=0).to(tl.float32)
    store_planes(x_H, values, scale, token, H, BLOCK_H)
