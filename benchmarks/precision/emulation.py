"""Experts in other precisions, by plain torch on any device: the truth, the yardstick, and formats of activations.

Weights are the published ones, whose values both bfloat16 and float32 hold exactly. Shape suffixes as in
oscine/ops/interface.py.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.precision.formats import Rounding
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.moe.reference import swiglu


@dataclass(frozen=True, slots=True)
class Bfloat16Experts:
    """As MxExperts, with the matrices in bfloat16: four times the memory, and no time to expand them in each run."""

    gate_up: Tensor  # [E, 2I, H]
    gate_up_bias: Tensor
    down: Tensor  # [E, H, I]
    down_bias: Tensor


Experts = MxExperts | Bfloat16Experts
Moe = Callable[[Tensor, Routing, Experts, float], Tensor]
# (x, gate_up, its bias, down, its bias, limit) -> [T, H] float32, all of one expert
Expert = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Tensor]


def expand(experts: MxExperts) -> Bfloat16Experts:
    every = range(len(experts.gate_up_bias))
    return Bfloat16Experts(
        torch.stack([dequantize(experts.gate_up_blocks[i], experts.gate_up_scales[i]).bfloat16() for i in every]),
        experts.gate_up_bias,
        torch.stack([dequantize(experts.down_blocks[i], experts.down_scales[i]).bfloat16() for i in every]),
        experts.down_bias,
    )


def rounding_moe(of_x: Rounding, of_h: Rounding) -> Moe:
    """Activations are rounded before each product. All else is in float32, and the sum is rounded once."""

    def expert(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor, limit: float) -> Tensor:
        h = swiglu(functional.linear(of_x(x.float()), gate_up.float(), bias.float()), limit)
        return functional.linear(of_h(h), down.float(), down_bias.float())

    return lambda *inputs: _sum(expert, *inputs)


def plain_moe(x_TH: Tensor, routing: Routing, experts: Experts, limit: float) -> Tensor:
    """As torch computes it in bfloat16: each product, and each step of SwiGLU, is rounded."""

    def expert(x: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor, down_bias: Tensor, limit: float) -> Tensor:
        h = swiglu(functional.linear(x, gate_up.to(x.dtype), bias.to(x.dtype)), limit)
        return functional.linear(h, down.to(x.dtype), down_bias.to(x.dtype)).float()

    return _sum(expert, x_TH, routing, experts, limit)


def _sum(expert: Expert, x_TH: Tensor, routing: Routing, experts: Experts, limit: float) -> Tensor:
    out_TH = torch.zeros(x_TH.shape, device=x_TH.device)
    ids, per_token = routing.expert_ids_TK.flatten(), routing.weights_TK.shape[1]
    for index in ids.unique().tolist():
        chosen = (ids == index).nonzero().flatten()
        token = chosen // per_token
        y = expert(x_TH[token], *_matrices(experts, index), limit)
        out_TH.index_add_(0, token, y * routing.weights_TK.flatten()[chosen, None])
    return out_TH.to(x_TH.dtype)


def _matrices(experts: Experts, index: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up_bias, down_bias = experts.gate_up_bias[index], experts.down_bias[index]
    if isinstance(experts, Bfloat16Experts):
        return experts.gate_up[index], gate_up_bias, experts.down[index], down_bias
    gate_up = dequantize(experts.gate_up_blocks[index], experts.gate_up_scales[index])
    return gate_up, gate_up_bias, dequantize(experts.down_blocks[index], experts.down_scales[index]), down_bias
