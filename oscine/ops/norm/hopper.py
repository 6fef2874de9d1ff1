"""The norm with the router for Hopper: triton.py's, which also writes the FP8 planes that few tokens want."""

from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.moe.hopper_choice import can_choose
from oscine.ops.norm import triton
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
    leave_choice: bool = False,
) -> tuple[Tensor, Tensor, Routing]:
    """leave_choice: the experts of a single token may be left to the moe of this backend (hopper_choice.py)."""
    router = router_weight_EH, router_bias_E, experts_per_token
    leaves = leave_choice and len(x) == 1 and can_choose(len(router_bias_E), experts_per_token)
    return triton.norm_route(target, x, weight_H, eps, residual_TH, *router, fp8=True, leave_choice=leaves)
