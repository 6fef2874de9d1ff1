"""Routings as the router of Hopper gives them, for benchmarks of experts."""

import torch

from oscine.ops.cases import random_routing
from oscine.ops.interface import Routing
from oscine.ops.norm.triton import UNCOUNTED_TOKENS


def draw(count: int, num_tokens: int, num_experts: int, per_token: int, device: torch.device) -> list[Routing]:
    """So many, every set of experts alike; few tokens are not counted."""
    routings = [random_routing(num_tokens, num_experts, per_token, device) for _ in range(count)]
    if num_tokens > UNCOUNTED_TOKENS:
        return routings
    return [Routing(routing.expert_ids_TK, routing.weights_TK) for routing in routings]
