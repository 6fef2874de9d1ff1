"""Routings as the router of Hopper gives them, for benchmarks of experts."""

from argparse import ArgumentParser

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_routing, skewed_routing
from oscine.ops import planes
from oscine.ops.interface import Routing
from oscine.ops.norm.triton import UNCOUNTED_TOKENS
from oscine.ops.target import Target

KINDS = {"uniform": random_routing, "skewed": skewed_routing}


def draw(
    count: int, num_tokens: int, num_experts: int, per_token: int, device: torch.device, kind: str = "uniform"
) -> list[Routing]:
    """`count` routings. Uniform: all sets of experts are equally likely; skewed: popular by a power law, each routing
    with an order of its own. Routings of few tokens have no counts."""
    routings = [KINDS[kind](num_tokens, num_experts, per_token, device) for _ in range(count)]
    if num_tokens > UNCOUNTED_TOKENS:
        return routings
    return [Routing(routing.expert_ids_TK, routing.weights_TK) for routing in routings]


def add_routing(parser: ArgumentParser) -> None:
    what = "how experts are drawn: all alike, or popular by a power law (default: %(default)s)"
    parser.add_argument("--routing", choices=KINDS, default="uniform", help=what)


def draw_for(
    target: Target, x_TH: Tensor, count: int, num_experts: int, per_token: int, kind: str = "uniform"
) -> list[Routing]:
    """The same with the planes of these tokens, if their norm would make them."""
    routings = draw(count, len(x_TH), num_experts, per_token, x_TH.device, kind)
    wanted = planes.wanted(target, len(x_TH), per_token, num_experts)
    split = planes.split(target, x_TH, wanted) if wanted else None
    return [routing._replace(prepared=split) for routing in routings]
