"""Routings as the router of Hopper gives them, for benchmarks of experts."""

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_routing
from oscine.ops import planes
from oscine.ops.interface import Routing
from oscine.ops.norm.triton import UNCOUNTED_TOKENS
from oscine.ops.target import Target


def draw(count: int, num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> list[Routing]:
    """`count` routings, with all sets of experts equally likely. Routings of few tokens have no counts."""
    routings = [random_routing(num_tokens, num_experts, per_token, device) for _ in range(count)]
    if num_tokens > UNCOUNTED_TOKENS:
        return routings
    return [Routing(routing.expert_ids_TK, routing.weights_TK) for routing in routings]


def draw_for(target: Target, x_TH: Tensor, count: int, num_experts: int, per_token: int) -> list[Routing]:
    """The same with the planes of these tokens, if their norm would make them."""
    routings = draw(count, len(x_TH), num_experts, per_token, x_TH.device)
    wanted = planes.wanted(target, len(x_TH), per_token, num_experts)
    split = planes.split(target, x_TH, wanted) if wanted else None
    return [routing._replace(prepared=split) for routing in routings]
