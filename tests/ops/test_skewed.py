"""The kernels on inputs as trained models have them: outlier channels, popular experts, attention sinks, peaked logits.

The limits of errors are those of other inputs, which follow from the formats: see the modules of the checks.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import made_for_outliers, outlier_channels, random_experts, skewed_routing, with_outliers
from oscine.model.skewed_weights import router_bias
from oscine.ops import planes
from oscine.ops.attention import hopper as hopper_attention
from oscine.ops.attention import triton as attention_kernels
from oscine.ops.linear import native as native_linear
from oscine.ops.moe import hopper as hopper_moe
from oscine.ops.moe import native as native_moe
from oscine.ops.moe import reference as reference_moe
from oscine.ops.native.library import unavailable
from oscine.ops.native.weights import pack_dense
from oscine.ops.norm import reference as reference_norm
from oscine.ops.norm import triton as norm
from oscine.ops.qkv import hopper as qkv_hopper
from tests.ops import (
    test_attention_gpu,
    test_choose,
    test_fp8_kernels,
    test_linear_gpu,
    test_moe_fp8,
    test_moe_hopper,
    test_norm_gpu,
    test_planes,
)
from tests.ops.bound import CPU_TARGET, bound
from tests.ops.cases import ATTENTION_CASES, AttentionCase, attention_inputs, in_fp8, with_attention_sinks
from tests.ops.compile_ahead import run_interpreted
from tests.ops.gluon_interpreter import run_gluon

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
INT8_ERROR = 0.015  # as in test_native.py
TOKENS = (1, 3, 8, 64, 300, 1000, 8192)
ATTENTION = [
    pytest.param(bound(attention_kernels.attention), marks=pytest.mark.gpu, id="triton"),
    pytest.param(bound(hopper_attention.attention), marks=pytest.mark.hopper, id="hopper"),
]
LONG = AttentionCase(
    "decodes, one of a long context", ((1, 1), (1, 9000), (1, 130), (1, 64)), num_query_heads=64, num_kv_heads=8
)
PROMPTS = AttentionCase("decodes and prompts", ((1, 700), (300, 300), (77, 2000)), num_query_heads=64, num_kv_heads=8)


# ---- experts ----


def check_experts(tokens: int, experts: int, size: int, device: torch.device, *, fp8: bool = False) -> None:
    torch.manual_seed(tokens)
    published = made_for_outliers(test_moe_hopper.published_experts(experts, size, size, device))
    x_TH = with_outliers(torch.randn(tokens, size, device=device)).bfloat16()
    check = test_moe_fp8.check_inputs if fp8 else test_moe_hopper.check
    check(x_TH, skewed_routing(tokens, experts, 4, device), published)


@pytest.mark.hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["exact", "fp8"])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize(("experts", "size"), [(128, 320), (32, 2880)])
def test_experts_on_hopper(tokens: int, experts: int, size: int, fp8: bool) -> None:
    check_experts(tokens, experts, size, CUDA, fp8=fp8)


@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")
def test_kernels_in_c(num_tokens: int) -> None:
    """They round activations to 1/127 of the largest of 32."""
    torch.manual_seed(num_tokens)
    experts = made_for_outliers(random_experts(16, 256, 128, CPU, torch.float32, scales=(118, 124)))
    x, routing = with_outliers(torch.randn(num_tokens, 256)), skewed_routing(num_tokens, 16, 4, CPU)
    expected = reference_moe.moe(x, routing, reference_moe.prepare_experts(CPU_TARGET, experts), 7.0)
    found = native_moe.moe(x, routing, native_moe.prepare_experts(experts), 7.0)
    assert (found - expected).norm() <= INT8_ERROR * expected.norm()
    step = x.view(num_tokens, -1, 32).abs().amax(-1, keepdim=True) / 127
    rounded = (x.view(num_tokens, -1, 32) / step).round().mul(step).view_as(x)
    weight = torch.randint(-127, 128, (24, 256)).float()
    weight[:, ::32] = 127  # so that int8 holds the weights
    logits = native_linear.lm_head(x, pack_dense(weight.bfloat16(), "int8"))
    torch.testing.assert_close(logits, rounded @ weight.T, rtol=1e-5, atol=1e-5 * 127 * float(x.norm()))


# ---- projections and norms ----


def check_projections(
    op: Callable[..., tuple[Tensor, Tensor]],
    num_tokens: int,
    device: str,
    prepare: Callable[[Tensor], Any],
    **sizes: int,
) -> None:
    case = test_linear_gpu.projection(num_tokens, device, **sizes)
    test_linear_gpu.check_norm_qkv(op, replace(case, **skewed_norm(case.norm_H, case.residual_TH)), prepare)


def skewed_norm(norm_H: Tensor, residual_TH: Tensor) -> dict[str, Tensor]:
    """A residual stream with outliers, of which a norm's gains leave 3 times the others."""
    norm_H = norm_H.clone()
    norm_H[outlier_channels(len(norm_H))] /= 100
    return {"norm_H": norm_H, "residual_TH": with_outliers(residual_TH)}


