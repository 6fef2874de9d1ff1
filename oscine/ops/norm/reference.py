"""RMSNorm, fused with the residual addition before it, and with the router after it. The definitions; any device.

s = x + residual
y = s / sqrt(mean(s^2) + eps) * weight        in float32, rounded once to the dtype of x
"""

import torch
from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.moe.reference import route


def rms_norm(x: Tensor, weight_H: Tensor, eps: float, residual_TH: Tensor | None) -> tuple[Tensor, Tensor]:
    """x [T, H] or partial sums [T, J, H]. Returns (y, s), both [T, H] in the dtype of the weight.

    s is x itself where there is no residual.
    """
    dtype = weight_H.dtype
    x_TH = x.float().sum(1).to(dtype) if x.dim() == 3 else x
    sum_TH = x_TH if residual_TH is None else x_TH + residual_TH
    wide_TH = sum_TH.float()
    inverse_rms_T1 = torch.rsqrt(wide_TH.square().mean(-1, keepdim=True) + eps)
    return (wide_TH * inverse_rms_T1 * weight_H).to(dtype), sum_TH


def norm_route(
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor,
    experts_per_token: int,
) -> tuple[Tensor, Tensor, Routing]:
    """rms_norm, and the routing of its first result. Ties between experts have no defined order."""
    y_TH, sum_TH = rms_norm(x, weight_H, eps, residual_TH)
    return y_TH, sum_TH, route(y_TH, router_weight_EH, router_bias_E, experts_per_token)
