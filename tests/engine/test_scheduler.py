"""The batch of each step: budget, order, priorities, preemption, and no starvation."""

from typing import Any

import pytest

from oscine.types import StepPlan

from .harness import PAGE, Run, Setting

TEXT = [(11 * i) % 50 for i in range(150)]


def text(start: int, length: int) -> list[int]:
    """Prompts that share no page."""
    return [start, *TEXT[: length - 1]]


def tokens_by_slot(plan: StepPlan) -> dict[int, int]:
    return {s.slot: s.num_tokens for s in plan.sequences}


def test_decodes_go_before_prompts_and_prompts_fill_the_budget() -> None:
    run = Run(Setting(max_num_batched_tokens=20))
    run.add("short", text(0, 4), max_tokens=10)
    run.step()
    run.add("long", text(1, 50), max_tokens=10)
    for _ in range(3):
        run.step()
    assert [tokens_by_slot(plan) for plan in run.executor.plans] == [
        {0: 4},
        {0: 1, 1: 19},
        {0: 1, 1: 19},
        {0: 1, 1: 12},
    ]
    assert [s.sample for s in run.executor.plans[2].sequences] == [True, False]
    run.finish()


def test_steps_grow_no_longer_with_a_prompt_and_others_are_served_between_them() -> None:
    """A step with a limit of query-key pairs for its prompts, as on CPUs."""
    most = 2000
    run = Run(Setting(max_attended=most))
    run.add("long", text(0, 150), max_tokens=1)
    run.step()
    run.add("short", text(1, 10), max_tokens=2)
    run.finish()
    assert run.finished == ["short", "long"]
    for plan in run.executor.plans:
        assert sum(s.num_tokens * (s.start + s.num_tokens) for s in plan.sequences if s.num_tokens > 1) <= most
    chunks = [s.num_tokens for plan in run.executor.plans for s in plan.sequences if s.slot == 0]
    assert chunks[0] == 31
    assert chunks[1:-1] == sorted(chunks[1:-1], reverse=True)
    assert sum(chunks) == 150


def test_a_cancelled_prompt_takes_no_more_chunks() -> None:
    run = Run(Setting(max_attended=2000, overlap=True))
    run.add("long", text(0, 150), max_tokens=1)
    run.step()
    run.loop.cancel("long")
    run.add("next", text(1, 10), max_tokens=1)
    run.finish()
    assert sum(s.num_tokens > 30 for plan in run.executor.plans for s in plan.sequences) <= 2
    assert run.is_done("next")


def test_within_a_priority_first_come_is_first_served() -> None:
    run = Run(Setting(max_num_seqs=1))
    for i in range(6):
        run.add(f"r{i}", text(i, 20), max_tokens=1 + i % 3)
    run.finish()
    assert run.finished == [f"r{i}" for i in range(6)]


def test_a_lower_value_goes_first() -> None:
    run = Run(Setting(max_num_seqs=1))
    for i, priority in enumerate([2, 1, 0, 1, -5]):
        run.add(f"r{i}", text(i, 20), priority=priority)
    run.finish()
    assert run.finished == ["r4", "r2", "r1", "r3", "r0"]


@pytest.mark.parametrize("overlap", [False, True])
def test_an_urgent_request_takes_the_slot_of_the_least_urgent(overlap: bool) -> None:
    run = Run(Setting(max_num_seqs=2, overlap=overlap))
    run.add("low", text(0, 40), max_tokens=30, priority=1)
    run.add("lowest", text(1, 40), max_tokens=30, priority=2)
    for _ in range(5):
        run.step()
    run.add("urgent", text(2, 20), max_tokens=4)
    run.finish()
    assert run.finished == ["urgent", "low", "lowest"]
    assert run.loop.stats().preemptions == 1


def test_the_budget_of_a_preempted_sequence_is_free_again() -> None:
    run = Run(Setting(max_num_seqs=2, max_num_batched_tokens=20))
    run.add("low", text(0, 4), max_tokens=30, priority=1)
    run.add("lowest", text(1, 4), max_tokens=30, priority=2)
    run.step()
    run.add("urgent", text(2, 40), max_tokens=4)
    run.step()
    assert tokens_by_slot(run.executor.plans[-1]) == {0: 1, 1: 19}
    run.finish()


