"""Chooses each row's token among a few allowed ones. Only their logits are computed, with every backend.

Shape suffixes as in ops/interface.py, and A: allowed tokens of a row, ascending; shorter rows repeat their last one.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oscine.ops.sample.reference import LOWEST_TEMPERATURE

# (x_KH, weight_VH, rows of it [K, A]) -> float32 [K, A]
Logits = Callable[[Tensor, Any, Tensor], Tensor]


def logits(x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor) -> Tensor:
    return torch.bmm(weight_VH[few_KA].float(), x_KH.float()[:, :, None]).squeeze(2)


def choices(logits: Logits) -> tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]:
    """choose_few and best_of_few of a backend that computes these logits."""

    def choose_few(x_KH: Tensor, weight_VH: Any, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
        """int64 [K]: the token that sampling from all logits would choose with a mask. Noise is as in gumbel."""
        scores_KA = _scores(logits(x_KH, weight_VH, few_KA), temperature_K, noise_KA)
        return few_KA.gather(1, scores_KA.argmax(-1, keepdim=True)).squeeze(1)

    def best_of_few(
        x_KH: Tensor, weight_VH: Any, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor, first: int
    ) -> tuple[Tensor, Tensor]:
        """The choice among those tokens that are in a part of the vocabulary, as sample.reference.best."""
        row_KA = few_KA - first
        inside_KA = (row_KA >= 0) & (row_KA < len(weight_VH))
        logits_KA = logits(x_KH, weight_VH, row_KA.clamp(0, len(weight_VH) - 1))
        scores_KA = _scores(logits_KA, temperature_K, noise_KA).masked_fill(~inside_KA, -torch.inf)
        values_K1, best_K1 = scores_KA.max(-1, keepdim=True)
        return values_K1.squeeze(1), few_KA.gather(1, best_K1).squeeze(1)

    return choose_few, best_of_few


choose_few, best_of_few = choices(logits)


def _scores(logits_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
    temperature_K1 = temperature_K[:, None]
    noisy_KA = logits_KA / temperature_K1.clamp(min=LOWEST_TEMPERATURE) + noise_KA
    return torch.where(temperature_K1 == 0, logits_KA, noisy_KA)
