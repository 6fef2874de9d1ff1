"""Sampling: each adjustment alone against plain Python, the distribution, and independence of the batch."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.ops.interface import SamplingBatch
from oscine.ops.sample.noise import gumbel, hash_tokens
from oscine.ops.sample.reference import _truncate, best, sample
from oscine.ops.target import Communicator
from tests.ops.ranks import best_in_turn

CPU = torch.device("cpu")
DRAWS = 20_000


def draw(logits_V: Tensor, **changes: object) -> Tensor:
    """DRAWS samples of one distribution: one seed, a position each."""
    batch = sampling_batch(DRAWS, CPU, seed_N=torch.full((DRAWS,), 42), position_N=torch.arange(DRAWS), **changes)
    return sample(logits_V.expand(DRAWS, -1), batch).token_ids_N


def chi_square(ids: Tensor, probabilities: Tensor) -> float:
    """Standard deviations by which Pearson's statistic exceeds its mean; infinite if an impossible id was drawn."""
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    possible = probabilities > 0
    if counts[~possible].any():
        return math.inf
    expected = probabilities[possible].double() * len(ids)
    freedom = int(possible.sum()) - 1
    statistic = ((counts[possible] - expected) ** 2 / expected).sum().item()
    return (statistic - freedom) / math.sqrt(2 * max(freedom, 1))


def rows(value: float) -> Tensor:
    return torch.full((DRAWS,), value)


def one_row(**changes: object) -> SamplingBatch:
    return sampling_batch(1, CPU, temperature_N=torch.zeros(1), greedy=True, **changes)


LOGITS = torch.tensor([1.0, 2.0, -1.0, 0.5, 2.5, -torch.inf, 0.0, 1.5])


def test_draws_follow_the_softmax() -> None:
    assert chi_square(draw(LOGITS), LOGITS.softmax(0)) < 4
    assert chi_square(draw(LOGITS, temperature_N=rows(0.5)), (LOGITS / 0.5).softmax(0)) < 4
    assert chi_square(draw(LOGITS), (LOGITS * 1.1).softmax(0)) > 4  # the test can tell a wrong temperature


@pytest.mark.parametrize("truncated", [False, True])
def test_the_lowest_temperatures_there_are_choose_the_most_probable_token(truncated: bool) -> None:
    logits_V = torch.tensor([1.0, 5.0, 20.0, 3.0])
    for temperature in (1e-3, 1e-20, 1e-38, 1e-44):
        settings = {"temperature_N": rows(temperature), "top_p_N": rows(0.9), "truncated": truncated}
        assert draw(logits_V, **settings).unique().tolist() == [2]


def test_draws_follow_a_flat_softmax_over_many_tokens() -> None:
    assert chi_square(draw(torch.zeros(200)), torch.full((200,), 1 / 200)) < 4


def kept(probabilities: Tensor, ids: list[int]) -> Tensor:
    mask = torch.zeros_like(probabilities)
    mask[ids] = probabilities[ids]
    return mask / mask.sum()


def test_top_k_keeps_the_k_most_probable() -> None:
    ids = draw(LOGITS, top_k_N=torch.full((DRAWS,), 3), truncated=True)
    assert chi_square(ids, kept(LOGITS.softmax(0), [4, 1, 7])) < 4


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    p = LOGITS.softmax(0)
    two, three = float(p[[4, 1]].sum()), float(p[[4, 1, 7]].sum())
    ids = draw(LOGITS, top_p_N=rows((two + three) / 2), truncated=True)
    assert chi_square(ids, kept(p, [4, 1, 7])) < 4
    assert set(draw(LOGITS, top_p_N=rows(1e-9), truncated=True).tolist()) == {4}


def test_top_p_counts_within_top_k() -> None:
    """0.61 of the two most probable alone is reached by the first, of all tokens only by both."""
    ids = draw(LOGITS, top_k_N=torch.full((DRAWS,), 2), top_p_N=rows(0.61), truncated=True)
    assert set(ids.tolist()) == {4}


def test_top_p_of_one_cuts_nothing_off() -> None:
    """Though the first token's probability already rounds to 1: to the next one is nothing left."""
    logits = torch.tensor([[0.0, -20.0, -30.0, -60.0]])
    assert logits.softmax(-1)[0, 0] == 1
    assert torch.equal(_truncate(logits, sampling_batch(1, CPU, truncated=True)), logits)


def test_min_p_is_relative_to_the_most_probable() -> None:
    p = LOGITS.softmax(0)
    ids = draw(LOGITS, min_p_N=rows(0.3), truncated=True)
    assert chi_square(ids, kept(p, [i for i in range(8) if p[i] >= 0.3 * p[4]])) < 4


