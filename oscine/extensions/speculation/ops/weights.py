"""Weights of a draft head in 4 bits, for kernels that read them faster than they come from memory.

A block is 32 columns of a row:

    weight = row scale (float32) * block scale (8 bits) * integer (4 bits, -8 to 7)

The block scale has 5 bits of exponent and 3 of mantissa, and its value is (1 + m / 8) * 2^(e - 31). So integer times
block scale is exact in bfloat16. Of some scales near the largest weight of a block, the one with the least squared
error is taken.

Column 32 b + 4 p + i of a row is in bits 4 p to 4 p + 3 of word 4 b + i, plus 8. So a thread that loads four words has
a block, and needs four columns of the activations at a time. All bits of a word but four are masked off, and an
exponent is put before them: a float32 without a shift, but for one per word (see `integers`).

Shape suffixes: N rows, K columns, B blocks, W words.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 32  # columns
WORDS = 4  # of a block
PLANES = 8  # integers of a word
LOW_PLANES = tl.constexpr(5)  # so low in a word that their bits fit a mantissa as they are
TRIED = (-4, -3, -2, -1, 0, 1)  # block scales, from the one below or at (largest weight) / 7
AT_ONCE = 1 << 22  # weights, to bound the workspace
_MANTISSA = 20  # of float32 that the block scale has not
_LEAST = 96 << 23  # float32 bits of the least block scale, 2^-31


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    words_NW: Tensor  # int32
    scales_NB: Tensor  # uint8
    row_scale_N: Tensor  # float32
    columns: int  # K

    def __len__(self) -> int:
        return len(self.words_NW)


def pack(weight_NK: Tensor) -> PackedMatrix:
    """Columns that are missing from the last block are zeros."""
    rows, columns = weight_NK.shape
    blocks, device = -(-columns // BLOCK), weight_NK.device
    words_NW = torch.empty(rows, blocks * WORDS, dtype=torch.int32, device=device)
    scales_NB = torch.empty(rows, blocks, dtype=torch.uint8, device=device)
    row_scale_N = torch.empty(rows, dtype=torch.float32, device=device)
    at_once = max(1, AT_ONCE // max(1, columns))
    for start in range(0, rows, at_once):
        part = slice(start, start + at_once)
        exact_NK = torch.nn.functional.pad(weight_NK[part].float(), (0, blocks * BLOCK - columns))
        words_NW[part], scales_NB[part], row_scale_N[part] = _packed(exact_NK.unflatten(1, (blocks, BLOCK)))
    return PackedMatrix(words_NW, scales_NB, row_scale_N, columns)


def unpack(matrix: PackedMatrix) -> Tensor:
    """float32 [N, K]."""
    shift_P1 = 4 * torch.arange(PLANES, device=matrix.words_NW.device)[:, None]
    words_NB1I = matrix.words_NW.unflatten(1, (-1, 1, WORDS))
    integers_NBPI = ((words_NB1I >> shift_P1) & 15) - 8
    weight_NBK = integers_NBPI.flatten(2).float() * block_scale(matrix.scales_NB)[:, :, None]
    weight_NK: Tensor = weight_NBK.flatten(1) * matrix.row_scale_N[:, None]
    return weight_NK[:, : matrix.columns]


def block_scale(scales: Tensor) -> Tensor:
    """float32 of uint8."""
    return ((scales.int() << _MANTISSA) + _LEAST).view(torch.float32)


def _packed(exact_NBK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(words, block scales, row scales) of float32 [N, B, 32]."""
    largest_NB = exact_NBK.abs().amax(2)
    row_scale_N = largest_NB.amax(1) / 7
    row_scale_N = row_scale_N.masked_fill(row_scale_N == 0, 1)
    exact_NBK = exact_NBK / row_scale_N[:, None, None]
    nearest_NB = ((largest_NB / row_scale_N[:, None] / 7).view(torch.int32) - _LEAST) >> _MANTISSA
    best_NB = torch.zeros_like(nearest_NB)
    error_NB = torch.full_like(largest_NB, torch.inf)
    for tried in TRIED:
        code_NB = (nearest_NB + tried).clamp(0, 255)
        scale_NB1 = block_scale(code_NB)[:, :, None]
        rest_NBK = (exact_NBK / scale_NB1).round_().clamp_(-8, 7).mul_(scale_NB1).sub_(exact_NBK)
        squared_NB = rest_NBK.square_().sum(2)
        better_NB = squared_NB < error_NB
        best_NB = torch.where(better_NB, code_NB, best_NB)
        error_NB = torch.where(better_NB, squared_NB, error_NB)
    integers_NBK = (exact_NBK / block_scale(best_NB)[:, :, None]).round_().clamp_(-8, 7).int() + 8
    shift_P1 = 4 * torch.arange(PLANES, device=exact_NBK.device)[:, None]
    # Bits of different planes do not meet, so the sum has all of them.
    words_NBI = (integers_NBK.unflatten(2, (PLANES, WORDS)) << shift_P1).sum(2)
    return words_NBI.flatten(1).to(torch.int32), best_NB.to(torch.uint8), row_scale_N


@triton.constexpr_function
def _masked_off(bit: int) -> str:
    """One instruction, where the compiler makes two of `and` and `or` with constants."""
    return f"lop3.b32 $0, $1, {15 << bit}, {(150 - bit) << 23}, 0xEA;"


@triton.jit
def integers(word, plane: tl.constexpr, PTX: tl.constexpr):
    """float32 of the plane's integers, exactly. From plane LOW_PLANES on, `word` is the word shifted right by 12."""
    bit: tl.constexpr = 4 * plane if plane < LOW_PLANES else 4 * plane - 12
    if PTX:
        code: tl.constexpr = _masked_off(bit)
        bits = tl.inline_asm_elementwise(code, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)
    else:
        bits = (word & (15 << bit)) | ((150 - bit) << 23)  # 2^(23 - bit) + 8 + integer
    return bits.to(tl.float32, bitcast=True) - (2.0 ** (23 - bit) + 8.0)


@triton.jit
def scales_of(code):
    """float32 of block scales."""
    return ((code.to(tl.int32) << 20) + (96 << 23)).to(tl.float32, bitcast=True)
