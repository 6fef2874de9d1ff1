"""The norm with the router for Hopper: triton.py's, which also writes the FP8 planes that few tokens want."""

from typing import Any

from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.moe.hopper_choice import can_choose
from oscine.ops.norm import triton
from oscine.ops.target import Target

ADDS_UP = True  # partial sums over ranks (extensions/parallel/comm/ops.py)


def norm_route(target: Target, *arguments: Any, leave_choice: bool = False) -> tuple[Tensor, Tensor, Routing]:
    """Arguments as in triton.py. leave_choice: the experts of a single token may be left to the moe of this backend
    (hopper_choice.py)."""
    x, *_, bias_E, experts_per_token = arguments
    leaves = leave_choice and len(x) == 1 and can_choose(len(bias_E), experts_per_token)
    return triton.norm_route(target, *arguments, fp8=True, leave_choice=leaves)
