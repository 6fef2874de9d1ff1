"""The quantisation of experts, against a search over all values and scales."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from oscine.checkpoint import quantize as quantize_module
from oscine.checkpoint.quantize import quantize
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.native.library import unavailable

LATTICE = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SEEDS = given(st.integers(0, 1 << 20))
FEW = settings(max_examples=5)


def weights(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.exp2(torch.randint(-12, 12, (3, 4, 2, 1), generator=generator))
    return (torch.randn(3, 4, 2, 32, generator=generator) * size).flatten(-2)


def least_errors(weight: Tensor) -> Tensor:
    """The squared error of each block at its best scale of all, to the nearest value each."""
    scales = torch.exp2(torch.arange(-24.0, 24.0, dtype=torch.float64))
    values = torch.cat((LATTICE, -LATTICE)).double() * scales[:, None]
    blocks = weight.double().reshape(3, 4, 2, 32)
    distances = [(blocks[..., None] - of_scale).abs().amin(-1).square().sum(-1) for of_scale in values]
    return torch.stack(distances).amin(0)


@SEEDS
@FEW
def test_no_other_scale_and_no_other_value_is_nearer(seed: int) -> None:
    weight = weights(seed)
    (blocks, scales), error = quantize(weight)
    assert blocks.shape == (3, 4, 2, 16)
    assert scales.shape == (3, 4, 2)
    differences = (dequantize(blocks, scales) - weight).double().reshape(3, 4, 2, 32).square().sum(-1)
    torch.testing.assert_close(differences, least_errors(weight))
    relative = differences.sum().sqrt() / weight.double().norm()
    assert error.relative == pytest.approx(float(relative), rel=1e-5)


@pytest.mark.skipif(unavailable() is not None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernel_computes_what_torch_does(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a row of zeros, and more blocks than a thread takes at once."""
    weight = torch.randn(3, 96, 2048, generator=torch.Generator().manual_seed(3)).to(dtype)
    weight[0, 5] = 0
    kernel, error = quantize(weight)
    monkeypatch.setattr(quantize_module, "unavailable", lambda: "none is wanted")
    plain, expected = quantize(weight)
    assert torch.equal(kernel.blocks, plain.blocks)
    assert torch.equal(kernel.scales, plain.scales)
    assert error.relative == pytest.approx(expected.relative, rel=1e-6)


@SEEDS
@FEW
def test_what_is_mxfp4_already_is_not_changed(seed: int) -> None:
    (blocks, scales), _ = quantize(weights(seed))
    once = dequantize(blocks, scales)
    again, error = quantize(once.bfloat16())
    assert error.relative == 0
    assert torch.equal(dequantize(*again), once)


def test_the_memory_layout_of_the_weight_does_not_matter() -> None:
    weight = weights(1)
    assert all(map(torch.equal, quantize(weight.mT.contiguous().mT)[0], quantize(weight)[0]))


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 1e15])
def test_extreme_blocks(value: float) -> None:
    made, error = quantize(torch.full((1, 1, 32), value))
    assert error.relative <= 1
    assert torch.isfinite(dequantize(*made)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float) -> None:
    weight = weights(2)
    weight[1, 2, 3] = value
    with pytest.raises(ValueError, match="not finite"):
        quantize(weight)
