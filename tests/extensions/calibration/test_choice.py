"""The choice of scales. The oracle makes e4m3 from its definition, in numpy and float64."""

import numpy as np
import pytest
import torch
from torch import Tensor

from oscine.extensions.calibration.choice import MARGIN, TOLERANCE, TRIED, Seen, num_clamped, squared_error
from oscine.ops.kv.fp8 import MAX_EXPONENT, dequantise, quantise

CPU = torch.device("cpu")
# All values of e4m3 from 0 up, in the order of their bytes: 3 bits of mantissa, subnormal below 2^-6; 0x7f is NaN.
E4M3 = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])


def rounded(x: np.ndarray, n: int) -> np.ndarray:
    """The nearest value of the scale 2^n, the even one of two; larger values are clamped."""
    size = np.minimum(np.abs(x) / 2.0**n, 448)
    above = np.searchsorted(E4M3, size)
    below = np.maximum(above - 1, 0)
    up, down = E4M3[above] - size, size - E4M3[below]
    byte = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return np.sign(x) * E4M3[byte] * 2.0**n


def rows() -> Tensor:
    """Two prompts of keys and values of two heads, [2, 2, 50, 16] each: of several sizes, and with outliers."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2, 2, 50, 16, generator=generator)
    x[:, 0, 1] *= 0.001
    x[:, 1, 0] *= torch.randn(2, 50, 1, generator=generator).mul(3).exp()
    x[:, 1, 1, :, 3] *= 1000
    return x


def errors(x: np.ndarray, exponents: range) -> list[float]:
    return [float(((rounded(x, n) - x) ** 2).sum()) for n in exponents]


def test_rows_with_a_given_exponent_are_rounded_and_clamped_as_defined() -> None:
    x = rows()[0]
    x[0, 0, :3, 0] = torch.tensor([448.0, -1e30, 2.0**-10])
    for n in (-12, -7, 0, 6):
        exponents = torch.tensor([[n, n + 1], [n - 1, n]])
        elements, stored = quantise(x, (exponents + 127).to(torch.uint8)[..., None])
        assert torch.equal(stored, (exponents + 127).to(torch.uint8)[..., None].expand(2, 2, 50))
        found = dequantise(elements, stored).double().numpy()
        clamped = num_clamped(x, exponents + 127)
        for kind, head in np.ndindex(2, 2):
            own, scale = x[kind, head].double().numpy(), int(exponents[kind, head])
            np.testing.assert_array_equal(found[kind, head], rounded(own, scale))
            assert int(clamped[kind, head]) == (np.abs(own) > 448 * 2.0**scale).sum()
    assert dequantise(*quantise(torch.tensor([[torch.nan, 1e9]]), torch.tensor([120])))[0, 0].isnan()


def test_the_middle_of_the_exponents_with_the_least_error_is_chosen() -> None:
    seen = Seen.nothing(3, 2, CPU)
    for prompt in rows():
        seen.add(1, prompt)
    chosen = seen.choose()
    joined = rows().permute(1, 2, 0, 3, 4).flatten(2, 3).double().numpy()
    for kind, head in np.ndindex(2, 2):
        x = joined[kind, head]
        largest = np.abs(x).max()
        assert float(seen.largest_L2G[1, kind, head]) == largest
        least = int(np.ceil(np.log2(largest * MARGIN / 448)))
        tried = range(least, least + TRIED)
        of_each = errors(x, tried)
        near = [n for n, error in zip(tried, of_each, strict=True) if error <= min(of_each) * (1 + TOLERANCE)]
        n = int(chosen[1, kind, head]) - 127
        assert n == (near[0] + near[-1]) // 2
        assert largest * MARGIN <= 448 * 2.0**n
        exponents = torch.full((2, 2), n + 127)
        error = float(squared_error(rows().permute(1, 2, 0, 3, 4).flatten(2, 3), exponents)[kind, head])
        assert error == pytest.approx(errors(x, range(n, n + 1))[0], rel=1e-6)


def test_layers_of_zeros_have_a_scale() -> None:
    seen = Seen.nothing(1, 1, CPU)
    seen.add(0, torch.zeros(2, 1, 3, 8))
    assert int(seen.choose().min()) >= 1


def test_the_largest_values_have_an_exponent_that_a_file_may_have() -> None:
    seen = Seen.nothing(1, 1, CPU)
    seen.add(0, torch.full((2, 1, 3, 8), 3e38))
    assert int(seen.choose().max()) == MAX_EXPONENT
