"""Prefixes that the engine reuses from earlier requests, and keeps for later ones."""

import pytest

from oscine.engine.core.page_pool import PagePool

from .harness import PAGE, Run, Setting

TEXT = [(7 * i) % 50 for i in range(150)]


def evict(pool: PagePool, pages: list[int]) -> None:
    """Makes a cached page free, as allocation does when it comes to it."""
    arena = pool._arena
    for page in pages:
        arena.take(page)
        pool.evict([page])
        arena.give_back(page, pool, cached=False, cold=False)


def run_one(run: Run, name: str, prompt: list[int], max_tokens: int = 2) -> int:
    """Cached tokens of a request that runs alone."""
    run.add(name, prompt, max_tokens)
    run.finish()
    return run.cached(name)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_same_prompt_hits_all_but_its_last_token(overlap: bool) -> None:
    run = Run(Setting(overlap=overlap))
    assert run_one(run, "first", TEXT[: 4 * PAGE]) == 0
    assert run_one(run, "at a page's end", TEXT[: 4 * PAGE]) == 3 * PAGE
    assert run_one(run, "one more", TEXT[: 4 * PAGE + 1]) == 4 * PAGE
    stats = run.loop.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (12 * PAGE + 1, 7 * PAGE)
    assert (stats.prompt_tokens, stats.local_hits, stats.external_hits) == (12 * PAGE + 1, 7 * PAGE, 0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("length", range(5 * PAGE - 3, 5 * PAGE + 3))
@pytest.mark.parametrize("window", [24, 2 * PAGE])
def test_the_next_turn_hits_the_whole_turn_before_it_wherever_that_ended(
    overlap: bool, length: int, window: int
) -> None:
    """Even though other requests have used every page that was not kept."""
    run = Run(Setting(windows=(window,), overlap=overlap, num_sliding_pages=10, max_num_batched_tokens=32))
    run.add("turn", TEXT[:length], max_tokens=20)
    run.finish()
    history = TEXT[:length] + run.tokens("turn")
    run.add("other", TEXT[::-1], max_tokens=2)
    run.finish()
    assert run_one(run, "next", [*history, 1, 2, 3]) == (len(history) - 1) // PAGE * PAGE


def test_a_running_request_is_shared_as_it_goes() -> None:
    run = Run()
    run.add("long", TEXT[:60], max_tokens=60)
    for _ in range(10):
        run.step()
    run.add("joins", TEXT[:60], max_tokens=60)
    run.step()
    assert run.loop.stats().num_running == 2
    assert run.loop.stats().full_pages_used < 2 * 4
    run.finish()
    assert run.cached("joins") == 3 * PAGE


def test_no_hit_without_the_full_pages() -> None:
    run = Run()
    run_one(run, "first", TEXT[: 6 * PAGE])
    third = run.cache.index.find(find_digests(run, TEXT[: 6 * PAGE])).pages[0][2]
    evict(run.cache.pools[0], [third])
    assert run_one(run, "again", TEXT[: 6 * PAGE]) == 2 * PAGE


def test_no_hit_without_the_window() -> None:
    run = Run()
    run_one(run, "first", TEXT[: 6 * PAGE + 1])
    hit = run.cache.index.find(find_digests(run, TEXT[: 6 * PAGE]))
    evict(run.cache.pools[1], hit.pages[1][hit.first_held[1] :])
    assert run_one(run, "again", TEXT[: 6 * PAGE + 1]) == 4 * PAGE
    assert run_one(run, "third", TEXT[: 6 * PAGE + 1]) == 6 * PAGE  # registered anew


def find_digests(run: Run, tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    run.cache.index.extend_digests(digests, tokens, len(tokens) // PAGE)
    return digests


def test_windows_passed_by_are_evicted_before_the_tails_of_finished_turns() -> None:
    run = Run(Setting(num_sliding_pages=12))
    run_one(run, "tail", TEXT[: 3 * PAGE + 1], max_tokens=1)  # leaves three cached pages
    run.add("long", TEXT[::-1], max_tokens=8)  # ten pages: more than are free, fewer than with its own older ones
    run.finish()
    assert run_one(run, "tail again", TEXT[: 3 * PAGE + 1]) == 3 * PAGE


def test_a_window_where_requests_were_seen_to_branch_is_kept() -> None:
    """A system prompt, say: the window at its end is out of reach of those who pass it, but others will come there."""
    system = TEXT[: 4 * PAGE]
    run = Run(Setting(num_sliding_pages=16, max_model_len=300))
    run_one(run, "first", system + [1] * 180)
    evict(run.cache.pools[1], list(run.cache.pools[1]._arena._cold))
    assert run_one(run, "finds no window", system + [2] * 180) == 0
    assert {*run.cache.pools[1]._arena._kept} >= {*run.cache.index.find(find_digests(run, system)).pages[1][2:]}
    for i in range(3, 8):
        assert run_one(run, f"hits {i}", system + [i] * 180) == 4 * PAGE


@pytest.mark.parametrize("length", range(5 * PAGE - 1, 5 * PAGE + 2))
def test_a_next_turn_without_the_reasoning_hits_the_prompt(length: int) -> None:
    """The window at the end of the prompt is long out of reach when the turn ends."""
    run = Run(Setting(num_sliding_pages=10, max_num_batched_tokens=32))
    run_one(run, "turn", TEXT[:length], max_tokens=60)
    run_one(run, "other", TEXT[::-1][:60], max_tokens=60)
    assert run_one(run, "next", [*TEXT[:length], 1, 2, 3]) == length // PAGE * PAGE


@pytest.mark.parametrize("window", [17, 24, 40])
def test_a_prompt_that_leaves_another_near_its_end_finds_a_window_there(window: int) -> None:
    """The others are evicted. n pages before its end, the hit is less than 8 n pages before it."""
    text = [(7 * i) % 50 for i in range(40 * PAGE + 5)]
    run = Run(Setting(windows=(window,), max_model_len=1000))
    run_one(run, "first", text)
    evict(run.cache.pools[1], list(run.cache.pools[1]._arena._cold))
    hits = [run.cache.index.find(find_digests(run, text[: n * PAGE])).num_pages for n in range(41)]
    assert hits[40] == 40
    assert hits[39] == 39
    assert all(hits[40 - n] > 40 - 8 * n for n in range(1, 6))
    pages_read = -(-(window - 1) // PAGE)
    assert run.cache.pools[1]._arena._kept.count <= 3 * pages_read + 2, "few windows are kept"


def test_prefix_caching_can_be_switched_off() -> None:
    run = Run(Setting(prefix_caching=False))
    run_one(run, "first", TEXT[:40])
    assert run_one(run, "again", TEXT[:40]) == 0
    assert run.loop.stats().prefix_queries == 0


def test_prompt_logprobs_are_computed_not_looked_up() -> None:
    run = Run()
    run_one(run, "first", TEXT[:40])
    run.add("scored", TEXT[:40], max_tokens=0, prompt_logprobs=0)
    run.finish()
    assert run.cached("scored") == 0
    assert run.loop.stats().prefix_queries == 40
    assert run_one(run, "again", TEXT[:40]) == 2 * PAGE


def test_a_sequence_holds_no_more_sliding_pages_than_a_window_touches() -> None:
    run = Run(Setting(windows=(33,), overlap=True, max_model_len=400))
    run.add("long", [5], max_tokens=300)
    most = 0
    while run.loop.has_work:
        run.step()
        most = max(most, run.loop.stats().sliding_pages_used)
    assert most == 3


def test_the_end_of_a_prefix_is_evicted_before_its_start() -> None:
    run = Run(Setting(num_full_pages=10))
    run_one(run, "first", TEXT[: 8 * PAGE])
    run_one(run, "other", TEXT[70:][: 4 * PAGE], max_tokens=2)  # five pages; two are free
    assert run_one(run, "again", TEXT[: 8 * PAGE]) == 5 * PAGE


def test_a_hit_is_usable_where_nothing_but_a_window_fits() -> None:
    run = Run(Setting(num_sliding_pages=3, num_full_pages=10))
    run_one(run, "first", TEXT[:100])
    assert run_one(run, "again", TEXT[:120]) == 6 * PAGE
