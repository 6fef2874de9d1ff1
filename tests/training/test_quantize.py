"""MXFP4 rounding, against an independent decoding and a search over all values."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.quantize import dequantize, fake_quantize, quantize

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LATTICE = torch.tensor(E2M1 + [-value for value in E2M1])


def weights(seed: int, spread: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    block_size = torch.exp2(torch.randint(-12, 12, (3, 4, 1), generator=generator) * spread)
    return (torch.randn(3, 4, 32, generator=generator) * block_size).flatten(-2)


def decode(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Value by value, from the description of the format."""
    rows = []
    for row_blocks, row_scales in zip(blocks.tolist(), scales.tolist(), strict=True):
        values = []
        for block, scale in zip(row_blocks, row_scales, strict=True):
            for byte in block:
                for code in (byte & 15, byte >> 4):
                    values.append((-1 if code & 8 else 1) * E2M1[code & 7] * 2.0 ** (scale - 127))
        rows.append(values)
    return torch.tensor(rows)


@given(st.integers(0, 1 << 20))
@settings(max_examples=20)
def test_bytes_decode_to_what_training_sees(seed: int) -> None:
    weight = weights(seed)
    blocks, scales = quantize(weight)
    assert blocks.shape == (3, 4, 16)
    assert scales.shape == (3, 4)
    assert torch.equal(decode(blocks, scales), fake_quantize(weight))
    assert torch.equal(dequantize(blocks, scales), fake_quantize(weight))


@given(st.integers(0, 1 << 20))
@settings(max_examples=20)
def test_every_value_is_the_nearest_of_its_block(seed: int) -> None:
    weight = weights(seed)
    _, scales = quantize(weight)
    unit = torch.exp2(scales.float() - 127).repeat_interleave(32, -1)
    nearest = (weight[..., None] - LATTICE * unit[..., None]).abs().amin(-1)
    assert torch.equal((weight - fake_quantize(weight)).abs(), nearest)
    assert bool((nearest <= unit).all())  # saturation costs no more than the widest step


def test_rounding_twice_changes_nothing() -> None:
    once = fake_quantize(weights(3))
    assert torch.equal(fake_quantize(once), once)


def test_zeros_and_tiny_blocks_stay_finite() -> None:
    weight = torch.zeros(2, 32)
    weight[1] = 1e-41
    assert torch.equal(fake_quantize(weight)[0], torch.zeros(32))
    assert bool(fake_quantize(weight).isfinite().all())


def test_gradients_pass_straight_through() -> None:
    weight = weights(5).requires_grad_()
    fake_quantize(weight).backward(torch.ones(3, 128))
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.ones(3, 128))
