"""The mixture of experts of one layer: router, gated experts with packed MXFP4 weights, weighted sum.

    l = x W_r^T + b_r;  the K experts of largest l;  w = softmax over those K
    h = x W_gu^T + b_gu;  gate = min(h[0::2], limit);  up = clamp(h[1::2], -limit, limit)
    a = (up + 1) * gate * sigmoid(1.702 gate)
    y = sum over the K experts of w * (a W_d^T + b_d)

With FP8 activations x and a are rounded to FP8 before they are multiplied (fp8.py).

The definition, and the path on a CPU without native kernels: weights stay packed, and a step expands only the experts
that it uses, one at a time; those of a small model are expanded once. Computes in float32 and rounds once at the end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe.fp8 import round_h, round_rows
from oscine.ops.moe.mxfp4 import BLOCK, dequantize
from oscine.ops.target import Target

SWIGLU_ALPHA = 1.702
SMALL_BYTES = 64 << 20  # of a layer in float32: more than the embedded model's 6 MB, less than the 3 GB of gpt-oss-20b


@dataclass(frozen=True, slots=True)
class ExpandedExperts:
    """As MxExperts, all in float32."""

    gate_up_weight: Tensor  # [E, 2I, H]
    gate_up_bias: Tensor
    down_weight: Tensor  # [E, H, I]
    down_bias: Tensor


Experts = MxExperts | ExpandedExperts


@dataclass(frozen=True, slots=True)
class WithFp8Activations:
    experts: Experts


def prepare_experts(target: Target, experts: MxExperts) -> Experts | WithFp8Activations:
    prepared = _expanded_if_small(experts)
    return WithFp8Activations(prepared) if target.activation_dtype == "fp8" else prepared


def _expanded_if_small(experts: MxExperts) -> Experts:
    num_weights = BLOCK * (experts.gate_up_scales.numel() + experts.down_scales.numel())
    if num_weights * torch.float32.itemsize > SMALL_BYTES:
        return experts
    return ExpandedExperts(
        dequantize(experts.gate_up_blocks, experts.gate_up_scales),
        experts.gate_up_bias.float(),
        dequantize(experts.down_blocks, experts.down_scales),
        experts.down_bias.float(),
    )


def moe(x_TH: Tensor, routing: Routing, experts: Experts | WithFp8Activations, swiglu_limit: float) -> Tensor:
    """[T, H] -> [T, H] in the dtype of x."""
    x_TH, dtype = x_TH.float(), x_TH.dtype
    fp8 = isinstance(experts, WithFp8Activations)
    if isinstance(experts, WithFp8Activations):
        x_TH, experts = round_rows(x_TH), experts.experts
    out_TH = torch.zeros_like(x_TH)
    ids, added = routing.expert_ids_TK.flatten(), routing.added
    added_PN = None if added is None else added.first(x_TH).float()
    h_PI = None if added is None else x_TH.new_empty(len(ids), experts.gate_up_bias.shape[1] // 2)
    rows, counts = ids.argsort(stable=True), torch.bincount(ids, minlength=experts.gate_up_bias.shape[0])
    experts_per_token = routing.weights_TK.shape[1]
    start = 0
    for expert, count in enumerate(counts.tolist()):
        chosen = rows[start : start + count]
        start += count
        if count:
            token = chosen // experts_per_token
            more = None if added_PN is None else added_PN[chosen]
            y, h = _expert(x_TH[token], experts, expert, swiglu_limit, fp8, more)
            if h_PI is not None:
                h_PI[chosen] = h
            out_TH.index_add_(0, token, y * routing.weights_TK.flatten()[chosen, None])
    if added is not None and h_PI is not None:
        y_TKH = out_TH.new_empty(len(out_TH), experts_per_token, out_TH.shape[1])
        added.second(h_PI, y_TKH, adds=False)
        out_TH += y_TKH.sum(1)
    return out_TH.to(dtype)


def route(x_TH: Tensor, weight_EH: Tensor, bias_E: Tensor, experts_per_token: int) -> Routing:
    """Ids are int64; weights sum to 1."""
    logits_TE = functional.linear(x_TH.float(), weight_EH.float(), bias_E.float())
    top_TK, ids_TK = logits_TE.topk(experts_per_token, dim=-1)
    return Routing(ids_TK, top_TK.softmax(-1))


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """[T, 2I], interleaved gate and up -> [T, I]."""
    gate = gate_up[:, 0::2].clamp(max=limit)
    up = gate_up[:, 1::2].clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(SWIGLU_ALPHA * gate)


def _expert(
    x: Tensor, experts: Experts, index: int, limit: float, fp8: bool, added: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The second product, and what it multiplies. `added`: to the first product."""
    if isinstance(experts, ExpandedExperts):
        gate_up, down = experts.gate_up_weight[index], experts.down_weight[index]
    else:
        gate_up = dequantize(experts.gate_up_blocks[index], experts.gate_up_scales[index])
        down = dequantize(experts.down_blocks[index], experts.down_scales[index])
    first = functional.linear(x, gate_up, experts.gate_up_bias[index].float())
    hidden = swiglu(first if added is None else first + added, limit)
    if fp8:
        hidden = round_h(hidden, limit)
    return functional.linear(hidden, down, experts.down_bias[index].float()), hidden