def test_a_row_does_not_depend_on_its_batch() -> None:
    """The same row alone, among others, and among rows that make the batch sort and hash."""
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    batch = sampling_batch(6, CPU, seed_N=torch.arange(6) * 7919, position_N=torch.arange(6) + 100)
    together = sample(logits, batch).token_ids_N
    top_k_N = torch.tensor([0, 0, 5, 0, 0, 3])
    mixed = replace(batch, truncated=True, top_k_N=top_k_N, temperature_N=torch.tensor([1.0, 1, 1, 0, 1, 1]))
    beside_others = sample(logits, mixed).token_ids_N
    for row in (0, 1, 4):
        alone = sampling_batch(1, CPU, seed_N=batch.seed_N[row : row + 1], position_N=batch.position_N[row : row + 1])
        assert sample(logits[row : row + 1], alone).token_ids_N[0] == together[row] == beside_others[row]
    assert beside_others[3] == logits[3].argmax()


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**20), st.integers(0, 2**17))
@settings(max_examples=30)
def test_the_hash_by_integers_of_python(seed: int, position: int, token: int) -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    first = mix(position ^ mix(seed % 2**32 ^ mix(seed >> 32)))
    expected = mix(mix((token + first) % 2**32) ^ mix((first + 0x9E3779B9) % 2**32))
    hashed = hash_tokens(torch.tensor([seed]), torch.tensor([position]), torch.tensor([token]))
    assert hashed.item() == expected


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_noise_of_neighbouring_rows_is_uncorrelated(vary: str) -> None:
    steps, still = torch.arange(64), torch.zeros(64, dtype=torch.int64)
    noise = gumbel(*((steps, still) if vary == "seed" else (still, steps)), 4096).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)  # Euler's constant
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    correlation = torch.corrcoef(noise)
    correlation.fill_diagonal_(0)
    assert correlation.abs().max() < 5.5 / math.sqrt(4096)
    along_tokens = torch.corrcoef(torch.stack((noise[:, :-1].flatten(), noise[:, 1:].flatten())))
    assert along_tokens[0, 1].abs() < 5 / math.sqrt(noise.numel())


def test_greedy_takes_the_first_of_equal_logits_and_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oscine.ops.sample.reference.gumbel", None)
    assert sample(torch.tensor([[1.0, 3.0, 3.0]]), one_row()).token_ids_N.tolist() == [1]


@pytest.mark.needs("parallel")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("greedy", [True, False])
def test_the_best_of_parts_is_that_of_all_logits(num_ranks: int, greedy: bool) -> None:
    """Also where a part has no token, where tokens of several parts are equal, and where there is none at all."""
    from oscine.extensions.parallel.comm.ops import sample_across

    torch.manual_seed(0)
    logits_NV = torch.randn(40, 64)
    logits_NV[:10] = logits_NV[:10].round()
    logits_NV[10:20, :48] = -torch.inf
    logits_NV[20] = -torch.inf
    heat_N = torch.zeros(40) if greedy else torch.tensor([0.0, 1.0, 0.3, 2.0]).repeat(10)
    batch = sampling_batch(40, CPU, greedy=greedy, temperature_N=heat_N)

    def choose(own: Communicator) -> Tensor:
        part_NV = logits_NV.chunk(num_ranks, 1)[own.rank]
        return sample_across(best, own)(part_NV, batch).token_ids_N

    chosen_N = best_in_turn(num_ranks, choose)
    assert torch.equal(chosen_N, sample(logits_NV, batch).token_ids_N)
    assert chosen_N[20] == -1


def test_impossible_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 30), -torch.inf)
    logits[:, 7] = -1e30
    logits[:, 9] = torch.nan
    for truncated in (False, True):
        batch = sampling_batch(
            200, CPU, truncated=truncated, top_k_N=torch.full((200,), 20), temperature_N=torch.full((200,), 1e-3)
        )
        assert set(sample(logits, batch).token_ids_N.tolist()) == {7}


@pytest.mark.parametrize("nothing", [torch.nan, -torch.inf])
@pytest.mark.parametrize("truncated", [False, True])
def test_where_no_token_is_possible_there_is_none(nothing: float, truncated: bool) -> None:
    logits = torch.zeros(4, 30)
    logits[1:3] = nothing
    heat = torch.tensor([1.0, 1.0, 0.0, 0.0])
    mixed = sampling_batch(4, CPU, truncated=truncated, temperature_N=heat, num_logprobs=1)
    greedy = sampling_batch(4, CPU, temperature_N=torch.zeros(4), greedy=True)
    for batch in (mixed, greedy):
        ids = sample(logits, batch).token_ids_N.tolist()
        assert ids[1:3] == [-1, -1]
        assert min(ids[0], ids[3]) >= 0


