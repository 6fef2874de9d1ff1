"""The C kernels for CPUs against the reference ops, with one thread and with several."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts, random_routing, sampling_batch
from oscine.ops.attention import native as native_attention
from oscine.ops.attention import reference as reference_attention
from oscine.ops.choose import native as native_choose
from oscine.ops.embed import native as native_embed
from oscine.ops.interface import QkvProjection
from oscine.ops.linear import native as native_linear
from oscine.ops.linear import reference as reference_linear
from oscine.ops.moe import native as native_moe
from oscine.ops.moe import reference as reference_moe
from oscine.ops.native.library import library, unavailable
from oscine.ops.native.weights import DenseKind, pack_dense
from oscine.ops.norm import native as native_norm
from oscine.ops.norm import reference as reference_norm
from oscine.ops.qkv import native as native_qkv
from oscine.ops.qkv import reference as reference_qkv
from oscine.ops.sample.reference import sample
from oscine.ops.target import Communicator, Target
from tests.ops.bound import CPU_TARGET
from tests.ops.cases import ATTENTION_CASES, AttentionCase, attention_inputs
from tests.ops.ranks import on_every_rank

CPU = torch.device("cpu")
INT8_ERROR = 0.015  # of the norm of random products: activations rounded to 1/127 of the largest of 32, twice

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@pytest.fixture(params=[1, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    library().oscine_set_num_threads(request.param)
    yield request.param
    library().oscine_set_num_threads(torch.get_num_threads())


OWN_CASES = (
    *(AttentionCase(f"heads of {dim}", ((1, 40), (7, 20)), head_dim=dim) for dim in (4, 20)),
    AttentionCase("a query has more heads than a task", ((1, 70), (3, 70)), 80, 2, head_dim=16),
    AttentionCase("pages of several blocks, and a window", ((1, 300), (90, 290)), page_size=160, window=70),
    AttentionCase("pages smaller than a vector", ((1, 30), (9, 13)), page_size=4, head_dim=8),
)


@pytest.mark.long
@pytest.mark.parametrize("case", [*ATTENTION_CASES, *OWN_CASES], ids=lambda case: case.why)
def test_attention(case: AttentionCase) -> None:
    inputs = attention_inputs(case, CPU, torch.float32)
    arguments = inputs.q_TQD, inputs.kv_pages, inputs.batch, inputs.group, inputs.sinks_Q, case.window
    expected = reference_attention.attention(*arguments)
    torch.testing.assert_close(native_attention.attention(*arguments), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("num_parts", [None, 1, 3])
@pytest.mark.parametrize("num_tokens", [1, 2, 70])
@pytest.mark.parametrize("hidden", [32, 100])
def test_norm_and_router(num_tokens: int, num_parts: int | None, hidden: int) -> None:
    shape = (num_tokens, hidden) if num_parts is None else (num_tokens, num_parts, hidden)
    x, residual, weight = torch.randn(shape), torch.randn(num_tokens, hidden), torch.randn(hidden)
    for before in (residual, None):
        expected = reference_norm.rms_norm(x, weight, 1e-5, before)
        torch.testing.assert_close(native_norm.rms_norm(x, weight, 1e-5, before), expected, rtol=1e-5, atol=1e-5)
    router = torch.randn(32, hidden), torch.randn(32)
    *found, routing = native_norm.norm_route(x, weight, 1e-5, residual, *router, 4)
    *expected_norm, expected_routing = reference_norm.norm_route(x, weight, 1e-5, residual, *router, 4)
    torch.testing.assert_close(found, expected_norm, rtol=1e-5, atol=1e-5)
    assert torch.equal(routing.expert_ids_TK, expected_routing.expert_ids_TK)
    torch.testing.assert_close(routing.weights_TK, expected_routing.weights_TK, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5, 33])
@pytest.mark.parametrize(("num_rows", "width"), [(8, 8), (25, 20), (200, 96)])
def test_linear(num_tokens: int, num_rows: int, width: int) -> None:
    x, weight, bias = torch.randn(num_tokens, width), torch.randn(num_rows, width), torch.randn(num_rows)
    expected = reference_linear.out_proj(x, weight, bias)
    torch.testing.assert_close(native_linear.out_proj(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
    expected = reference_linear.lm_head(x, weight)
    torch.testing.assert_close(native_linear.lm_head(x, weight), expected, rtol=1e-5, atol=1e-5)


DENSE_ERROR = 0.009  # of the norm of random products: weights and activations rounded to 1/127 of the largest of 32


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 33, 70])
@pytest.mark.parametrize(("num_rows", "width"), [(8, 32), (25, 20), (200, 96), (1, 2880)])
def test_linear_in_int8_and_bfloat16(num_tokens: int, num_rows: int, width: int) -> None:
    published = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(2))
    bias = torch.randn(num_rows)
    expected = reference_linear.out_proj(x, published.float(), bias)
    found = native_linear.out_proj(x, pack_dense(published, "bf16"), bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    found = native_linear.out_proj(x, pack_dense(published, "int8"), bias)
    most = 0.02 if num_rows * num_tokens < 100 else DENSE_ERROR
    assert (found - expected).norm() <= most * (x.norm() * published.float().norm() / width**0.5)


def test_int8_weights_that_int8_holds_are_exact() -> None:
    published = torch.randint(-127, 128, (24, 64)).bfloat16()
    published[:, ::32] = 127.0  # so the scale is 1
    x = torch.randint(-127, 128, (9, 64)).float()
    x[:, ::32] = 127.0
    found = native_linear.lm_head(x, pack_dense(published, "int8"))
    assert torch.equal(found, x @ published.float().T)


def test_a_value_that_is_not_finite_spoils_its_own_token_only() -> None:
    weight = pack_dense(torch.randn(30, 96).bfloat16(), "int8")
    experts = native_moe.prepare_experts(random_experts(4, 96, 32, CPU, torch.float32, scales=(118, 124)))
    x, routing = torch.randn(5, 96), random_routing(5, 4, 2, CPU)
    fine = native_linear.lm_head(x, weight), native_moe.moe(x, routing, experts, 7.0)
    for value in (torch.nan, torch.inf, -torch.inf):
        x[2, 40] = value
        spoilt = native_linear.lm_head(x, weight), native_moe.moe(x, routing, experts, 7.0)
        for before, after in zip(fine, spoilt, strict=True):
            assert not after[2].isfinite().any()
            assert torch.equal(after[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def test_weights_of_zeros_and_tiny_ones() -> None:
    published = torch.zeros(8, 64).bfloat16()
    published[1] = 1e-38
    found = native_linear.lm_head(torch.ones(3, 64), pack_dense(published, "int8"))
    torch.testing.assert_close(found, torch.zeros(3, 8), rtol=0, atol=1e-30)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_queries_keys_and_values(num_tokens: int) -> None:
    heads, kv_heads, dim, page_size, hidden = 4, 2, 16, 8, 48
    rows = (heads + 2 * kv_heads) * dim
    x, residual = torch.randn(num_tokens, hidden), torch.randn(num_tokens, hidden)
    weights = torch.randn(rows, hidden), torch.randn(rows), torch.randn(64, dim)
    positions, slots = torch.arange(num_tokens) + 3, torch.randperm(10 * page_size)[:num_tokens]
    norm = torch.randn(hidden)
    pages = [torch.zeros(10, 3, 2, kv_heads, page_size, dim)[:, 1] for _ in range(2)]  # of the second of three layers
    found, expected = (
        op(x, norm, 1e-5, residual, QkvProjection(*weights, positions, kv, slots))
        for op, kv in zip((native_qkv.norm_qkv, reference_qkv.norm_qkv), pages, strict=True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(*pages, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize(("num_experts", "hidden", "intermediate"), [(8, 256, 128), (5, 96, 32)])
def test_experts(num_tokens: int, num_experts: int, hidden: int, intermediate: int) -> None:
    experts = random_experts(num_experts, hidden, intermediate, CPU, torch.float32, scales=(118, 124))
    routing = random_routing(num_tokens, num_experts, 4, CPU)
    x = torch.randn(num_tokens, hidden)
    x[-1:, :32] = 0  # a block without a scale
    expected = reference_moe.moe(x, routing, reference_moe.prepare_experts(CPU_TARGET, experts), 7.0)
    found = native_moe.moe(x, routing, native_moe.prepare_experts(experts), 7.0)
    assert (found - expected).norm() <= INT8_ERROR * expected.norm()


def test_experts_of_values_that_int8_holds_are_exact() -> None:
    experts = random_experts(4, 64, 32, CPU, torch.float32, scales=(127, 128))
    routing = random_routing(6, 4, 2, CPU)
    x = torch.randint(-1, 2, (6, 64)).float()
    zeros = torch.zeros_like(experts.gate_up_bias)
    packed = native_moe.prepare_experts(experts)
    assert packed.gate_up_bias.shape == zeros.shape
    found = native_moe.moe(x, routing, packed, 1e-3)  # gates and ups are at their limits, or zero: int8 holds those
    expected = reference_moe.moe(x, routing, reference_moe.prepare_experts(CPU_TARGET, experts), 1e-3)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["float32", "bf16", "int8"])
def test_greedy_tokens(kind: DenseKind) -> None:
    choose = native_choose.chooser(Target.of(CPU), native_linear.lm_head, sample).choose
    x, published = torch.randn(37, 64), torch.randn(1001, 64).bfloat16()
    published[500] = published[3]  # a tie: the lowest id wins
    x[1] = published[3].float() * 10
    x[2, 5] = torch.nan
    head = pack_dense(published, kind)
    batch = sampling_batch(37, CPU, temperature_N=torch.zeros(37), greedy=True)
    found = choose(x, head, None, batch)
    assert found[1] == 3
    assert found[2] == -1
    logits = native_linear.lm_head(x, head)
    assert torch.equal(found, sample(logits, batch).token_ids_N)
    few = torch.randint(0, 1001, (37, 5)).sort(1).values
    chosen = native_choose.choose_few(x, head, few, torch.zeros(37), torch.zeros(37, 5))
    best = few.gather(1, logits.gather(1, few).argmax(1, keepdim=True))[:, 0]
    assert torch.equal(chosen[[0, 1, *range(3, 37)]], best[[0, 1, *range(3, 37)]])
    warm = sampling_batch(37, CPU)
    assert torch.equal(choose(x, head, None, warm), sample(native_linear.lm_head(x, head), warm).token_ids_N)


@pytest.mark.parametrize("vocab", [1, 97, 1001])
def test_drawn_tokens(vocab: int) -> None:
    """Tokens equal those of the definition. Its noise differs in the last bit, which changes no token here."""
    choose = native_choose.chooser(Target.of(CPU), native_linear.lm_head, sample).choose
    x, head = torch.randn(200, 64), torch.randn(vocab, 64)
    x[1], x[2], x[3] = torch.nan, torch.inf, head[0] * 1e5
    head[vocab // 2] = torch.nan  # a token that cannot be drawn
    temperature_N = torch.tensor([1.0, 0.5, 1e-30, 3.0, 0.0, 1e5])[torch.arange(200) % 6]
    seeds, positions = torch.randint(-(1 << 63), (1 << 63) - 1, (200,)), torch.randint(0, 1 << 17, (200,))
    batch = sampling_batch(200, CPU, temperature_N=temperature_N, seed_N=seeds, position_N=positions)
    found, expected = choose(x, head, None, batch), sample(native_linear.lm_head(x, head), batch).token_ids_N
    assert torch.equal(found, expected)
    assert found[1] == -1
    assert vocab == 1 or len(found.unique()) > vocab // 16


@pytest.mark.parametrize("column", [0, 7, 31, 33])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_makes_its_row_nan(value: float, column: int) -> None:
    weight = torch.randn(20, 40).bfloat16()
    weight[3, column] = value
    logits = native_linear.lm_head(torch.randn(2, 40), pack_dense(weight, "int8"))
    assert logits.isnan().nonzero().tolist() == [[0, 3], [1, 3]]


def screened_heads(vocab: int, hidden: int) -> dict[str, torch.Tensor]:
    """bfloat16 [V, H], by what is hard about them."""
    normal = torch.randn(vocab, hidden)
    alike, loud, twins = normal.clone(), normal.clone(), normal.clone()
    alike[vocab // 4 : vocab // 2] = normal[:1] * 3 + alike[vocab // 4 : vocab // 2] * 0.001  # equal in 4 bits
    loud[:, 7] *= 50
    twins[vocab // 2 : vocab // 2 * 2] = twins[: vocab // 2]
    signs = normal.sign() * 0.02  # without dither, all errors of a sign are the same
    signs[range(vocab), torch.arange(vocab) % hidden] *= 4
    kinds = {"normal": normal, "alike": alike, "loud": loud, "twins": twins, "signs": signs}
    kinds |= {"zeros": normal * 0, "tiny": normal * 1e-30, "small": normal * 1e-7, "large": normal * 1e6}
    return {name: head.bfloat16() for name, head in kinds.items()}


@pytest.mark.parametrize(("vocab", "hidden"), [(1, 32), (8, 96), (97, 40), (1001, 64), (3000, 720)])
def test_screened_tokens(vocab: int, hidden: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The screen of an int8 head changes neither the tokens nor the last bit of their scores."""
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    for name, published in screened_heads(vocab, hidden).items():
        head = pack_dense(published, "int8")
        screen = native_choose.prepare(head)
        assert screen is not None
        for num_rows in (1, 1, 1, 2, 3):
            x = torch.randn(num_rows, hidden) * 10.0 ** int(torch.randint(-12, 7, ()))
            if num_rows > 1:
                x[0] += 3 * x[0].norm() * published[0].float() / (published[0].float().norm() + 1e-30)
                x[1, 3] *= 40
            heat_N = torch.tensor([1.0, 0.0, 1e-30, 0.3])[torch.randperm(4)][:num_rows]
            for batch in (
                sampling_batch(num_rows, CPU, temperature_N=heat_N * 0, greedy=True),
                sampling_batch(num_rows, CPU, temperature_N=heat_N, seed_N=torch.randint(1 << 62, (num_rows,))),
                sampling_batch(num_rows, CPU, temperature_N=heat_N.flip(0) * 3, position_N=torch.arange(num_rows)),
            ):
                expected, found = (native_choose.best(x, head, batch, rank=2, screen=given) for given in (None, screen))
                assert torch.equal(found[0], expected[0]), name
                assert torch.equal(found[1], expected[1]), name


