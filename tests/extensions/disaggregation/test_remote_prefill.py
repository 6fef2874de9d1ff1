"""Prompts that another engine computed: fetched pages, their release, and results that do not depend on them."""

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.engine.core.page_pool import PagePool
from oscine.engine.wire.messages import Prefill, Prefilled, decode_to_client, encode
from oscine.types import RemotePrefill, SamplingParams
from tests.engine.harness import PAGE, Setting
from tests.engine.paged_executor import naive_tokens
from tests.engine.pool_check import num_available
from tests.extensions.disaggregation.engine_pair import Pair

SETTING = Setting(num_full_pages=64, num_sliding_pages=64, overlap=True, lazy=True)


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(num_tokens)]


def moved(news: RemotePrefill | None) -> tuple[int, int]:
    assert news is not None
    assert news.failure is None, news.failure
    return news.num_full_pages, news.num_sliding_pages


def failure(news: RemotePrefill | None) -> str:
    assert news is not None
    assert news.num_bytes == 0
    return news.failure or ""


def evict_all(pool: PagePool) -> None:
    for page in pool.allocate(num_available(pool), num_available(pool)):
        pool.release(page)


def test_all_full_pages_and_the_last_window_are_fetched_and_the_rest_is_computed() -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(100))
    pair.finish()
    assert moved(pair.news("a")) == (6, 2)  # 96 tokens; a window of 24 after them touches two pages
    assert pair.here.cached("a") == 96
    assert pair.here.executor.num_computed == 4 + 3
    stats = pair.here.loop.stats()
    assert (stats.remote_prefills, stats.remote_prefill_failures, stats.fetched_pages) == (1, 0, 8)
    assert (stats.prompt_tokens, stats.local_hits, stats.external_hits) == (100, 0, 96)
    assert stats.fetched_bytes == 8
    assert stats.fetch_s > 0


def test_each_group_fetches_the_pages_of_its_own_window() -> None:
    pair = Pair(replace(SETTING, windows=(40, 24, 5)))
    pair.add("a", prompt(100))
    pair.finish()
    assert moved(pair.news("a")) == (6, 3 + 2 + 1)
    assert pair.here.cached("a") == 96


def test_pages_of_a_salt_are_computed_and_fetched_for_it_alone() -> None:
    pair = Pair(SETTING)
    for name, salt in (("a", "mine"), ("b", "mine"), ("c", "yours"), ("d", "")):
        pair.add(name, prompt(100), cache_salt=salt)
        pair.finish()
    assert [pair.here.cached(name) for name in "abcd"] == [96, 96, 96, 96]
    assert pair.news("b") is None  # nothing was missing
    assert [moved(pair.news(name)) for name in "acd"] == [(6, 2)] * 3
    assert pair.there.run.executor.num_computed == 3 * 96


def test_only_what_is_missing_is_fetched() -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(64), max_tokens=1)
    pair.finish()
    assert moved(pair.news("a")) == (3, 2)  # the last token is computed here, and with it a page of its own
    pair.add("b", prompt(64) + prompt(66, 3))
    pair.finish()
    assert moved(pair.news("b")) == (4, 2)


def test_short_prompts_known_prefixes_and_prompt_logprobs_stay_here() -> None:
    pair = Pair(SETTING)
    pair.add("short", prompt(40), min_tokens=41)
    pair.add("less than a page", prompt(PAGE), min_tokens=1)
    pair.add("logprobs", prompt(90, 1), prompt_logprobs=0)
    pair.finish()
    assert {pair.news(name) for name in pair.here.requests} == {None}
    pair.add("again", prompt(40) + prompt(20, 2), min_tokens=40)
    pair.finish()
    assert pair.news("again") is None
    assert pair.there.run.executor.num_steps == 0
    uncached = Pair(replace(SETTING, prefix_caching=False))
    uncached.add("a", prompt(100))
    uncached.finish()
    assert uncached.news("a") is None