def test_an_equal_priority_takes_nothing() -> None:
    run = Run(Setting(max_num_seqs=2, num_full_pages=8))
    run.add("one", text(0, 50), max_tokens=30)
    run.add("two", text(1, 20), max_tokens=10)
    run.step()
    run.add("three", text(2, 50), max_tokens=30)
    run.finish()
    assert run.loop.stats().preemptions == 0


def test_an_urgent_request_does_not_wait_for_a_long_prompt_to_be_read() -> None:
    run = Run(Setting(max_num_batched_tokens=16))
    run.add("long", text(0, 150), max_tokens=1, priority=1)
    run.step()
    run.add("urgent", text(1, 10), max_tokens=1)
    run.step()
    assert run.finished == ["urgent"]
    run.finish()


def test_pages_are_taken_from_who_comes_later() -> None:
    run = Run(Setting(max_num_seqs=2, num_full_pages=10, prefix_caching=False))
    run.add("first", text(0, 10), max_tokens=140)
    run.add("second", text(1, 10), max_tokens=140)
    run.finish()
    assert run.finished == ["first", "second"]
    assert run.loop.stats().preemptions > 0


def test_who_finds_no_pages_and_nobody_behind_keeps_its_own() -> None:
    """The second of two grows until the pool is empty, then waits with its pages for the first to finish."""
    run = Run(Setting(max_num_seqs=2, num_full_pages=10))
    run.add("first", text(0, 64), max_tokens=17)  # five pages, from the start almost
    run.add("second", text(1, 10), max_tokens=100)
    run.finish()
    assert run.loop.stats().preemptions == 0


def test_what_a_preempted_request_computed_is_found_again() -> None:
    run = Run(Setting(max_num_seqs=1))
    run.add("low", text(0, 80), max_tokens=20, priority=1)
    for _ in range(10):
        run.step()
    run.add("urgent", text(1, 10), max_tokens=1)
    run.finish()
    again = run.executor.plans[-1 - next(i for i, plan in enumerate(reversed(run.executor.plans)) if plan.new)].new[0]
    assert again.num_cached_tokens == 5 * PAGE
    assert len(again.token_ids) > again.num_prompt_tokens == 80
    assert run.cached("low") == 0  # what is reported and counted is of the first admission
    stats = run.loop.stats()
    assert (stats.prompt_tokens, stats.prefix_queries, stats.prefix_hits) == (90, 90, 0)


def test_preempting_what_would_not_be_enough_is_left_alone() -> None:
    run = Run(Setting(num_full_pages=10))
    run.add("urgent", text(0, 100), max_tokens=20)
    run.add("low", text(1, 10), max_tokens=20, priority=1)
    run.step()
    run.step()
    run.add("urgent too", text(2, 100), max_tokens=2)
    run.finish()
    assert run.loop.stats().preemptions == 0
    assert run.finished == ["urgent", "low", "urgent too"]


