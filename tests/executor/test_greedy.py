"""Under any schedule, greedy output equals that of a loop that recomputes everything for each token."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from .tiny import engine, naive_greedy, options, prompt, recompute, request, run

NUM_TOKENS = 24


@st.composite
def _workloads(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(length, tail, priority): prompts share prefixes in whole pages, and differ after `length - tail` tokens."""
    lengths = st.sampled_from([1, 15, 16, 17, 31, 33, 64, 65, 100])
    return draw(st.lists(st.tuples(lengths, st.integers(0, 2), st.integers(0, 1)), min_size=2, max_size=7))


@pytest.mark.long
@settings(max_examples=6)
@given(
    workload=_workloads(),
    chunk=st.sampled_from([4, 7, 16, 64]),
    num_seqs=st.sampled_from([1, 2, 4]),
    pages=st.sampled_from([8, 9, 12, 40]),
    sliding_pages=st.sampled_from([4, 6, 40]),
    overlap=st.booleans(),
    prefix_caching=st.booleans(),
)
def test_greedy_equals_full_recomputation(
    workload: list[tuple[int, int, int]],
    chunk: int,
    num_seqs: int,
    pages: int,
    sliding_pages: int,
    overlap: bool,
    prefix_caching: bool,
) -> None:
    prompts = [[*prompt(length - 1), tail] for length, tail, _ in workload]
    loop = engine(
        options(max_num_seqs=num_seqs, max_num_batched_tokens=chunk, overlap=overlap, prefix_caching=prefix_caching),
        num_full_pages=pages,
        num_sliding_pages=sliding_pages,
    )
    requests = [
        request(str(i), tokens, priority=workload[i][2], max_tokens=NUM_TOKENS) for i, tokens in enumerate(prompts)
    ]
    found = run(loop, *requests)
    for i, tokens in enumerate(prompts):
        recompute(tokens, found[str(i)].token_ids)
        assert found[str(i)].token_ids == naive_greedy(tuple(tokens), NUM_TOKENS)
    stats = loop.stats()
    assert stats.full_pages_used == stats.sliding_pages_used == 0


@pytest.mark.long
def test_a_prefix_hit_and_preemptions_did_happen() -> None:
    """So that the test above has something to test."""
    loop = engine(options(max_num_batched_tokens=16, overlap=True), num_full_pages=10, num_sliding_pages=10)
    requests = [request(str(i), prompt(12, start=i), max_tokens=60) for i in range(4)]
    found = run(loop, *requests)
    assert loop.stats().preemptions > 0
    for i in range(4):
        recompute(prompt(12, start=i), found[str(i)].token_ids)
        assert found[str(i)].token_ids == naive_greedy(tuple(prompt(12, start=i)), 60)
    again = run(loop, request("again", prompt(12, start=3) + found["3"].token_ids[:40], max_tokens=8))["again"]
    assert again.num_cached_tokens == 48
    assert again.token_ids == found["3"].token_ids[40:48]


def test_a_stop_token_ends_a_sequence_and_is_kept() -> None:
    expected = naive_greedy(tuple(prompt(20)), 12)
    stop = expected[5]
    cut = expected.index(stop) + 1
    for overlap in (False, True):
        loop = engine(options(overlap=overlap))
        found = run(loop, request("a", prompt(20), max_tokens=12, stop_token_ids=(stop,)))["a"]
        assert (found.token_ids, found.finish_reason) == (expected[:cut], "stop")