def test_pages_that_are_under_way_are_not_fetched_twice() -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(80) + [1] * 20)
    pair.add("b", prompt(80) + [2] * 20)
    pair.add("c", prompt(80) + [1] * 20)
    pair.finish()
    assert sorted(moved(pair.news(name)) for name in "abc") == [(0, 0), (1, 1), (6, 2)]


def test_running_requests_go_on_while_pages_come() -> None:
    pair = Pair(SETTING)
    pair.add("running", prompt(10), max_tokens=100)
    pair.step()
    pair.add("a", prompt(100))
    while not pair.here.is_done("a"):
        before = len(pair.here.tokens("running"))
        pair.step()
        assert len(pair.here.tokens("running")) in (before, before + 1)
    assert len(pair.here.tokens("running")) > 8
    pair.finish()


def test_who_does_not_answer_in_time_is_not_waited_for() -> None:
    pair = Pair(SETTING)
    pair.there.is_stuck = True
    pair.add("a", prompt(100), timeout_s=20.0)
    for _ in range(35):
        pair.step()
    assert pair.here.is_done("a")
    assert failure(pair.news("a")) == "there did not deliver within 20 s"
    assert pair.here.executor.num_computed == 103
    pair.there.is_stuck = False
    pair.finish()
    assert pair.there.run.executor.num_steps <= 2  # it was told that nobody wants it any more


def test_a_transfer_that_takes_too_long_is_ended_and_its_pages_are_nobodys_until_it_has() -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(150), timeout_s=11.0)
    pair.finish()
    assert failure(pair.news("a")) == "there did not deliver within 11 s"


@pytest.mark.parametrize("timeout_s", range(5, 14))
def test_pages_of_an_ended_transfer_are_not_given_away_while_bytes_still_arrive(timeout_s: float) -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(150), timeout_s=timeout_s)
    while pair.fetches.requests:
        pair.add(f"b{len(pair.here.requests)}", prompt(3 * PAGE, len(pair.here.requests)), min_tokens=1000, priority=-1)
        pair.step()
    pair.finish()
    assert failure(pair.news("a")) == f"there did not deliver within {timeout_s} s"


def test_pages_that_a_launched_step_may_write_to_are_not_fetched_into() -> None:
    """The sequence that runs ends by a stop token, while one more token of it is under way to a page that it loses."""
    pair = Pair(replace(SETTING, num_full_pages=12))
    said, _ = naive_tokens(prompt(100), SamplingParams(max_tokens=40), 160)
    stop = next(i for i in range(14, 40) if said[i] not in said[:i])
    pair.add("running", prompt(100), min_tokens=1000, max_tokens=60, stop_token_ids=(said[stop],))
    pair.step()
    pair.add("a", prompt(100, 1))
    pair.finish()
    assert moved(pair.news("a")) == (6, 2)


def test_a_prompt_whose_pages_got_lost_there_is_computed_here() -> None:
    """There, its old full pages are known but no window, so it is computed once more, while the index keeps to the old
    pages, which are evicted before that has ended."""
    pair = Pair(SETTING, replace(SETTING, max_num_batched_tokens=16))
    pair.there.run.add("old", prompt(100), max_tokens=1)
    pair.there.run.finish()
    evict_all(pair.there.run.cache.pools[1])
    pair.add("a", prompt(100))
    for _ in range(4):
        pair.step()
    evict_all(pair.there.run.cache.pools[0])
    pair.finish()
    assert failure(pair.news("a")) == "there: pages of the prompt were evicted while others were computed"


@pytest.mark.parametrize("steps", range(14))
def test_the_other_engine_dies_at_any_time(steps: int) -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(120))
    for _ in range(steps):
        pair.step()
    pair.kill_there()
    pair.finish()
    news = pair.news("a")
    assert news is not None
    assert news.failure in (None, "the connection to there was lost")


