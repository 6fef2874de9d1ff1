"""Paged attention against a loop over queries and heads that looks up one key at a time."""

import pytest
import torch
from torch import Tensor

import oscine.ops.attention.reference as reference
from oscine.ops.attention.reference import attention
from tests.ops.cases import ATTENTION_CASES, AttentionCase, AttentionInputs, attention_inputs

CPU = torch.device("cpu")


def by_loops(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    """float64, one query and head at a time, the sink as an extra key without a value."""
    out = torch.zeros(inputs.q_TQD.shape, dtype=torch.float64)
    token, repeats = 0, case.num_query_heads // case.num_kv_heads
    for row, (count, context) in enumerate(case.sequences):
        for position in range(context - count, context):
            first = 0 if case.window is None else max(0, position - (case.window - 1))
            keys = [
                inputs.kv_pages[inputs.group.page_table_SB[row, j // case.page_size], :, :, j % case.page_size]
                for j in range(first, position + 1)
            ]
            k_CGD, v_CGD = torch.stack(keys).double().unbind(1)
            for head in range(case.num_query_heads):
                scores = k_CGD[:, head // repeats] @ inputs.q_TQD[token, head].double() / case.head_dim**0.5
                weights = torch.cat((scores, inputs.sinks_Q[head].double()[None])).softmax(0)[:-1]
                out[token, head] = weights @ v_CGD[:, head // repeats]
            token += 1
    return out.flatten(1)


def run(case: AttentionCase, inputs: AttentionInputs) -> Tensor:
    return attention(inputs.q_TQD, inputs.kv_pages, inputs.batch, inputs.group, inputs.sinks_Q, case.window)


@pytest.mark.long
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.why)
def test_attention_equals_its_formula(case: AttentionCase) -> None:
    inputs = attention_inputs(case, CPU, torch.float32)
    out = run(case, inputs)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), by_loops(case, inputs), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("case", ATTENTION_CASES[::4], ids=lambda case: case.why)
def test_bfloat16_is_rounded_once(case: AttentionCase) -> None:
    inputs = attention_inputs(case, CPU, torch.bfloat16)
    out = run(case, inputs)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_loops(case, inputs), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 40_000])
def test_blocks_and_groups_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    case = AttentionCase("both paths", ((1, 300), (45, 300), (1, 3), (1, 200), (150, 150)), window=128)
    for window in (None, 128):
        case = AttentionCase("both paths", case.sequences, window=window)
        inputs = attention_inputs(case, CPU, torch.float32)
        whole = run(case, inputs)
        with monkeypatch.context() as patch:
            patch.setattr(reference, "MAX_SCORES", limit)
            patch.setattr(reference, "MAX_GATHERED", limit)
            torch.testing.assert_close(run(case, inputs), whole, rtol=1e-5, atol=1e-6)


def test_a_huge_sink_takes_all_the_attention() -> None:
    case = ATTENTION_CASES[5]
    inputs = attention_inputs(case, CPU, torch.float32)
    inputs.sinks_Q[1] = 1e4
    heads = run(case, inputs).view(-1, case.num_query_heads, case.head_dim)
    assert (heads[:, 1] == 0).all()
    assert heads[:, 0].abs().amin(-1).gt(0).all()
