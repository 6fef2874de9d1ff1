"""Activations as planes of FP8, for products of FP8 times FP8. In Triton: sm_89 and newer.

    scale = 2^(floor(log2(max |x|)) - 7)                so that |x| / scale < 256: no value of e4m3 saturates
    high  = e4m3(x / scale)
    low   = e4m3((x / scale - high) * 16)

Two planes, high and low, are bfloat16 as good as exactly:

    x[t, i] = (values[t, 0, p(i)] + values[t, 1, p(i)] / 16) * scale[t]
    p(i) = (i & ~15) | (i & 7) << 1 | (i >> 3) & 1      of each 16 columns the two halves are interleaved

The eight significant bits of a bfloat16 are those of its two planes, four each: a row is held exactly but for what is
less than 2^-13 of its largest, and that to 2^-21 of the largest. H is a multiple of 32.

One plane is FP8 activations: an element is off by 1/16 of itself at most, or by 2^-18 of the largest of its row.

    x[t, i] ~ values[t, 0, p(i)] * scale[t]
    p(i) = (i & ~60) | (i & 12) << 2 | (i & 48) >> 2    of each 64 columns, sixteen words of four are transposed

H is a multiple of 64. A row may be zeros (its scale is any), and where an infinity or a NaN is in it, its planes are
anything. Norms store planes on the way, with `store_planes`; `split` is for tokens that come without.

Shape suffixes: T tokens, P planes, H hidden.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from oscine.ops.launch import depend
from oscine.ops.target import Target

FEW_TOKENS = 16  # these have planes in any case
MEAN_TOKENS = 4  # of an expert, up to which there are planes


class Planes(NamedTuple):
    values_TPH: Tensor  # float8_e4m3fn
    scale_T: Tensor  # float32; powers of two

    @property
    def number(self) -> int:
        return self.values_TPH.shape[1]


def wanted(target: Target, tokens: int, per_token: int, experts: int) -> int:
    """How many planes experts multiply; 0: none, but fp16."""
    if target.activation_dtype == "fp8":
        return 1
    return 2 if are_few(tokens, per_token, experts) else 0


def are_few(tokens: int, per_token: int, experts: int) -> bool:
    """Whether exact activations are two planes: more tokens of an expert are quicker in fp16.

    With few tokens the time goes into weights, which are less work to expand to FP8. With more it goes into products.
    Two planes need twice as many, and a scale for each.
    """
    return tokens <= FEW_TOKENS or tokens * per_token <= MEAN_TOKENS * experts


def empty_planes(number: int, num_tokens: int, hidden: int, device: torch.device) -> Planes:
    return Planes(
        torch.empty((num_tokens, number, hidden), dtype=torch.float8_e4m3fn, device=device),
        torch.empty(num_tokens, dtype=torch.float32, device=device),
    )


def plane_arguments(planes: Planes | None) -> dict[str, Any]:
    """Those of a kernel that stores planes, or None."""
    if planes is None:
        return {"values": None, "scale": None, "PLANES": 0}
    return {"values": planes.values_TPH, "scale": planes.scale_T, "PLANES": planes.number}


def split(target: Target, x_TH: Tensor, number: int) -> Planes:
    """Of bfloat16, contiguous."""
    num_tokens, hidden = x_TH.shape
    planes = empty_planes(number, num_tokens, hidden, x_TH.device)
    if num_tokens:
        _split_kernel[(num_tokens,)](
            x_TH,
            **plane_arguments(planes),
            H=hidden,
            BLOCK_H=triton.next_power_of_2(hidden),
            num_warps=16,
            **target.launch_options,
        )
    return planes


@triton.jit
def store_planes(y_H, values, scale, token, H: tl.constexpr, BLOCK_H: tl.constexpr, PLANES: tl.constexpr):
    """y_H: the whole row, float32 [BLOCK_H] of bfloat16 values, zeros from H on."""
    # As integers, magnitudes are ordered like floats; the exponent of the largest is then its upper bits. A scale
    # and its inverse are normal numbers: rows below 2^-119 have the least scale.
    largest = tl.max(y_H.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = tl.maximum((largest >> 23) - 7, 1)
    tl.store(scale + token, (exponent << 23).to(tl.float32, bitcast=True))
    scaled_H = y_H * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    high_H = scaled_H.to(tl.float8e4nv)
    column_H = tl.arange(0, BLOCK_H)
    place_H = values + token * PLANES * H + column_H
    if PLANES == 1:
        words_H = high_H.reshape(BLOCK_H // 64, 4, 4, 4).permute(0, 2, 1, 3).reshape(BLOCK_H)
        tl.store(place_H, words_H, mask=column_H < H)
    else:
        low_H = ((scaled_H - high_H.to(tl.float32)) * 16).to(tl.float8e4nv)
        # A second conversion, through float16, which holds the value. If one conversion were both stored and converted
        # back, ptxas 12.9 (Triton 3.8) would convert back an unrelated register.
        high_H = scaled_H.to(tl.float16).to(tl.float8e4nv)
        tl.store(place_H, _interleave(high_H, BLOCK_H), mask=column_H < H)
        tl.store(place_H + H, _interleave(low_H, BLOCK_H), mask=column_H < H)


@triton.jit
def _interleave(plane_H, BLOCK_H: tl.constexpr):
    """Of each 16 columns, 0 8 1 9 2 10 ..."""
    return plane_H.reshape(BLOCK_H // 16, 2, 8).permute(0, 2, 1).reshape(BLOCK_H)


@triton.jit
def _split_kernel(x, values, scale, H: tl.constexpr, BLOCK_H: tl.constexpr, PLANES: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    depend(PDL)
    x_H = tl.load(x + token * H + column_H, mask=column_H < H, other=0).to(tl.float32)
    store_planes(x_H, values, scale, token, H, BLOCK_H, PLANES)