@pytest.mark.parametrize("steps", range(14))
def test_a_request_ends_at_any_time(steps: int) -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(120))
    for _ in range(steps):
        pair.step()
    pair.here.loop.cancel("a")
    pair.finish()
    assert pair.here.outputs["a"][-1].finish_reason == "cancelled"


@pytest.mark.parametrize("steps", range(14))
def test_leases_end_when_the_reader_is_gone(steps: int) -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(120), timeout_s=30.0)
    for _ in range(steps):
        pair.step()
    wire = pair.wire
    wire.cut()
    pair.there.service.lose(b"decode engine")
    for _ in range(40):
        pair.there.step(wire)
    assert not pair.there.jobs
    assert [pool.num_used for pool in pair.there.run.cache.pools] == [0, 0]
    assert not pair.there.run.loop.has_work


def test_a_lease_that_is_no_number_ends_too() -> None:
    pair = Pair(SETTING)
    pair.wire.to_there.append(encode(Prefill("x", prompt(96), float("nan"), 0)))
    for _ in range(320):
        pair.there.step(pair.wire)
    assert not pair.there.jobs


def test_a_broken_transfer_fails_its_request_alone() -> None:
    pair = Pair(SETTING)
    pair.add("a", prompt(100))
    pair.add("b", prompt(100, 1))
    pair.transfers.fails = 1
    pair.finish()
    assert failure(pair.news("a")) == "the transfer from there failed: bad luck"
    assert moved(pair.news("b")) == (6, 2)
    stats = pair.here.loop.stats()
    assert (stats.remote_prefills, stats.remote_prefill_failures) == (1, 1)


@pytest.mark.parametrize(
    ("model", "reason"), [("n", "pages differ in model: n there, m here"), (None, "it gives no pages to others")]
)
def test_an_engine_whose_pages_are_of_no_use_is_asked_once(model: str | None, reason: str) -> None:
    pair = Pair(SETTING, model=model)
    pair.add("a", prompt(100))
    pair.finish()
    pair.add("b", prompt(100, 1))
    pair.finish()
    assert failure(pair.news("a")) == failure(pair.news("b")) == reason
    assert pair.fetches._num_asked == 1


def test_a_refusal_there_means_computing_here() -> None:
    pair = Pair(SETTING, replace(SETTING, max_waiting=1, max_num_seqs=1))
    for i in range(4):
        pair.add(str(i), prompt(100, i))
    pair.finish()
    found = [pair.news(str(i)) for i in range(4)]
    refused = "there: too many requests are waiting"
    assert [news is not None and news.failure for news in found] == [None, refused, refused, refused]


def test_a_request_may_end_between_the_news_that_its_prompt_does_not_come_and_the_next_step() -> None:
    """What the other engine says is heard when a request is added, too."""
    pair = Pair(SETTING, model=None)
    pair.add("a", prompt(100))
    pair.there.step(pair.wire)
    pair.add("b", prompt(100, 1))
    pair.here.loop.cancel("a")
    pair.finish()
    assert pair.here.outputs["a"][-1].finish_reason == "cancelled"
    assert len(pair.here.tokens("b")) == 4


def test_an_engine_that_cannot_fetch_says_so() -> None:
    pair = Pair(SETTING, fetches=False)
    pair.add("a", prompt(100))
    while not pair.here.is_done("a"):
        pair.step()
    assert failure(pair.news("a")) == "this engine does not fetch pages"


def test_fetched_pages_make_way_for_requests_that_run_or_come_first() -> None:
    """The cache holds one long prompt and little more; two of them are fetched, and a short one needs room as well."""
    pair = Pair(replace(SETTING, num_full_pages=12, num_sliding_pages=12, max_num_seqs=1), SETTING)
    pair.add("a", prompt(100), max_tokens=30)
    pair.add("b", prompt(100, 1), max_tokens=30)
    pair.add("c", prompt(20, 2), max_tokens=30, priority=-1)
    pair.finish()
    assert all(pair.here.is_done(name) for name in "abc")


