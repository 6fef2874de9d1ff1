"""Dense weights in 12 bits: the format, and the kernels that expand it."""

import pytest
import torch

from oscine.ops.linear import hopper_bf12 as bf12
from oscine.ops.linear.bf12_size import bf12_bytes
from oscine.ops.linear.hopper import OUT_PROJ_BF12_TILES
from oscine.ops.linear.hopper_bf12 import Bf12Matrix, dense_of, pack, read_by
from oscine.ops.qkv.hopper import BF12_TILES


def unpacked(matrix: Bf12Matrix) -> torch.Tensor:
    """float64 [F, K], by the definition, word by word."""
    words = matrix.words.long() & 0xFFFFFFFF
    a, b, c = words
    rest = a & bf12.spare_bits(0) | b & bf12.spare_bits(1) | c & bf12.spare_bits(2)
    fields = [bf12.turned(word, turn) & bf12.MASK for word, turn in zip((a, b, c, rest), bf12.TURNS, strict=True)]
    rows, columns = matrix.shape
    halves = torch.stack([torch.stack((field & 0xFFFF, field >> 16), -1) for field in fields])
    # [row 3, k 3, tile, group, atom, g, q, k 0] -> [tile, row 3, group, g, atom, k 3, q, k 0]
    halves = halves.view(2, 2, rows // 64, 4, columns // 16, 8, 4, 2).permute(2, 0, 3, 5, 4, 1, 6, 7)
    small = halves.reshape(rows, columns).to(torch.int16).view(torch.bfloat16).double()
    return small * 2.0**bf12.SHIFT * matrix.scale_F.double()[:, None]


def random_matrix(rows: int, columns: int) -> torch.Tensor:
    """Rows of very different sizes: all zeros, one large value, and the smallest and largest exponents."""
    generator = torch.Generator().manual_seed(rows)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix[0] = 0
    matrix[1, :5] *= 1000
    matrix[2] *= 2.0**-120
    matrix[3] *= 2.0**120
    matrix[4] = torch.ldexp(matrix[4], torch.arange(columns) % 40 - 20)
    matrix[5] = -(2.0**-133)
    return matrix.bfloat16()


def test_a_packed_matrix_has_the_values_of_the_dense_one() -> None:
    dense = random_matrix(128, 48)
    packed = pack(dense)
    assert isinstance(packed, Bf12Matrix)
    found, exact = unpacked(packed), dense.double()
    largest = torch.ldexp(
        torch.ones(128, dtype=torch.float64), exact.abs().amax(1).clamp(min=2**-126).log2().floor().int()
    )
    assert torch.equal(packed.scale_F.double(), largest)
    near = exact.abs() >= largest[:, None] * 2**-14
    assert torch.equal(found[near], exact[near])
    assert ((found - exact).abs() <= largest[:, None] * 2**-22).all()
    assert not near.all()


def test_a_product_reads_the_words_up_to_the_largest_tile_for_them() -> None:
    packed = pack(random_matrix(64, 32))
    assert BF12_TILES[-1].max_tokens == OUT_PROJ_BF12_TILES[-1].max_tokens == bf12.MAX_TOKENS
    assert read_by(packed, bf12.MAX_TOKENS) is packed
    assert read_by(packed, bf12.MAX_TOKENS + 1) is dense_of(packed)


def test_planned_bytes_are_those_of_the_words() -> None:
    packed = pack(random_matrix(64, 32))
    assert isinstance(packed, Bf12Matrix)
    assert packed.nbytes == bf12_bytes(64, 32) == 64 * 32 * 3 // 2 + 4 * 64


@pytest.mark.parametrize(("rows", "columns", "value"), [(72, 32, 1.0), (64, 40, 1.0), (64, 32, torch.inf)])
def test_what_cannot_be_packed_stays_as_it_is(rows: int, columns: int, value: float) -> None:
    dense = torch.full((rows, columns), value, dtype=torch.bfloat16)
    assert pack(dense) is dense
