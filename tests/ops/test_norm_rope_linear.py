"""RMSNorm, rotary embedding with its cache write, and linear, each against its formula in float64."""

import math

import pytest
import torch

from oscine.ops.linear.reference import lm_head, out_proj
from oscine.ops.norm.reference import rms_norm
from oscine.ops.rope.reference import rope_and_write
from oscine.ops.rope.yarn import ramp_bound, yarn_cos_sin
from tests.ops.cases import NORM_CASES

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "hidden", "why"), NORM_CASES)
def test_rms_norm(tokens: int, hidden: int, why: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, tokens, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    for added in (None, residual):
        y, total = rms_norm(x, weight, 1e-5, added)
        wide = (x if added is None else x + added).double()
        expected = wide / (wide.pow(2).sum(-1, keepdim=True) / hidden + 1e-5).sqrt() * weight.double()
        assert total.dtype == y.dtype == dtype
        assert torch.equal(total.double(), wide)
        rtol = 1e-5 if dtype == torch.float32 else 2**-7
        torch.testing.assert_close(y.double(), expected, rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_are_added_up_before_the_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts, residual, weight = torch.randn(3, 4, 10), torch.randn(3, 10).to(dtype), torch.randn(10).to(dtype)
    y, total = rms_norm(parts, weight, 1e-5, residual)
    expected_y, expected_total = rms_norm(parts.sum(1).to(dtype), weight, 1e-5, residual)
    assert y.dtype == total.dtype == dtype
    rtol = 1e-6 if dtype == torch.float32 else 2**-7  # sums in another order may round to a neighbour
    torch.testing.assert_close(y, expected_y, rtol=rtol, atol=1e-6)
    torch.testing.assert_close(total, expected_total, rtol=rtol, atol=1e-6)


def test_linear() -> None:
    torch.manual_seed(0)
    x, weight, offset = torch.randn(3, 5), torch.randn(7, 5), torch.randn(7)
    product = torch.stack([weight @ row for row in x])
    torch.testing.assert_close(out_proj(x, weight, offset), product + offset)
    torch.testing.assert_close(lm_head(x, weight), product)
    assert lm_head(x.bfloat16(), weight.bfloat16()).dtype == torch.float32


def test_yarn_of_the_published_model() -> None:
    """The bounds and factor published for gpt-oss; dimensions outside the ramp are plain or divided by 32."""
    assert ramp_bound(32, 64, 150000, 4096) == pytest.approx(8.09, abs=0.01)
    assert ramp_bound(1, 64, 150000, 4096) == pytest.approx(17.40, abs=0.01)
    yarn = {"rope_theta": 150000, "factor": 32, "beta_fast": 32, "beta_slow": 1}
    table = yarn_cos_sin(100, 64, CPU, **yarn, original_max_position_embeddings=4096)
    assert table.shape == (100, 64)
    factor = 1.34657359
    assert table[0].tolist() == pytest.approx([factor] * 32 + [0.0] * 32)
    for pair, divisor in ((0, 1), (3, 1), (8, 1), (18, 32), (31, 32)):
        angle = 99 * 150000 ** (-2 * pair / 64) / divisor
        assert table[99, pair].item() == pytest.approx(factor * math.cos(angle), abs=1e-4)
        assert table[99, 32 + pair].item() == pytest.approx(factor * math.sin(angle), abs=1e-4)
    middle = 150000 ** (-2 * 12 / 64)
    share = (12 - 8.0928) / (17.3980 - 8.0928)
    assert math.atan2(table[1, 44].item(), table[1, 12].item()) == pytest.approx(
        middle * (share / 32 + 1 - share), rel=1e-4
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_rotates_queries_and_writes_keys_and_values(dtype: torch.dtype) -> None:
    """Complex multiplication is the rotation; everything that is not a slot of this step keeps its NaN."""
    torch.manual_seed(0)
    tokens, queries, groups, page, head = 5, 6, 2, 4, 8
    angles = torch.rand(50, head // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = torch.randn(tokens, (queries + 2 * groups) * head).to(dtype)
    positions = torch.tensor([0, 49, 7, 8, 3])
    slots = torch.tensor([9, 2, 0, 19, 7])
    pool = torch.full((5, 3, 2, groups, page, head), torch.nan, dtype=dtype)
    q = rope_and_write(qkv, cos_sin, positions, pool[:, 1], slots)

    heads = qkv.view(tokens, -1, head)
    turned = torch.complex(heads[..., :4].double(), heads[..., 4:].double())
    turned = turned * torch.polar(torch.ones(50, 4).double(), angles.double())[positions][:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    assert q.dtype == dtype
    torch.testing.assert_close(q.double(), expected[:, :queries], rtol=rtol, atol=1e-6)
    for token, slot in enumerate(slots.tolist()):
        written = pool[slot // page, 1, :, :, slot % page]
        torch.testing.assert_close(written[0].double(), expected[token, queries:-groups], rtol=rtol, atol=1e-6)
        assert torch.equal(written[1], heads[token, -groups:])
        written.fill_(torch.nan)
    assert pool.isnan().all()
