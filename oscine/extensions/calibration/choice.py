"""The choice of scales: from exact keys and values, by the least squared error.

The scales of a format with exponents of its own hardly change its error: e4m3 rounds a value alike under each scale
that lets it be normal. So the error of a head is the same for many exponents, until the largest values are clamped or
most values are too small. Of these exponents the middle one is taken: it has room for values of other prompts that are
larger, and for rows that are smaller.

Shape suffixes as in ops/interface.py; L layers, X exponents.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oscine.ops.kv.fp8 import LARGEST, MAX_EXPONENT, dequantise, exponent_for, power_of_two, quantise

MARGIN = 2  # values may be this much larger than the largest seen before they are clamped, at least
TOLERANCE = 0.01  # of the least squared error
TRIED = 16  # exponents, from the least that clamps nothing; under larger ones most values become 0
_NUM_EXPONENTS = 256


@dataclass(frozen=True, slots=True)
class Seen:
    """What is known of the keys and values of all layers."""

    largest_L2G: Tensor  # magnitude, float32
    squares_L2G: Tensor  # sum of squares, float64
    errors_L2GX: Tensor  # sum of squared errors under each exponent that clamps none of them, float64

    @classmethod
    def nothing(cls, layers: int, heads: int, device: torch.device) -> "Seen":
        shape, double = (layers, 2, heads), {"dtype": torch.float64, "device": device}
        return cls(
            torch.zeros(shape, device=device),
            torch.zeros(shape, **double),  # type: ignore[call-overload]
            torch.zeros(*shape, _NUM_EXPONENTS, **double),  # type: ignore[call-overload]
        )

    def add(self, layer: int, rows_2GTD: Tensor) -> None:
        """Keys and values of one prompt, float32."""
        largest_2G = rows_2GTD.abs().amax((-1, -2))
        squares_2G = rows_2GTD.double().square().sum((-1, -2))
        first_2G = exponent_for(largest_2G)
        errors_2GX = torch.where(_places(self) < first_2G[..., None] + TRIED, 0.0, squares_2G[..., None])
        for step in range(TRIED):
            exponents_2G = (first_2G + step).clamp(max=MAX_EXPONENT)
            error_2G = squared_error(rows_2GTD, exponents_2G)
            errors_2GX.scatter_(-1, exponents_2G.long()[..., None], error_2G[..., None])
        self.largest_L2G[layer] = self.largest_L2G[layer].maximum(largest_2G)
        self.squares_L2G[layer] += squares_2G
        self.errors_L2GX[layer] += errors_2GX

    def choose(self) -> Tensor:
        """The exponents [L, 2, G] that pages have, uint8."""
        least_L2G = exponent_for(self.largest_L2G * MARGIN).clamp(max=MAX_EXPONENT)
        allowed = (_places(self) >= least_L2G[..., None]) & (_places(self) <= MAX_EXPONENT)
        errors_L2GX = torch.where(allowed, self.errors_L2GX, torch.inf)
        bound = errors_L2GX.amin(-1, keepdim=True) * (1 + TOLERANCE)
        near = (errors_L2GX <= bound) & (_places(self) < least_L2G[..., None] + TRIED)
        lowest_L2G = torch.where(near, _places(self), _NUM_EXPONENTS).amin(-1)
        highest_L2G = torch.where(near, _places(self), 0).amax(-1)
        return ((lowest_L2G + highest_L2G) // 2).to(torch.uint8)


def _places(seen: Seen) -> Tensor:
    return torch.arange(_NUM_EXPONENTS, device=seen.largest_L2G.device)


def squared_error(rows_2GTD: Tensor, exponents_2G: Tensor | None) -> Tensor:
    """Sums [2, G] over all elements. None: each row has a scale of its own."""
    fixed = None if exponents_2G is None else exponents_2G[..., None]
    return (dequantise(*quantise(rows_2GTD, fixed)) - rows_2GTD).double().square().sum((-1, -2))


def num_clamped(rows_2GTD: Tensor, exponents_2G: Tensor) -> Tensor:
    """Elements [2, G] beyond the largest value of their scale."""
    return (rows_2GTD.abs() > LARGEST * power_of_two(exponents_2G)[..., None, None]).sum((-1, -2))
