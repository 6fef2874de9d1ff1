"""Quantisation to MXFP4: exact values survive, others go to a nearest neighbour."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.model.mxfp4 import dequantize, quantize

GRID = sorted({s * m for s in (1, -1) for m in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)})


def test_values_on_the_grid_survive_under_every_scale() -> None:
    values = torch.tensor(GRID + [6.0] * (32 - len(GRID)))
    for exponent in range(-124, 125):
        scaled = values * 2.0**exponent
        blocks, scales = quantize(scaled)
        assert scales.item() == exponent + 127
        assert torch.equal(dequantize(blocks, scales), scaled)


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=32, max_size=32))
@settings(deadline=None, max_examples=60)
def test_every_value_goes_to_a_nearest_neighbour(values: list[float]) -> None:
    original = torch.tensor(values)
    blocks, scales = quantize(original)
    unit = 2.0 ** (scales.item() - 127)
    for value, got in zip(original.tolist(), dequantize(blocks, scales).tolist(), strict=True):
        assert abs(value - got) == min(abs(value - g * unit) for g in GRID)
    largest = original.abs().max().item()
    assert largest == 0 or 4 * unit <= largest < 8 * unit or scales.item() == 0


def test_ties_go_to_the_even_neighbour() -> None:
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -2.5, 6.0] + [0.0] * 22)
    rounded = dequantize(*quantize(values))[:9].tolist()
    assert rounded == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -2.0]


@pytest.mark.parametrize("shape", [(2, 3, 64), (32,), (0, 32)])
def test_shapes(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape)
    blocks, scales = quantize(values)
    assert blocks.shape == (*shape[:-1], shape[-1] // 32, 16)
    assert scales.shape == blocks.shape[:-1]
    assert dequantize(blocks, scales).shape == shape
