"""Keys and values in FP8: the format, and attention over it.

The oracle of attention is a loop in float64 over what was stored, or exact attention.
"""

import dataclasses
from itertools import product

import pytest
import torch
from torch import Tensor

from oscine.kv_dtype import KVDtype, rows_with_scales, tokens_of_rows
from oscine.kv_group import KVGroup
from oscine.ops.kv.fp8 import dequantise, quantise
from oscine.ops.kv.reference import load, store
from tests.ops.cases import ATTENTION_CASES, AttentionCase, AttentionInputs, attention_inputs, in_fp8
from tests.ops.test_attention import CPU, by_loops, run

SIZES = list(product((16, 32, 64, 128), (8, 16, 64, 128)))  # page size, head dimension


def rows() -> Tensor:
    """Of every magnitude that keys and values may have, some with one outlier, one of zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4000, 64, generator=generator) * torch.randn(4000, 1, generator=generator).mul(15).exp2()
    x[::5, 7] *= 100
    x[3] = 0
    x[4] = 448 * 2.0**-12  # the largest value of e4m3, times a power of two
    x[6] = 449 * 2.0**-12
    return x


def test_the_scale_is_the_least_power_of_two_under_which_a_row_fits() -> None:
    elements, exponents = quantise(rows())
    scale = 2.0 ** (exponents.double() - 127)
    most = rows().abs().amax(-1).double()
    assert (most <= 448 * scale).all()
    assert ((most > 224 * scale) | (most == 0)).all()
    assert exponents[4] + 1 == exponents[6]
    assert elements.view(torch.float8_e4m3fn).float().abs().amax() <= 448


def test_an_element_is_off_by_a_sixteenth_at_most_or_by_a_share_of_the_largest() -> None:
    x = rows()
    error = (dequantise(*quantise(x)) - x).double().abs()
    most = x.double().abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x.double().abs() / 16, most * 2.0**-10 / 224)).all()
    relative = error.square().mean(-1).sqrt() / x.double().square().mean(-1).sqrt()
    assert relative.nanmean() < 0.027


def test_the_largest_and_the_smallest_numbers_have_a_scale() -> None:
    x = torch.tensor([[3.0e38, 1.0], [1e-45, 0.0], [1e-38, -1e-38], [torch.inf, 1.0], [torch.nan, 1.0]])
    back = dequantise(*quantise(x))
    assert back[0, 0] == pytest.approx(3.0e38, rel=1 / 16)
    torch.testing.assert_close(back[1:3], x[1:3], rtol=1 / 16, atol=2.0**-126 * 2.0**-9)
    assert not back[3:, 0].isfinite().any(), "what is not finite must be found later"


@pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
def test_a_page_holds_its_tokens_and_their_scales(page_size: int, head_dim: int) -> None:
    """Tokens come back from where they were stored; every other byte is as it was."""
    group = KVGroup(None, (1, 3), 2, page_size, head_dim, KVDtype.FP8)
    assert tokens_of_rows(rows_with_scales(page_size, head_dim), head_dim) == page_size
    assert group.page_bytes == 2 * 2 * 2 * head_dim * (page_size + -(-page_size // head_dim))
    pool = torch.full((5, *group.page_shape), 0xA5, dtype=torch.uint8)
    slots = torch.tensor([page_size * 2 + 3, 0, page_size * 5 - 1, page_size + 7])
    keys, values = torch.randn(2, 4, 2, head_dim)
    store(keys, values, pool[:, 1], slots)
    found = load(pool[:, 1], torch.arange(5))
    assert found.shape == (5, 2, 2, page_size, head_dim)
    for kind, heads in enumerate((keys, values)):
        expected = dequantise(*quantise(heads))
        assert torch.equal(found[slots // page_size, kind, :, slots % page_size], expected)
    assert int((pool != 0xA5).sum()) <= 4 * 2 * 2 * (head_dim + 1)
    assert (pool[:, 0] == 0xA5).all()


def with_outliers(inputs: AttentionInputs) -> AttentionInputs:
    """Keys as those of trained models are: a few channels are far larger than all others."""
    pages = inputs.kv_pages.clone()
    pages[:, 0, :, :, 5] *= 20
    pages[:, 0, :, :, 11] *= 8
    q = inputs.q_TQD.clone()
    q[..., (5, 11)] /= 8  # or one key would take all the attention
    return dataclasses.replace(inputs, kv_pages=pages, q_TQD=q)


@pytest.mark.long
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.why)
def test_attention_reads_what_was_stored(case: AttentionCase) -> None:
    """Decodes, chunks, windows, sinks and page borders; slots that hold nothing are NaN."""
    inputs = with_outliers(attention_inputs(case, CPU, torch.float32))
    fp8 = in_fp8(inputs)
    stored = dataclasses.replace(inputs, kv_pages=load(fp8.kv_pages, torch.arange(len(fp8.kv_pages))))
    torch.testing.assert_close(run(case, fp8).double(), by_loops(case, stored), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("outliers", [False, True])
def test_attention_is_near_that_over_exact_keys_and_values(outliers: bool) -> None:
    worst = 0.0
    for case in ATTENTION_CASES:
        inputs = attention_inputs(case, CPU, torch.float32)
        inputs = with_outliers(inputs) if outliers else inputs
        exact = run(case, inputs)
        error = run(case, in_fp8(inputs)) - exact
        worst = max(worst, float(error.square().mean().sqrt() / exact.square().mean().sqrt()))
    assert worst < 0.05
