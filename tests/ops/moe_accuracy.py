"""Errors of experts against float64, beside those of the portable kernels that multiply the same activations.

Sums and SwiGLU in float64 are an oracle of their own: only the MXFP4 weights and the rounding of activations are the
engine's. The portable kernels are interpreted in float32, whose products are exact as bfloat16's are, because Triton's
interpreter multiplies bfloat16 wrongly. What they store is rounded here as they round it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import fp8
from oscine.ops.moe import triton as portable
from oscine.ops.moe.mxfp4 import dequantize
from tests.ops.bound import CPU_TARGET

LIMIT = 7.0  # of SwiGLU


@dataclass(frozen=True)
class Errors:
    """Relative, by norm."""

    of_format: float  # against float64 with the same rounded activations
    of_all: float  # against float64 with exact activations


def in_float64(x_TH: Tensor, routing: Routing, experts: MxExperts, *, rounds: bool) -> Tensor:
    """float64 [T, H]. rounds: x and h are rounded to FP8 as the definition says."""
    x_TH = (fp8.round_rows(x_TH.float()) if rounds else x_TH).double()
    out_TH = torch.zeros_like(x_TH)
    gate_up = dequantize(experts.gate_up_blocks, experts.gate_up_scales).double()
    down = dequantize(experts.down_blocks, experts.down_scales).double()
    for token, ids_K in enumerate(routing.expert_ids_TK.tolist()):
        for k, expert in enumerate(ids_K):
            first = gate_up[expert] @ x_TH[token] + experts.gate_up_bias[expert].double()
            gate, up = first[0::2].clamp(max=LIMIT), first[1::2].clamp(-LIMIT, LIMIT)
            h = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            if rounds:
                h = fp8.round_h(h, LIMIT).double()
            y_H = down[expert] @ h + experts.down_bias[expert].double()
            out_TH[token] += routing.weights_TK[token, k].double() * y_H
    return out_TH


def by_portable_kernels(x_TH: Tensor, routing: Routing, experts: MxExperts, *, rounds: bool) -> Tensor:
    """bf16 [T, K, H]. rounds: x and h are in FP8, else bfloat16."""
    prepared = portable.prepare_experts(experts)
    up = portable.Matrix(prepared.gate_up_blocks, prepared.gate_up_scales, prepared.gate_up_bias)
    down = portable.Matrix(prepared.down_blocks, prepared.down_scales, prepared.down_bias)
    x_TH = x_TH.float()
    pairs = portable.sort(CPU_TARGET, routing, len(up.bias))
    h_TKI = portable.gated(CPU_TARGET, fp8.round_rows(x_TH) if rounds else x_TH, pairs, up, LIMIT)
    h_TKI = fp8.round_h(h_TKI, LIMIT) if rounds else h_TKI.bfloat16().float()
    return portable.weighted(CPU_TARGET, h_TKI, pairs, down).bfloat16()


def errors(parts_TKH: Tensor, x_TH: Tensor, routing: Routing, experts: MxExperts, *, rounds: bool = True) -> Errors:
    """Of partial sums [T, K, H]. rounds: their activations are in FP8."""
    found_TH = parts_TKH.double().sum(1)
    truths = [in_float64(x_TH, routing, experts, rounds=one) for one in dict.fromkeys((rounds, False))]
    found = [float((found_TH - truth).norm() / truth.norm()) for truth in truths]
    return Errors(found[0], found[-1])


def check_beside_portable(parts_TKH: Tensor, x_TH: Tensor, routing: Routing, experts: MxExperts) -> None:
    """An op with FP8 activations has at most twice the error of the portable kernels, with both truths."""
    ours = errors(parts_TKH, x_TH, routing, experts)
    theirs = errors(by_portable_kernels(x_TH, routing, experts, rounds=True), x_TH, routing, experts)
    assert ours.of_format <= 2 * theirs.of_format, (ours, theirs)
    assert ours.of_all <= 2 * theirs.of_all, (ours, theirs)
    assert 0.0005 < theirs.of_format < 0.004 < theirs.of_all, "results in bfloat16, of activations in FP8"