@pytest.mark.parametrize("num_tokens", [1, 3, 9, 17, 33, 65, 777])
@pytest.mark.parametrize(
    ("backend", "prepare"),
    [
        pytest.param("triton", test_linear_gpu.as_it_is, marks=pytest.mark.gpu),
        pytest.param("hopper", test_linear_gpu.as_it_is, marks=pytest.mark.hopper),
        pytest.param("hopper", test_linear_gpu.packed, marks=pytest.mark.hopper),
    ],
    ids=["triton", "hopper", "12 bits"],
)
def test_projections_on_gpu(backend: str, prepare: Callable[[Tensor], Any], num_tokens: int) -> None:
    check_projections(test_linear_gpu.NORM_QKV[backend], num_tokens, "cuda", prepare)


def norm_and_router(
    tokens: int, partials: int, hidden: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> test_norm_gpu.Inputs:
    made = test_norm_gpu.inputs(tokens, partials, hidden, 32, 4, dtype, device)
    x, weight_H, eps, residual_TH, router_EH, _, k = made
    skewed = skewed_norm(weight_H, residual_TH)
    router_EH[:, outlier_channels(hidden)] = 0
    return x, skewed["norm_H"], eps, skewed["residual_TH"], router_EH, router_bias(32, k).to(device, dtype), k


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 4, 17, 129, 3000])
@pytest.mark.parametrize("activation_dtype", ["auto", "fp8"])
def test_norms_on_hopper(tokens: int, activation_dtype: Any) -> None:
    arguments = norm_and_router(tokens, 4, 2880, CUDA)
    test_norm_gpu.check_hoppers(arguments, activation_dtype)
    x, weight_H, eps, residual_TH, *router, _ = arguments
    y_TH, total_TH, routing = bound(norm.norm_route)(*arguments)
    exact_y, exact_total = reference_norm.rms_norm(x.sum(1), weight_H.float(), eps, residual_TH.float())
    torch_y, torch_total = reference_norm.rms_norm(x, weight_H, eps, residual_TH)
    assert test_norm_gpu.error(total_TH, exact_total) <= 2 * test_norm_gpu.error(torch_total, exact_total)
    assert test_norm_gpu.error(y_TH, exact_y) <= 2 * test_norm_gpu.error(torch_y, exact_y)
    test_norm_gpu.check_routing(routing, y_TH, *router)


@pytest.mark.hopper
@pytest.mark.parametrize("count", [1, 2])
def test_planes_on_hopper(count: int) -> None:
    x_TH = with_outliers(torch.randn(50, 2880, device=CUDA)).bfloat16()
    test_planes.check_planes(bound(planes.split)(x_TH, count), x_TH)


# ---- attention ----


