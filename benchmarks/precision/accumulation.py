"""Sums of FP8 products as Hopper's tensor cores make them, emulated product by product, against exact sums.

    python -m benchmarks.precision.accumulation

An instruction adds 32 products to an accumulator. All 33 terms are cut off, towards zero, at 13 bits below the largest
exponent among them, and so is their sum. This is a model, from published measurements of such chips. "Promotion" is to
add the accumulator to a float32 sum every so many columns.

Shape suffixes: T tokens, K columns, N rows of the weights.
"""

import torch
from torch import Tensor

from benchmarks.precision.formats import e4m3, with_scales
from oscine.ops.moe.mxfp4 import MAGNITUDES

COLUMNS = 32  # of an instruction
FRACTION = 13  # bits below the largest exponent
NOTHING = -1000  # exponent of zero
TOKENS, ROWS, WIDTH = 16, 128, 2880
PROMOTIONS = (32, 64, 128, 192, 288, 576, WIDTH)


def product(x_TK: Tensor, weight_NK: Tensor, promotion: int) -> Tensor:
    """[T, N] float32. `promotion`: columns, a multiple of 32."""
    total_TN = torch.zeros(len(x_TK), len(weight_NK))
    for x, weight in zip(x_TK.split(promotion, 1), weight_NK.split(promotion, 1), strict=True):
        accumulator_TN = torch.zeros(total_TN.shape, dtype=torch.float64)
        for columns in zip(x.split(COLUMNS, 1), weight.split(COLUMNS, 1), strict=True):
            accumulator_TN = _add(accumulator_TN, columns[0][:, None], columns[1][None])
        total_TN += accumulator_TN.float()
    return total_TN


def _add(accumulator_TN: Tensor, x_T1K: Tensor, weight_1NK: Tensor) -> Tensor:
    products_TNK = x_T1K.double() * weight_1NK.double()
    largest_TN = (_exponent(x_T1K) + _exponent(weight_1NK)).amax(-1).maximum(_exponent(accumulator_TN))
    terms = torch.cat((products_TNK, accumulator_TN[..., None]), -1)
    total_TN = _cut(terms, largest_TN[..., None]).sum(-1)
    return _cut(total_TN, _exponent(total_TN))


def _exponent(values: Tensor) -> Tensor:
    return torch.where(values == 0, NOTHING, torch.frexp(values).exponent - 1)


def _cut(values: Tensor, exponent: Tensor) -> Tensor:
    """Without the bits below FRACTION of this exponent."""
    shift = FRACTION - exponent.clamp(min=NOTHING)
    return torch.ldexp(torch.ldexp(values, shift).trunc(), -shift)


def weights() -> Tensor:
    """MXFP4 values with scales as those of random_weights, [N, K]."""
    scales = torch.randint(-9, -5, (ROWS, WIDTH // 32, 1)).float().exp2()
    magnitudes = torch.tensor(MAGNITUDES)[torch.randint(0, 8, (ROWS, WIDTH // 32, 32))]
    return (magnitudes * scales).flatten(1) * torch.randint(0, 2, (ROWS, WIDTH)).mul(2).sub(1)


def main() -> None:
    torch.manual_seed(0)
    x_TK, weight_NK = torch.randn(TOKENS, WIDTH), weights()
    outliers = torch.ones(WIDTH)
    outliers[7::360] = 20
    cases = {
        "normal": (x_TK, weight_NK),
        "eight channels x 20": (x_TK * outliers, weight_NK),
        "all products positive": (x_TK.abs(), weight_NK.abs()),
    }
    print(f"| x | e4m3 | promotion every {' | '.join(map(str, PROMOTIONS))} |\n|{'---|' * (len(PROMOTIONS) + 2)}")
    for name, (x, weight) in cases.items():
        held = with_scales(e4m3)(x)
        true, exact = x.double() @ weight.double().T, held.double() @ weight.double().T
        errors = [exact - true] + [product(held, weight, columns) - exact for columns in PROMOTIONS]
        print(f"| {name} | {' | '.join(f'{float(error.norm() / true.norm()):.1e}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