def test_what_preempting_would_free_is_counted_again_only_after_a_sequence_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counting takes time for each page of all lower priorities."""
    run = Run(Setting(num_full_pages=14, max_num_batched_tokens=200))
    run.add("short", text(0, 45), max_tokens=10)
    run.add("long", text(1, 45), max_tokens=30)
    run.add("low", text(2, 25), max_tokens=30, priority=2)
    run.step()
    run.step()
    counted: list[int] = []  # steps
    fits = run.cache.fits

    def count(*args: Any, preempted: bool = False, **others: Any) -> bool:
        counted.extend([int(run.now)] * preempted)
        return fits(*args, preempted=preempted, **others)

    monkeypatch.setattr(run.cache, "fits", count)
    run.add("late", text(3, 125), max_tokens=2, priority=1)
    for _ in range(6):
        run.step()
    assert counted == [3]
    run.finish()
    assert run.finished == ["short", "late", "long", "low"]
    assert len(counted) == 2
    assert run.loop.stats().preemptions == 1


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    run = Run(Setting(num_full_pages=10, prefix_caching=False))
    for i in range(4):
        run.add(f"before {i}", text(i, 20), max_tokens=20)
    run.add("large", text(9, 140), max_tokens=4)
    for i in range(30):
        run.add(f"after {i}", text(10 + i, 20), max_tokens=20)
        run.step()
    run.finish()
    assert run.finished.index("large") == 4


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("priorities", [[0, 0, 0, 0], [0, 1, 2, 3], [3, 2, 1, 0]])
def test_requests_that_each_need_the_whole_pool_do_not_preempt_each_other_for_ever(
    overlap: bool, prefix_caching: bool, priorities: list[int]
) -> None:
    """Run.finish bounds the steps; the tokens computed bound the work done in vain."""
    setting = Setting(num_full_pages=10, num_sliding_pages=3, overlap=overlap, prefix_caching=prefix_caching)
    run = Run(setting)
    for i, priority in enumerate(priorities):
        run.add(f"r{i}", text(i, 30 + i), max_tokens=120, priority=priority)
        run.step()
    run.finish()
    assert run.finished == [f"r{i}" for i in sorted(range(4), key=lambda i: (priorities[i], i))]
    assert run.executor.num_computed < 3 * 4 * 152


def test_a_long_chunk_leaves_pages_to_those_who_run() -> None:
    """Otherwise a running sequence at the end of its page would preempt the newcomer while its chunk is in flight."""
    run = Run(Setting(num_sliding_pages=10, max_num_batched_tokens=200, overlap=True))
    run.add("small", text(0, 15), max_tokens=30)
    run.step()
    run.add("large", text(1, 150), max_tokens=2)
    run.finish()
    assert run.loop.stats().preemptions == 0


@pytest.mark.long
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("staggered", [False, True])
def test_decode_needs_three_pages_per_sequence_for_a_window_of_two_pages(
    overlap: bool, prefix_caching: bool, staggered: bool
) -> None:
    """The page that falls out of the window is free before the next is taken, also where all sequences need one in
    the same step. So no sequence waits or is preempted."""
    run = Run(
        Setting(
            max_num_seqs=12,
            max_num_batched_tokens=400,
            overlap=overlap,
            prefix_caching=prefix_caching,
            windows=(2 * PAGE,),
            num_full_pages=500,
            num_sliding_pages=3 * 12,
        )
    )
    for i in range(12):
        run.add(f"r{i}", text(i, 5 + i if staggered else 5), max_tokens=100)
    run.finish()
    assert run.loop.stats().preemptions == 0
    assert run.executor.num_steps == 100, "the prompts, then a token of each in every step"


@pytest.mark.parametrize("window", [PAGE + 1, 2 * PAGE - 7, 2 * PAGE, 2 * PAGE + 1])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_page_is_freed_once_no_later_token_and_no_next_turn_reads_it(window: int, overlap: bool) -> None:
    """Checked against a list of pages, per number of computed tokens: those that later tokens read, and those that the
    next turn would read if the sequence ended with the next token."""
    run = Run(Setting(windows=(window,), overlap=overlap, num_full_pages=20))
    run.add("long", text(0, 3), max_tokens=140)
    while run.loop.has_work:
        run.step()
        for request in run.loop._scheduler.running.values():
            computed = len(request.token_ids) - 1  # the last token is sampled
            later = range(max(0, computed - window + 1), 200)
            end = (computed + 1) // PAGE * PAGE  # of the last full page then
            held = {position // PAGE for position in (*later, *range(max(0, end - window + 1), end))}
            assert request.first_held == [0, min(held)]
    run.finish()


def test_a_waiting_request_may_take_pages_that_sequences_with_a_full_window_do_not_need() -> None:
    """Each has three pages and needs no fourth. The request that waits takes the only three that are left."""
    run = Run(Setting(windows=(2 * PAGE,), num_sliding_pages=12, prefix_caching=False))
    for i in range(3):
        run.add(f"r{i}", text(i, 41), max_tokens=100)
        run.step()
    run.add("newcomer", text(3, 40), max_tokens=5)
    run.step()
    assert run.loop.stats().num_running == 4
    run.finish()
    assert run.loop.stats().preemptions == 0


def test_a_waiting_request_leaves_pages_for_windows_that_are_not_full_yet() -> None:
    run = Run(Setting(windows=(2 * PAGE,), num_sliding_pages=11, prefix_caching=False))
    for i in range(3):
        run.add(f"r{i}", text(i, 20), max_tokens=60)  # two pages, then three
    run.step()
    run.add("newcomer", text(3, 40), max_tokens=5)  # needs three pages; five are free, three of them reserved
    run.step()
    assert run.loop.stats().num_running == 3
    run.finish()
    assert run.loop.stats().preemptions == 0


def test_a_newcomer_leaves_pages_to_those_who_run() -> None:
    run = Run(Setting(num_full_pages=10, max_num_batched_tokens=200))
    run.add("large", text(0, 120), max_tokens=20)  # eight pages, then nine
    run.step()
    run.add("small", text(1, 30), max_tokens=2)
    run.finish()
    assert run.finished == ["large", "small"]
    assert run.loop.stats().preemptions == 0


def test_a_newcomer_does_not_care_for_the_growth_of_lower_priorities() -> None:
    run = Run(Setting(num_full_pages=10, max_num_batched_tokens=200))
    run.add("low", text(0, 120), max_tokens=20, priority=1)  # eight pages, then nine
    run.step()
    run.add("urgent", text(1, 30), max_tokens=2)
    run.finish()
    assert run.finished == ["urgent", "low"]
    assert run.loop.stats().preemptions == 0


@pytest.mark.parametrize(("length", "preemptions"), [(40, 0), (60, 1)])
def test_a_newcomer_takes_from_lower_priorities_what_it_leaves_to_the_others(length: int, preemptions: int) -> None:
    run = Run(Setting(num_full_pages=10, prefix_caching=False))
    run.add("urgent", text(0, 40), max_tokens=6)
    run.add("low", text(1, 40), max_tokens=6, priority=2)
    for _ in range(3):
        run.step()
    run.add("between", text(2, length), max_tokens=2, priority=1)  # four pages are free, one is for the urgent one
    run.finish()
    assert run.loop.stats().preemptions == preemptions


def test_pages_for_urgent_sequences_are_not_given_to_others_as_lower_priorities_need_none() -> None:
    run = Run(Setting(max_num_seqs=8, windows=(2 * PAGE,), num_sliding_pages=18, prefix_caching=False))
    for i in range(3):
        run.add(f"low{i}", text(i, 41), max_tokens=60, priority=2)  # three pages of the window, and never more
        run.step()
    for i in range(3):
        run.add(f"urgent{i}", text(10 + i, 20), max_tokens=60)  # two pages, then three
    run.step()
    assert run.loop.stats().num_running == 6
    run.add("between", text(20, 20), max_tokens=60, priority=1)  # two pages; the three left are for the urgent ones
    run.step()
    assert run.loop.stats().preemptions == 1
    run.finish()


def test_a_sequence_whose_window_is_shared_may_need_more_pages() -> None:
    """They free nothing while another sequence holds the same page."""
    run = Run(Setting(max_num_seqs=16, windows=(2 * PAGE,), num_sliding_pages=24))
    run.add("first", text(0, 4 * PAGE), max_tokens=1)
    run.finish()
    for i in range(16):
        run.add(f"r{i}", text(0, 4 * PAGE) + text(1 + i, 3), max_tokens=60)
    run.finish()
    assert run.loop.stats().preemptions <= 3


def test_a_preempted_request_does_not_start_again_while_a_step_of_it_is_in_flight() -> None:
    """A chunk in flight holds more sliding pages than it takes to start: it could start at once."""
    run = Run(Setting(num_sliding_pages=10, max_num_batched_tokens=200, overlap=True))
    run.add("low", text(0, 150), max_tokens=2, priority=1)
    run.step()
    run.add("urgent", text(1, 60), max_tokens=2)
    run.finish()
    assert run.loop.stats().preemptions == 1


def test_of_two_prompts_the_urgent_one_is_read_first() -> None:
    run = Run(Setting(max_num_batched_tokens=16))
    run.add("low", text(0, 60), max_tokens=1, priority=1)
    run.step()
    run.add("urgent", text(1, 40), max_tokens=1)
    run.finish()
    assert [tokens_by_slot(plan) for plan in run.executor.plans[:5]] == [
        {0: 16},
        {1: 16},
        {1: 16},
        {1: 8, 0: 8},
        {0: 16},
    ]


def test_a_window_must_fit_the_pool() -> None:
    with pytest.raises(ValueError, match="2 window-24 pages cannot hold a window; 3 can"):
        Run(Setting(num_sliding_pages=2))
