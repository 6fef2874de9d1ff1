"""The mixture of experts against a loop over tokens with an MXFP4 decoder of its own, and the format itself."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscine.ops.moe import reference
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.moe.reference import ExpandedExperts, moe, prepare_experts, route
from tests.ops.bound import CPU_TARGET
from tests.ops.cases import MOE_CASES, MoeCase, MoeInputs, moe_inputs

CPU = torch.device("cpu")


def e2m1(nibble: int) -> float:
    """By the definition of a float with one sign, two exponent (bias 1) and one mantissa bit."""
    sign, exponent, mantissa = nibble >> 3, nibble >> 1 & 3, nibble & 1
    size = mantissa / 2 if exponent == 0 else 2.0 ** (exponent - 1) * (1 + mantissa / 2)
    return -size if sign else size


def decode(blocks: Tensor, scales: Tensor) -> Tensor:
    """float64, nibble by nibble: [rows, K / 32, 16] and [rows, K / 32] -> [rows, K]."""
    nibbles = torch.tensor([e2m1(n) for n in range(16)], dtype=torch.float64)
    low, high = nibbles[(blocks & 15).long()], nibbles[(blocks >> 4).long()]
    return (torch.stack((low, high), -1).flatten(-2) * 2.0 ** (scales.double() - 127)[..., None]).flatten(-2)


def by_loops(inputs: MoeInputs) -> Tensor:
    """float64, token by token, expert by expert."""
    experts, limit, out = inputs.experts, inputs.swiglu_limit, []
    for x_H in inputs.x_TH.double():
        logits_E = inputs.router_weight_EH.double() @ x_H + inputs.router_bias_E.double()
        chosen = sorted(range(len(logits_E)), key=lambda e: -logits_E[e])[: inputs.experts_per_token]
        total = sum(math.exp(logits_E[e]) for e in chosen)
        y_H = torch.zeros_like(x_H)
        for e in chosen:
            h = decode(experts.gate_up_blocks[e], experts.gate_up_scales[e]) @ x_H + experts.gate_up_bias[e].double()
            gate = torch.minimum(h[0::2], torch.tensor(limit))
            up = torch.maximum(torch.minimum(h[1::2], torch.tensor(limit)), torch.tensor(-limit))
            activated = (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
            z_H = decode(experts.down_blocks[e], experts.down_scales[e]) @ activated + experts.down_bias[e].double()
            y_H += math.exp(logits_E[e]) / total * z_H
        out.append(y_H)
    return torch.stack(out)


def run(inputs: MoeInputs) -> Tensor:
    routing = route(inputs.x_TH, inputs.router_weight_EH, inputs.router_bias_E, inputs.experts_per_token)
    return moe(inputs.x_TH, routing, inputs.experts, inputs.swiglu_limit)


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def test_every_byte_under_every_scale() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16).contiguous()
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 16).contiguous()
    values = dequantize(blocks, scales)
    assert values.shape == (255, 512)
    for scale in range(255):
        expected = [(e2m1(b & 15) * 2.0 ** (scale - 127), e2m1(b >> 4) * 2.0 ** (scale - 127)) for b in range(256)]
        expected_float32 = torch.tensor(expected, dtype=torch.float64).float().flatten()  # 6 * 2^127 is infinite
        assert torch.equal(values[scale], expected_float32), scale
    assert dequantize(blocks[:1], torch.full_like(scales[:1], 255)).isnan().all()


@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.why)
def test_moe_equals_its_formula(case: MoeCase) -> None:
    inputs = moe_inputs(case, CPU, torch.float32)
    assert relative_error(run(inputs), by_loops(inputs)) < 1e-6


@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.why)
def test_small_layers_are_expanded_once_and_say_the_same(case: MoeCase, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = moe_inputs(case, CPU, torch.float32)
    expanded = prepare_experts(CPU_TARGET, inputs.experts)
    assert isinstance(expanded, ExpandedExperts)
    routing = route(inputs.x_TH, inputs.router_weight_EH, inputs.router_bias_E, inputs.experts_per_token)
    assert torch.equal(moe(inputs.x_TH, routing, expanded, inputs.swiglu_limit), run(inputs))
    size = sum(weight.nbytes for weight in (expanded.gate_up_weight, expanded.down_weight))
    monkeypatch.setattr(reference, "SMALL_BYTES", size)
    assert isinstance(prepare_experts(CPU_TARGET, inputs.experts), ExpandedExperts)
    monkeypatch.setattr(reference, "SMALL_BYTES", size - 1)
    assert prepare_experts(CPU_TARGET, inputs.experts) is inputs.experts


def test_bfloat16_is_rounded_once() -> None:
    inputs = moe_inputs(MOE_CASES[2], CPU, torch.bfloat16)
    out = run(inputs)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, by_loops(inputs)) < 2**-8


def test_a_token_does_not_depend_on_its_batch() -> None:
    inputs = moe_inputs(MOE_CASES[2], CPU, torch.float32)
    for row in (0, 17, 36):
        alone = replace(inputs, x_TH=inputs.x_TH[row : row + 1])
        assert relative_error(run(alone)[0], run(inputs)[row].double()) < 1e-6


def test_experts_that_no_token_chose_are_not_read() -> None:
    inputs = moe_inputs(MOE_CASES[1], CPU, torch.float32)
    logits = inputs.x_TH @ inputs.router_weight_EH.T + inputs.router_bias_E
    used = set(logits.topk(4).indices.flatten().tolist())
    expected = run(inputs)
    for expert in set(range(32)) - used:
        inputs.experts.gate_up_scales[expert] = 255  # NaN
    assert torch.equal(run(inputs), expected)
