"""Chooses each row's token among a few allowed ones. Only their logits are computed, with every backend.

Shape suffixes as in ops/interface.py, and A: allowed tokens of a row, ascending; shorter rows repeat their last one.
"""

import torch
from torch import Tensor

from oscine.ops.sample.reference import LOWEST_TEMPERATURE


def choose_few(x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
    """int64 [K]: the token that sampling from all logits would choose with a mask. Noise is as in gumbel."""
    best_K1 = _scores(x_KH, weight_VH[few_KA], temperature_K, noise_KA).argmax(-1, keepdim=True)
    return few_KA.gather(1, best_K1).squeeze(1)


def best_of_few(
    x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """The choice among those tokens that are in a part of the vocabulary, as sample.reference.best."""
    row_KA = few_KA - first
    inside_KA = (row_KA >= 0) & (row_KA < len(weight_VH))
    weight_KAH = weight_VH[row_KA.clamp(0, len(weight_VH) - 1)]
    scores_KA = _scores(x_KH, weight_KAH, temperature_K, noise_KA).masked_fill(~inside_KA, -torch.inf)
    values_K1, best_K1 = scores_KA.max(-1, keepdim=True)
    return values_K1.squeeze(1), few_KA.gather(1, best_K1).squeeze(1)


def _scores(x_KH: Tensor, weight_KAH: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
    logits_KA = torch.bmm(weight_KAH.float(), x_KH.float()[:, :, None]).squeeze(2)
    temperature_K1 = temperature_K[:, None]
    noisy_KA = logits_KA / temperature_K1.clamp(min=LOWEST_TEMPERATURE) + noise_KA
    return torch.where(temperature_K1 == 0, logits_KA, noisy_KA)
