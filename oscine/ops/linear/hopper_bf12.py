"""Dense weights in 12 bits: bfloat16 with four bits of exponent, relative to the largest value of the row.

    weight = 2^(e - 127) * (s, f, m)        e: the exponent field of the largest value of the row
                                            s, m: sign and mantissa of bfloat16; f: four bits of exponent

Values down to 2^-14 of the largest power of two of the row are exact. Smaller ones are rounded to multiples of 2^-21 of
it, as the subnormals of this format. bfloat16 itself rounds the largest value to 2^-8 of it, so the products are those
of the original weights, but a quarter of the bytes need not be read.

An atom is 16 columns of 64 rows, for the register operand of wgmma: each thread has eight values. As bfloat16 times
2^-112 they would be four words R[row 3][k 3] of two values each, with bits 15 and 10..0 used of each half. Three words
hold them. A, B and C are R0, R1 and R2, rotated; their free bits are those of R3, also rotated. turn(x, n) rotates x
to the left by n bits:

    R0 = A & MASK     R1 = turn(B, 28) & MASK     R2 = turn(C, 8) & MASK     R3 = turn(their free bits, 4) & MASK

That is 9 instructions for eight values, and 4 products with 2^112 (hopper_bf12_stream.py).

Shape suffixes: F rows of the matrix, K its columns.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oscine.ops.linear.bf12_size import COLUMNS, ROWS, WORDS, bf12_bytes

LANES = 32
MAX_TOKENS = 32  # of products that read the words; with more, bfloat16 is as fast
SHIFT = 112  # the words' exponents are so much smaller
MASK = 0x87FF87FF
TURNS = (0, 28, 8, 4)  # to the left, of A, B, C, and of the bits that they leave


@dataclass(frozen=True, slots=True)
class Bf12Matrix:
    """A matrix [F, K] in both forms: 12 bits for few tokens, bfloat16 for many.

    Rows of the words come in groups of 16: of 64 rows, group i has rows 8 i .. 8 i + 7 and 32 + 8 i .. 32 + 8 i + 7,
    so that the two dimensions of a head that rotate together are in one thread.
    """

    dense: Tensor  # bf16 [F, K]
    words: Tensor  # int32 [3, F / 16, 2 K]; by plane, group, and (atom along K, lane)
    scale_F: Tensor  # float32; 2^(e - 127)

    def __len__(self) -> int:
        return len(self.dense)

    @property
    def shape(self) -> torch.Size:
        return self.dense.shape

    @property
    def nbytes(self) -> int:
        """Bytes that a product with few tokens reads."""
        return self.words.nbytes + self.scale_F.nbytes

    def numel(self) -> int:
        return self.dense.numel()


def dense_of(weight: Tensor | Bf12Matrix) -> Tensor:
    return weight.dense if isinstance(weight, Bf12Matrix) else weight


def read_by(weight: Tensor | Bf12Matrix, num_tokens: int) -> Tensor | Bf12Matrix:
    """The form that a product with so many tokens reads."""
    return weight if num_tokens <= MAX_TOKENS else dense_of(weight)


def pack(dense_FK: Tensor) -> Bf12Matrix | Tensor:
    """bf16 -> both forms. The matrix alone if its sides are not multiples of 64 and 16, or a value is 2^127 or more."""
    rows, columns = dense_FK.shape
    exponents_F = (dense_FK.view(torch.int16).int() >> 7 & 255).amax(1).clamp(min=1)
    if not bf12_bytes(rows, columns) or int(exponents_F.max()) >= 254:
        return dense_FK
    scale_F, inverse_F = (exponents_F << 23).view(torch.float32), (254 - exponents_F << 23).view(torch.float32)
    # Both factors are powers of two, and neither product leaves the range of float32.
    small_FK = (dense_FK.float() * inverse_F[:, None] * 2.0**-SHIFT).bfloat16()
    halves = small_FK.view(torch.int16).view(rows // ROWS, 2, 4, 8, columns // COLUMNS, 2, 4, 2).long() & 0xFFFF
    pairs = halves[..., 0] | halves[..., 1] << 16  # [tile, row 3, group, g, atom, k 3, q]
    fields = pairs.permute(1, 5, 0, 2, 4, 3, 6).reshape(4, rows // 16, columns // COLUMNS * LANES)
    rest = turned(fields[WORDS], -TURNS[WORDS])
    words = torch.stack([turned(fields[i], -TURNS[i]) | rest & spare_bits(i) for i in range(WORDS)])
    return Bf12Matrix(dense_FK, (words - (words >> 31 << 32)).int(), scale_F)


def spare_bits(word: int) -> int:
    """The bits of word A, B or C (0, 1 or 2) that are R3's."""
    free: int = turned(MASK, -TURNS[word]) ^ 0xFFFFFFFF
    return free


def turned(words: Any, turn: int) -> Any:
    """int, or int64 tensor: to the left, within 32 bits."""
    turn %= 32
    return (words << turn | words >> 32 - turn) & 0xFFFFFFFF