def test_errors_of_the_screen_have_a_dither(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are uniform from -1/2 to 1/2 scales, whatever the weights, and integers use the four bits."""
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    for name, published in screened_heads(400, 320).items():
        head = pack_dense(published, "int8")
        screen = native_choose.prepare(head)
        assert screen is not None
        blocks = screen.packed.view(50, 10, 136)
        scale_NB = (blocks[..., :8].double() - 128).exp2().permute(0, 2, 1).reshape(400, 10)
        nibbles = torch.stack([blocks[..., 8:] & 15, blocks[..., 8:] >> 4], -1).view(50, 10, 4, 8, 4, 2)
        integer_NH = nibbles.permute(0, 3, 1, 2, 5, 4).reshape(400, 320).double() - 8
        scale_NH = scale_NB.repeat_interleave(32, 1)
        exact_NH = native_linear.lm_head(torch.eye(320), head).T.double()
        error_NH = integer_NH + 0.5 - screen.dither.double() - exact_NH / scale_NH
        assert (error_NH.abs() <= 0.5 + 1e-2).all(), name  # the product with ones of `eye` rounds
        if name in ("normal", "signs"):
            assert error_NH.std() == pytest.approx(12**-0.5, rel=0.03), name
            signed = (error_NH * exact_NH.sign()).mean()
            assert signed.abs() < 0.01, name
        if name == "normal":
            assert (scale_NB == scale_NB.log2().round().exp2()).all()
            assert integer_NH.unique().tolist() == list(range(-7, 8))


def test_scores_that_are_mostly_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then an estimate of the noise that is too low leaves out the best token."""
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    head = pack_dense((torch.randn(1000, 32) * 0.05).bfloat16(), "int8")
    screen = native_choose.prepare(head)
    for seed in range(0, 600, 2):
        batch = sampling_batch(2, CPU, temperature_N=torch.ones(2), seed_N=torch.tensor([seed, seed + 1]))
        expected, found = (native_choose.best(torch.ones(2, 32), head, batch, screen=given) for given in (None, screen))
        assert torch.equal(found[1], expected[1])


def test_activations_along_the_dither(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the dither adds to a sum depends on the scales of a row, so it has to be subtracted."""
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    published = torch.randn(400, 640) * torch.tensor([1.0, 4.0]).repeat(200)[:, None]
    head = pack_dense(published.bfloat16(), "int8")
    screen = native_choose.prepare(head)
    assert screen is not None
    greedy = sampling_batch(1, CPU, temperature_N=torch.zeros(1), greedy=True)
    for sign in (1, -1):
        x = sign * (screen.dither - 0.5).sign()[None]
        expected, found = (native_choose.best(x, head, greedy, screen=given) for given in (None, screen))
        assert torch.equal(found[1], expected[1])


def test_an_error_beyond_the_bound_leaves_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations with the signs of the errors of a token: its exact score is above its upper bound."""
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    head = pack_dense(torch.randn(1, 640).bfloat16(), "int8")
    screen = native_choose.prepare(head)
    assert screen is not None
    scale_B = (screen.packed.view(20, 136)[:, 0].double() - 128).exp2()
    exact_H = native_linear.lm_head(torch.eye(640), head)[:, 0].double()
    within_H = (exact_H / scale_B.repeat_interleave(32) + screen.dither.double()) % 1 - 0.5
    x = within_H.sign().float()[None] * 100
    batch = sampling_batch(1, CPU, temperature_N=torch.zeros(1), greedy=True)
    assert (x[0] * within_H).sum() > 7.1 * 100 * (640 / 12) ** 0.5
    value, token = native_choose.best(x, head, batch, screen=screen)
    assert (float(value), int(token)) == (float(native_linear.lm_head(x, head)), 0)


def test_what_is_not_screened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small heads, heads of other types, weights and activations that are not finite, masks, and many rows."""
    published = torch.randn(500, 64).bfloat16()
    assert native_choose.prepare(pack_dense(published, "int8")) is None
    monkeypatch.setattr(native_choose, "LEAST_BYTES", 0)
    assert native_choose.prepare(pack_dense(published, "bf16")) is None
    broken = published.clone()
    for value in (torch.nan, torch.inf, 1e20):
        broken[77, 7] = value
        assert native_choose.prepare(pack_dense(broken, "int8")) is None
    head = pack_dense(published, "int8")
    screen = native_choose.prepare(head)
    assert screen is not None
    assert native_choose.prepared_bytes("int8", 500, 64) == screen.packed.nbytes
    assert native_choose.prepared_bytes("bf16", 500, 64) == 0
    x = torch.randn(2, 64)
    greedy = sampling_batch(2, CPU, temperature_N=torch.zeros(2), greedy=True)
    right = native_choose.best(x, head, greedy, screen=screen)[1]
    misleading = published.clone()
    misleading[right] *= -1
    other = native_choose.prepare(pack_dense(misleading, "int8"))
    assert (native_choose.best(x, head, greedy, screen=other)[1] != right).any()  # so the screen is read
    masked = replace(
        greedy, allowed_KW=torch.tensor([[1 << 5] + [0] * 15]).int(), allowed_row_N=torch.tensor([0, 0]).int()
    )
    assert native_choose.best(x, head, masked, screen=screen)[1].tolist() == [5, 5]
    for value in (torch.nan, torch.inf, 3e38):
        x[0, 3] = value
        for batch in (greedy, sampling_batch(2, CPU, temperature_N=torch.ones(2))):
            expected, found = (native_choose.best(x, head, batch, screen=given) for given in (None, screen))
            assert torch.equal(found[1], expected[1])
            assert found[1][1] >= 0
    many = torch.randn(40, 64)
    batch = sampling_batch(40, CPU, temperature_N=torch.zeros(40), greedy=True)
    assert torch.equal(*(native_choose.best(many, head, batch, screen=given)[1] for given in (None, other)))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_rows_with_allowed_tokens(kind: DenseKind, num_ranks: int) -> None:
    """Some masks leave whole parts of the vocabulary out, one a single token; one row may have any token."""
    x, published = torch.randn(70, 64), torch.randn(900, 64).bfloat16()
    x[5] = torch.nan
    allowed_6V = torch.rand(6, 960) < torch.tensor([0.5, 0.01, 0.0, 0.0, 1.0, 0.0])[:, None]
    allowed_6V[2, 899] = allowed_6V[3, 300:310] = allowed_6V[5, 0] = True
    masks_KW = torch.from_numpy(np.packbits(allowed_6V.numpy(), axis=1, bitorder="little").view(np.int32))
    batch = replace(
        sampling_batch(70, CPU, temperature_N=torch.tensor([1.0, 0.0, 0.3]).repeat(24)[:70]),
        allowed_KW=masks_KW,
        allowed_row_N=(torch.arange(70) % 7 - 1).int(),
    )
    heads = [pack_dense(part, kind) for part in published.chunk(num_ranks)]

    def choose_on(own: Communicator) -> torch.Tensor:
        chooser = native_choose.chooser(replace(Target.of(CPU), communicator=own), native_linear.lm_head, sample)
        return chooser.choose(x, heads[own.rank], None, batch)

    expected = sample(torch.cat([native_linear.lm_head(x, head) for head in heads], 1), batch).token_ids_N
    assert expected[5] == -1
    assert expected[3::7].tolist() == [899] * 10
    assert all(torch.equal(found, expected) for found in on_every_rank(num_ranks, choose_on))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_drawn_tokens_of_ranks(num_ranks: int) -> None:
    x, head = torch.randn(20, 64), torch.randn(800, 64)
    batch = sampling_batch(20, CPU, temperature_N=torch.tensor([1.0, 0.0]).repeat(10))

    def choose_on(own: Communicator) -> torch.Tensor:
        chooser = native_choose.chooser(replace(Target.of(CPU), communicator=own), native_linear.lm_head, sample)
        return chooser.choose(x, head.chunk(num_ranks)[own.rank], None, batch)

    expected = sample(native_linear.lm_head(x, head), batch).token_ids_N
    assert all(torch.equal(found, expected) for found in on_every_rank(num_ranks, choose_on))


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_greedy_tokens_of_ranks(num_ranks: int) -> None:
    x, head = torch.randn(20, 64), torch.randn(800, 64)
    head[700] = head[3]  # on two ranks
    x[0], x[1], x[2] = head[3] * 10, head[-1] * 10, torch.nan
    batch = sampling_batch(20, CPU, temperature_N=torch.zeros(20), greedy=True)

    def choose_on(own: Communicator) -> torch.Tensor:
        chooser = native_choose.chooser(replace(Target.of(CPU), communicator=own), native_linear.lm_head, sample)
        return chooser.choose(x, head.chunk(num_ranks)[own.rank], None, batch)

    expected = sample(x @ head.T, batch).token_ids_N
    assert expected[:3].tolist() == [3, 799, -1]
    assert all(torch.equal(found, expected) for found in on_every_rank(num_ranks, choose_on))


def test_a_token_alone_has_the_same_result_as_among_others() -> None:
    x, weight, bias = torch.randn(9, 100), torch.randn(50, 100), torch.randn(50)
    packed = pack_dense(weight.bfloat16(), "int8")
    experts = native_moe.prepare_experts(random_experts(4, 128, 64, CPU, torch.float32, scales=(118, 124)))
    routing, tokens = random_routing(9, 4, 2, CPU), torch.randn(9, 128)
    choose = native_choose.chooser(Target.of(CPU), native_linear.lm_head, sample).choose

    def results(rows: slice) -> tuple[torch.Tensor, ...]:
        part = routing._replace(expert_ids_TK=routing.expert_ids_TK[rows], weights_TK=routing.weights_TK[rows])
        greedy = sampling_batch(len(x[rows]), CPU, temperature_N=torch.zeros(len(x[rows])), greedy=True)
        return (
            native_linear.out_proj(x[rows], weight, bias),
            native_linear.out_proj(x[rows], packed, bias),
            native_moe.moe(tokens[rows], part, experts, 7.0),
            native_norm.rms_norm(x[rows], weight[0], 1e-5, x[rows])[0],
            choose(x[rows], weight, None, greedy),
            choose(x[rows], packed, None, greedy),
        )

    together = results(slice(None))
    for t in range(9):
        assert all(torch.equal(one[0], all_[t]) for one, all_ in zip(results(slice(t, t + 1)), together, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(dtype: torch.dtype) -> None:
    ids, table = torch.tensor([3, 0, 96, 3]), torch.randn(97, 20).to(dtype)
    assert torch.equal(native_embed.embed(ids, table), table[ids].float())
    for wrong in (-1, 97):
        with pytest.raises(IndexError):
            native_embed.embed(torch.tensor([0, wrong]), table)


def test_attention_of_a_chunk_is_that_of_its_tokens_one_by_one() -> None:
    chunk = AttentionCase("a chunk", ((20, 50),), window=16)
    inputs = attention_inputs(chunk, CPU, torch.float32)
    common = inputs.sinks_Q, chunk.window
    whole = native_attention.attention(inputs.q_TQD, inputs.kv_pages, inputs.batch, inputs.group, *common)
    for t in range(20):
        lens = torch.tensor([31 + t], dtype=torch.int32)
        batch = replace(inputs.batch, query_starts_S1=torch.tensor([0, 1], dtype=torch.int32), context_lens_S=lens)
        one = native_attention.attention(inputs.q_TQD[t : t + 1], inputs.kv_pages, batch, inputs.group, *common)
        assert torch.equal(one[0], whole[t])


@pytest.mark.parametrize("window", [None, 16])
def test_attention_to_drafts_is_that_of_each_alone(window: int | None) -> None:
    """Rows that meet the keys together, and after them rows that must not: another context, other pages."""
    num_rows, num_drafts = 25, 21
    inputs = attention_inputs(AttentionCase("rows", ((1, 70),) * num_rows, window=window), CPU, torch.float32)
    table_SB = inputs.group.page_table_SB.clone()
    table_SB[1 : num_drafts + 2] = table_SB[0]
    lens_S = torch.arange(40, 40 + num_rows, dtype=torch.int32)
    lens_S[num_drafts:] += 3

    def attention(rows: slice) -> Tensor:
        group = replace(inputs.group, page_table_SB=table_SB[rows])
        starts_S1 = torch.arange(len(lens_S[rows]) + 1, dtype=torch.int32)
        batch = replace(inputs.batch, query_starts_S1=starts_S1, context_lens_S=lens_S[rows])
        others = inputs.kv_pages, batch, group, inputs.sinks_Q, window
        return native_attention.attention(inputs.q_TQD[rows], *others)

    alone = torch.cat([attention(slice(row, row + 1)) for row in range(num_rows)])
    assert torch.equal(attention(slice(None)), alone)
