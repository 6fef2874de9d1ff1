"""The table of cosines and sines that rope ops read: YaRN (Peng et al., arXiv:2309.00071, sections 3.2 to 3.4).

For dimension pair j of D/2, with base b (rope_theta), context L of the original training, and factor s:

    f_j     = b^(-2j/D)
    bound(r) = D ln(L / (2 pi r)) / (2 ln b)              the pair that turns r times within L; not rounded
    ramp_j  = clamp((j - bound(beta_fast)) / (bound(beta_slow) - bound(beta_fast)), 0, 1)
    angle   = position * (f_j / s * ramp_j + f_j * (1 - ramp_j))
    cos, sin are multiplied by the attention factor 0.1 ln(s) + 1
"""

import math

import torch
from torch import Tensor


def yarn_cos_sin(
    num_positions: int,
    head_dim: int,
    device: torch.device,
    *,
    rope_theta: float,
    factor: float,
    beta_fast: float,
    beta_slow: float,
    original_max_position_embeddings: int,
    rounded: bool = False,
) -> Tensor:
    """[num_positions, head_dim] float32: head_dim / 2 cosines, then as many sines.

    A factor of 1 is rope without YaRN. `rounded`: the bounds of the ramp are rounded outwards, as transformers does by
    default.
    Angles are float32 products, as in training: at position 5,000 a float64 angle differs by 3e-4.
    """
    power = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    turns = 1.0 / rope_theta**power
    low, high = (
        ramp_bound(beta, head_dim, rope_theta, original_max_position_embeddings) for beta in (beta_fast, beta_slow)
    )
    if rounded:
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequency = 1.0 / (factor * rope_theta**power) * ramp + turns * (1 - ramp)
    angle = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequency
    attention_factor = 0.1 * math.log(factor) + 1.0
    return (torch.cat((angle.cos(), angle.sin()), dim=-1) * attention_factor).to(device)


def ramp_bound(rotations: float, head_dim: int, base: float, original_length: int) -> float:
    """Index (not rounded) of the dimension pair that turns this often within the original context."""
    return head_dim * math.log(original_length / (2 * math.pi * rotations)) / (2 * math.log(base))
