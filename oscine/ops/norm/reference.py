"""RMSNorm, fused with the residual addition before it. The definition; any device, any float dtype.

s = x + residual
y = s / sqrt(mean(s^2) + eps) * weight        in float32, rounded once to the dtype of x
"""

import torch
from torch import Tensor


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (y, s), both [T, H] in the dtype of x; s is x itself where there is no residual."""
    sum_TH = x_TH if residual_TH is None else x_TH + residual_TH
    wide_TH = sum_TH.float()
    inverse_rms_T1 = torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + eps)
    return (wide_TH * inverse_rms_T1 * weight_H).to(x_TH.dtype), sum_TH