def test_bias_is_added_and_forbids() -> None:
    logits = torch.zeros(2, 4)
    batch = sampling_batch(
        2,
        CPU,
        temperature_N=torch.zeros(2),
        greedy=True,
        bias_rows=torch.tensor([0, 1, 1]),
        bias_ids=torch.tensor([2, 0, 1]),
        bias_values=torch.tensor([1.5, -torch.inf, -1.0]),
    )
    assert sample(logits, batch).token_ids_N.tolist() == [2, 2]
    assert not logits.any()


def test_restricted_rows_choose_among_the_allowed() -> None:
    """Of 70 tokens: a row without restriction, one with two tokens, one with the last token alone."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 70, generator=generator)
    words = torch.tensor([[0, 0, 1 << 5, -1], [1 << 31, 1 << 3, 0, -1]], dtype=torch.int64)  # bits past the end are set
    restricted = {
        "allowed_KW": words.to(torch.int32),
        "allowed_row_N": torch.tensor([-1, 1, 0], dtype=torch.int32),
    }
    greedy = sampling_batch(3, CPU, temperature_N=torch.zeros(3), greedy=True, num_logprobs=1, **restricted)
    result = sample(logits, greedy)
    best = max((31, 35), key=lambda token: logits[1, token])
    assert result.token_ids_N.tolist() == [logits[0].argmax(), best, 69]
    assert result.logprobs_N is not None
    assert result.logprobs_N.tolist() == pytest.approx(
        [logits[i].log_softmax(-1)[token].item() for i, token in enumerate(result.token_ids_N.tolist())]
    )
    drawn = [
        sample(logits, sampling_batch(3, CPU, truncated=True, seed_N=torch.arange(3) + i, **restricted)).token_ids_N
        for i in range(40)
    ]
    columns = torch.stack(drawn).T
    assert len(set(columns[0].tolist())) > 10
    assert set(columns[1].tolist()) == {31, 35}
    assert set(columns[2].tolist()) == {69}


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 3), st.booleans()), min_size=1, max_size=9),
    st.floats(0.5, 2),
    st.floats(-2, 2),
    st.floats(-2, 2),
)
@settings(max_examples=60)
def test_penalties_by_their_definition(
    tokens: list[tuple[float, int, bool]], repetition: float, frequency: float, presence: float
) -> None:
    expected = []
    for logit, count, in_prompt in tokens:
        value = logit
        if count or in_prompt:
            value = value / repetition if value > 0 else value * repetition
        expected.append(value - frequency * count - (presence if count else 0))
    batch = one_row(
        repetition_N=torch.tensor([repetition]),
        frequency_N=torch.tensor([frequency]),
        presence_N=torch.tensor([presence]),
        output_counts_NV=torch.tensor([[count for _, count, _ in tokens]], dtype=torch.int32),
        prompt_mask_NV=torch.tensor([[in_prompt for _, _, in_prompt in tokens]]),
    )
    chosen = sample(torch.tensor([[logit for logit, _, _ in tokens]]), batch).token_ids_N.item()
    assert expected[int(chosen)] == pytest.approx(max(expected), abs=1e-5)


def test_logprobs_are_those_of_the_model() -> None:
    logits = LOGITS[None]
    batch = one_row(
        num_logprobs=3, bias_rows=torch.tensor([0]), bias_ids=torch.tensor([2]), bias_values=torch.tensor([9.0])
    )
    result = sample(logits, batch)
    assert result.token_ids_N.tolist() == [2]
    assert result.logprobs_N is not None
    assert result.top_ids_NK is not None
    assert result.top_logprobs_NK is not None
    total = math.log(sum(math.exp(x) for x in LOGITS.tolist()))
    assert result.logprobs_N.tolist() == pytest.approx([-1.0 - total], abs=1e-5)
    assert result.top_ids_NK.tolist() == [[4, 1, 7]]
    assert result.top_logprobs_NK[0].tolist() == pytest.approx([2.5 - total, 2.0 - total, 1.5 - total], abs=1e-5)
    assert sample(logits, replace(batch, num_logprobs=0)).top_ids_NK.shape == (1, 0)  # type: ignore[union-attr]
    assert sample(logits, replace(batch, num_logprobs=None)).logprobs_N is None
