"""The precision benchmark: emulated formats, and runs whose routing is recorded and imposed."""

import pytest
import torch
from torch import Tensor

from benchmarks.precision.accumulation import product
from benchmarks.precision.emulation import expand, plain_moe, rounding_moe
from benchmarks.precision.formats import MXFP8, e4m3, int8, mxfp8_by_exponent, unchanged, with_factor, with_scales
from benchmarks.precision.kv_scales import CALIBRATION, Nano, calibrated
from benchmarks.precision.runs import Error, Load, Result, batch, run
from oscine.executor.kv.allocate import allocate_group
from oscine.extensions.bench.step_inputs import PAGE
from oscine.kv_dtype import KVDtype
from oscine.model.gpt_oss import GptOss
from oscine.ops.kv.fp8 import dequantise, quantise
from oscine.ops.moe import reference
from tests.model.tiny import CPU, Sequence, Stepper, model, tensors
from tests.ops.cases import MOE_CASES, MoeCase, moe_inputs
from tests.tiny import SMALL

PROMPT = 67  # more than a page
LOAD = Load.of_random_tokens(SMALL, 2, PROMPT)


def test_e4m3_with_a_power_of_two_per_row_is_that_of_keys_and_values() -> None:
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * torch.arange(50)[:, None]
    assert torch.equal(with_scales(e4m3)(rows), dequantise(*quantise(rows)))


def test_scales_of_blocks_and_rows() -> None:
    row = torch.tensor([[127.0, 0.4, 0.6, 2.0, 254.0, 3.0, 4.9, 0.0]])
    assert with_scales(int8, power_of_two=False)(row).tolist() == [[128.0, 0, 0, 2, 254, 4, 4, 0]]
    assert with_scales(int8, block=4)(row).tolist() == [[127.0, 0, 1, 2, 254, 4, 4, 0]]
    assert with_factor(e4m3, 8.0)(torch.tensor([[56.0, 60.0, 0.01]])).tolist() == [[56.0, 56.0, 0.009765625]]


def test_scales_of_mxfp8_by_both_rules() -> None:
    """They differ if the largest of 32 is above 448 times the smaller of two powers of two: one of them saturates."""
    up, by_exponent = MXFP8[0], mxfp8_by_exponent
    for largest, rounded_up, saturated in ((500.0, 512.0, 448.0), (100.0, 96.0, 96.0), (0.0, 0.0, 0.0)):
        row = torch.zeros(1, 40)
        row[0, 3], row[0, 35] = largest, 0.1
        assert up(row)[0, [3, 35]].tolist() == [rounded_up, 0.1015625]  # blocks have nothing to do with each other
        assert by_exponent(row)[0, [3, 35]].tolist() == [saturated, 0.1015625]


def test_sums_are_cut_off_towards_zero_below_13_bits() -> None:
    ones = torch.ones(1, 64)
    x = ones.clone()
    x[0, 0] = -(2.0**14)  # after it, ones are less than the last bit of the first 32 columns, and of the sum
    assert product(x, ones, 64).item() == -(2.0**14)
    assert product(x, ones, 32).item() == -(2.0**14) + 32
    assert product(ones, ones, 64).item() == 64


@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.why)
def test_experts_without_rounding_are_those_of_the_reference(case: MoeCase) -> None:
    given = moe_inputs(case, CPU, torch.float32)
    routing = reference.route(given.x_TH, given.router_weight_EH, given.router_bias_E, given.experts_per_token)
    expected = reference.moe(given.x_TH, routing, given.experts, given.swiglu_limit)
    for held in given.experts, expand(given.experts):
        for moe in rounding_moe(unchanged, unchanged), plain_moe:
            torch.testing.assert_close(moe(given.x_TH, routing, held, given.swiglu_limit), expected)


def whole(made: GptOss) -> Tensor:
    """Logits of both prompts, by another way to lay out steps."""
    return torch.cat([Stepper(made, 2).step((Sequence(row, 0), PROMPT))[0] for row in LOAD.tokens_SC])


def test_a_run_computes_prompts_and_a_token_after_each() -> None:
    made = model(SMALL, tensors(SMALL))
    result = run(made, LOAD)
    torch.testing.assert_close(result.logits[0], whole(made))
    stepper = Stepper(made, 2)
    sequence = Sequence(LOAD.tokens_SC[1], 0)
    stepper.step((sequence, PROMPT))
    torch.testing.assert_close(result.logits[1][1:], stepper.step((sequence, 1))[0])


def test_imposed_experts_replace_those_of_the_router() -> None:
    made = model(SMALL, tensors(SMALL))
    truth = run(made, LOAD)
    others = [(choice + 1) % 5 for choice in truth.choices]
    torch.testing.assert_close(run(made, LOAD, imposed=truth.choices).logits, truth.logits)
    assert Error.of(run(made, LOAD, imposed=others), truth).prompt > 1e-3


def test_errors() -> None:
    truth = Result((torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]]), torch.ones(1, 1)), [torch.tensor([[0, 1]])])
    other = Result((torch.tensor([[3.0, 4.0], [0.0, 3.0], [3.0, 0.0]]), torch.zeros(1, 1)), [torch.tensor([[1, 2]])])
    error = Error.of(other, truth)
    assert error.prompt == pytest.approx((5 / 30) ** 0.5)
    assert (error.decode, error.median, error.other_experts) == (1, 0.5, 0.5)


def test_fp8_keys_are_less_exact_than_bfloat16() -> None:
    truth = run(model(SMALL, tensors(SMALL)), LOAD)
    rounded = model(SMALL, tensors(SMALL), torch.bfloat16)
    exact, fp8 = (Error.of(run(rounded, LOAD, fp8_keys=keys, imposed=truth.choices), truth) for keys in (False, True))
    assert 0 < exact.decode < fp8.decode < 0.1


def test_emulated_keys_and_values_are_those_of_pages_in_fp8() -> None:
    nano = Nano()
    prompt = nano.prompts(CALIBRATION, 0)[0]
    groups = nano.model.config.kv_groups(PAGE, KVDtype.FP8)
    kv = tuple(allocate_group(group, -(-prompt.shape[1] // PAGE), CPU) for group in groups)
    expected = nano.model.head(nano.model.hidden(batch(prompt, len(groups), 0, prompt.shape[1]), kv))
    torch.testing.assert_close(nano.logits(prompt, lambda _, stored: with_scales(e4m3)(stored))[0], expected)


def test_what_is_larger_than_in_the_calibration_saturates() -> None:
    nano = Nano()
    assert nano.largest_seen(nano.prompts(CALIBRATION, 0)[:1]).shape == (6, 2, 2, 1)
    values = torch.tensor([448.0, 1.0, 896.0])
    assert calibrated(torch.tensor(448.0))(values).tolist() == [448, 1, 448]