@pytest.mark.parametrize("attention", ATTENTION)
@pytest.mark.parametrize("case", [replace(case, window=window) for case in (LONG, PROMPTS) for window in (None, 128)])
def test_attention_on_gpu(attention: Callable[..., Tensor], case: AttentionCase) -> None:
    inputs = with_attention_sinks(attention_inputs(case, CUDA, torch.bfloat16))
    test_attention_gpu.check_error(attention, case, test_attention_gpu.with_and_without_decodes(inputs))
    test_fp8_kernels.check_reads(attention, case, test_attention_gpu.with_and_without_decodes(in_fp8(inputs)))


# ---- the choice of a token ----


def check_choices(vocab: int, hidden: int, num_rows: int, device: torch.device) -> None:
    """Each row prefers some token clearly, beside outliers that say little; others of the head are nearly alike."""
    for name, weight_VH in test_choose.heads(vocab, hidden).items():
        weight_VH = weight_VH.bfloat16()
        x_NH = with_outliers(torch.randn(num_rows, hidden, generator=torch.Generator().manual_seed(0)))
        preferred_NH = weight_VH[torch.arange(num_rows) * 7 % vocab].float()
        x_NH = (x_NH + 40 * preferred_NH / preferred_NH.square().mean().sqrt()).bfloat16()
        if device.type == "cpu":
            test_choose.check_bounds(name, weight_VH, x_NH)
        for greedy in (True, False):
            sampling = test_choose.batch(num_rows, device, greedy=greedy)
            test_choose.check_choice(weight_VH.to(device), x_NH.to(device), sampling)


@pytest.mark.hopper
@pytest.mark.parametrize("num_rows", [1, 8, 33, 64])
def test_choices_on_hopper(num_rows: int) -> None:
    check_choices(20_011, 2880, num_rows, CUDA)


# ---- interpreted ----


def interpret_triton() -> None:
    test_planes.round_as_torch()
    for count in (1, 2):
        x_TH = with_outliers(torch.randn(5, 64)).bfloat16()
        test_planes.check_planes(bound(planes.split)(x_TH, count), x_TH)
    for tokens in (3, 20):
        test_norm_gpu.check_hoppers(norm_and_router(tokens, 2, 96, CPU))
        arguments = norm_and_router(tokens, 2, 96, CPU, torch.float32)
        y_TH, _, routing = bound(norm.norm_route)(*arguments)
        test_norm_gpu.check_routing(routing, y_TH, *arguments[4:6])
    for case in ATTENTION_CASES[2:7:2]:
        inputs = with_attention_sinks(attention_inputs(case, CPU, torch.float32))
        for variant in (inputs, in_fp8(inputs)):
            found, expected = (made(variant, case) for made in (test_attention_gpu.run, test_attention_gpu.truth))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_interpreted_kernels_in_triton() -> None:
    run_interpreted(interpret_triton)


def interpret_hopper() -> None:
    test_planes.round_as_torch()
    hopper_moe.SPREAD = 0  # fewer programs to interpret
    for tokens in (3, 12, 40):
        check_experts(tokens, 8, 64, CPU)
    check_experts(12, 8, 64, CPU, fp8=True)
    sizes = {"hidden": 192, "query_heads": 2, "kv_heads": 1, "page": 16}
    for prepare in (test_linear_gpu.as_it_is, test_linear_gpu.packed):
        check_projections(bound(qkv_hopper.norm_qkv), 9, "cpu", prepare, **sizes)
    case = AttentionCase("", ((1, 1), (1, 63), (1, 200)), num_query_heads=16, num_kv_heads=2)
    inputs = with_attention_sinks(attention_inputs(case, CPU, torch.bfloat16))
    test_attention_gpu.check_error(bound(hopper_attention.attention), case, [inputs])
    test_fp8_kernels.check_reads(bound(hopper_attention.attention), case, [in_fp8(inputs)])
    check_choices(300, 96, 3, CPU)


def test_interpreted_kernels_of_hopper() -> None:
    run_gluon(interpret_hopper)
