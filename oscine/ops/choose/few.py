"""Chooses each row's token among a few allowed ones. Only their logits are computed, with every backend.

Shape suffixes as in ops/interface.py, and A: allowed tokens of a row, ascending; shorter rows repeat their last one.
"""

import torch
from torch import Tensor

from oscine.ops.sample.reference import LOWEST_TEMPERATURE


def choose_few(x_KH: Tensor, weight_VH: Tensor, few_KA: Tensor, temperature_K: Tensor, noise_KA: Tensor) -> Tensor:
    """int64 [K]: the token that sampling from all logits would choose with a mask. Noise is as in gumbel."""
    logits_KA = torch.bmm(weight_VH[few_KA].float(), x_KH.float()[:, :, None]).squeeze(2)
    temperature_K1 = temperature_K[:, None]
    noisy_KA = logits_KA / temperature_K1.clamp(min=LOWEST_TEMPERATURE) + noise_KA
    best_K1 = torch.where(temperature_K1 == 0, logits_KA, noisy_KA).argmax(-1, keepdim=True)
    return few_KA.gather(1, best_K1).squeeze(1)
