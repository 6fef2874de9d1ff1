"""The router's norm for Hopper: triton.py's kernels, which also write the FP8 planes that experts with few tokens want.

Shape suffixes: T tokens, H hidden, E experts.
"""

from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.norm import triton as portable
from oscine.ops.planes import empty_planes, wanted
from oscine.ops.target import Target


def norm_route(
    target: Target,
    x: Tensor,
    weight_H: Tensor,
    eps: float,
    residual_TH: Tensor,
    router_weight_EH: Tensor,
    router_bias_E: Tensor,
    experts_per_token: int,
) -> tuple[Tensor, Tensor, Routing]:
    """As that of triton.py; H must be a multiple of 32 where planes are wanted."""
    (num_tokens, hidden), num_experts = residual_TH.shape, router_bias_E.shape[0]
    fp8 = wanted(num_tokens, experts_per_token, num_experts)
    planes = empty_planes(num_tokens, hidden, x.device) if fp8 else None
    return portable.norm_route(
        target, x, weight_H, eps, residual_TH, router_weight_EH, router_bias_E, experts_per_token, planes
    )