def test_a_cache_full_of_running_requests_is_left_to_them() -> None:
    pair = Pair(replace(SETTING, num_full_pages=12, num_sliding_pages=64), SETTING)
    pair.add("running", prompt(90), max_tokens=60, min_tokens=1000)
    for _ in range(3):
        pair.step()
    pair.add("a", prompt(100, 1), timeout_s=25.0)
    pair.finish()
    assert failure(pair.news("a")) == "there did not deliver within 25 s"
    assert pair.here.loop.stats().preemptions == 0


PROMPTS = st.tuples(st.integers(1, 150), st.integers(0, 2), st.integers(0, 150))


@pytest.mark.long
@settings(max_examples=60)
@given(data=st.data())
def test_whatever_happens_tokens_are_right_and_no_page_is_lost(data: st.DataObject) -> None:
    draw = data.draw
    here = Setting(
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.sampled_from((16, 64))),
        overlap=draw(st.booleans()),
        lazy=draw(st.booleans()),
        windows=(windows := draw(st.sampled_from(((24,), (24,), (), (40, 24, 5))))),
    )
    here, there = (
        replace(
            here,
            num_full_pages=draw(st.integers(11, 40)),
            num_sliding_pages=draw(st.integers(4, 40)),
            num_slots=draw(st.sampled_from([0, 14 + 4 * len(windows), 40])),
            per_slot=(*draw(st.tuples(*[st.integers(1, 2)] * len(windows))), 1)[:: draw(st.sampled_from([1, -1]))],
        )
        for _ in range(2)
    )
    pair = Pair(here, there)
    for i in range(draw(st.integers(1, 8))):
        length, family, branch = draw(PROMPTS)
        tokens = prompt(branch, family) + prompt(length, i)
        timeout_s = draw(st.sampled_from((5.0, 15.0, 100.0)))
        pair.add(str(i), tokens[:length], timeout_s=timeout_s, priority=draw(st.integers(0, 1)), seed=i)
        event = draw(st.sampled_from(("", "", "", "cancel", "fail", "stuck", "go on", "kill")))
        if event == "cancel":
            pair.here.loop.cancel(str(draw(st.integers(0, i))))
        elif event == "fail":
            pair.transfers.fails += 1
        elif event == "kill":
            pair.kill_there()
        elif event:
            pair.there.is_stuck = event == "stuck"
        for _ in range(draw(st.integers(0, 12))):
            pair.step()
    pair.there.is_stuck = False
    pair.finish()


@pytest.mark.parametrize(
    ("pages", "named"),
    [
        ([[1 << 40] * 6, [0, 1]], "full pages must be between 0 and 63"),
        ([[-1] * 6, [0, 1]], "full pages must be between 0 and 63"),
        ([[0] * 6, [64] * 2], "window-24 pages must be between 0 and 63"),
        ([[1], [0, 1]], "it has 1 full pages of the prompt; there are 6"),
        ([[0] * 6, []], "it has 0 window-24 pages of the prompt; there are 2"),
        ([[0] * 6], "it has pages of 1 groups; there are 2"),
    ],
)
def test_pages_that_cannot_be_are_not_fetched(pages: list[list[int]], named: str) -> None:
    """Answers of an engine with another version, or of a process that only claims to be one."""
    pair = Pair(SETTING)
    pair.add("a", prompt(100))
    while not any(isinstance(decode_to_client(data), Prefilled) for data in pair.wire.to_here if data is not None):
        pair.there.step(pair.wire)
        pair.here.now += 1.0
    pair.wire.to_here = [_bent(data, pages) for data in pair.wire.to_here]
    pair.finish()
    assert failure(pair.news("a")) == f"there: {named}"


def _bent(data: bytes | None, pages: list[list[int]]) -> bytes | None:
    """The message with other pages; unchanged if it has none."""
    message = None if data is None else decode_to_client(data)
    return encode(msgspec.structs.replace(message, pages=pages)) if isinstance(message, Prefilled) else data
