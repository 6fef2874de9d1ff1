"""Page groups that share the memory of the cache: the load decides which group has how much of it."""

import pytest

from .harness import PAGE, Run, Setting


def shares(run: Run) -> list[float]:
    """Of the slots, those with pages of each group that are held or cached."""
    return [
        len({page // pool.per_slot for page in range(pool.num_pages) if pool._holders[page] or pool._indexed[page]})
        / run.setting.num_slots
        for pool in run.cache.pools
    ]


def extremes(run: Run) -> list[tuple[float, float]]:
    """The least and the largest share of each group from the middle of a load to its end."""
    seen = []
    while run.loop.has_work:
        run.step()
        seen.append(shares(run))
    return [(min(of_group), max(of_group)) for of_group in zip(*seen[len(seen) // 2 :], strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_memory_goes_to_long_prompts_then_to_many_short_ones_and_back(*, prefix_caching: bool) -> None:
    """Eight pages of full attention in a slot. A long sequence has 208 of them in 26 slots, and a window in 3. Nine
    short ones have 27 pages of each kind, and may need one more of full attention each: 36 in 5 slots."""
    setting = Setting(
        max_num_seqs=16,
        max_num_batched_tokens=256,
        overlap=True,
        prefix_caching=prefix_caching,
        num_slots=32,
        per_slot=(8, 1),
        max_model_len=4000,
    )
    run = Run(setting)
    for turn in range(2):
        for i in range(2):
            run.add(f"long {turn} {i}", [turn, i, *range(3300)], 20)
        (_, most_full), (least_window, _) = extremes(run)
        assert most_full >= 0.8
        assert least_window <= 0.2
        for i in range(30):
            run.add(f"short {turn} {i}", [turn, 40 + i, *range(32)], 12)
        (least_full, _), (_, most_window) = extremes(run)
        assert least_full <= 0.2
        assert most_window >= 0.8
    run.finish()
    assert run.loop.stats().preemptions == 0


def held_shares(run: Run) -> list[list[float]]:
    """Runs all requests. Returns for each step, of the slots, those with pages of each group in page tables."""
    seen = []
    while run.loop.has_work:
        run.step()
        running = run.loop._scheduler.running.values()
        held = [{page for r in running for page in r.pages[group][r.first_held[group] :]} for group in range(2)]
        slots = [{page // each for page in pages} for pages, each in zip(held, run.setting.per_slot, strict=True)]
        seen.append([len(of_group) / run.setting.num_slots for of_group in slots])
    return seen


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize(
    ("per_slot", "of_windows"), [((1, 1), 1 / 2), ((2, 1), 2 / 3)], ids=["one a slot", "two a slot"]
)
def test_all_memory_of_gpt_oss_follows_its_load(
    per_slot: tuple[int, int], of_windows: float, *, prefix_caching: bool
) -> None:
    """A window is two pages, as in gpt-oss. Long prompts, then many turns of less than a window, and back.

    For each page of a window that a sequence holds it also holds one of full attention. So windows have at most half of
    what is held, or two thirds where a slot has two pages of full attention.
    """
    setting = Setting(
        max_num_seqs=64,
        max_num_batched_tokens=256,
        overlap=True,
        prefix_caching=prefix_caching,
        windows=(2 * PAGE,),
        num_slots=120,
        per_slot=per_slot,
        max_model_len=4000,
    )
    run = Run(setting)
    for turn in range(3):
        for i in range(3):
            run.add(f"long {turn} {i}", [turn, i, *range(per_slot[0] * 500)], 40)
        full, windows = max(held_shares(run))
        assert full >= 0.8
        assert windows <= 0.1
        for i in range(80):
            run.add(f"short {turn} {i}", [turn, 40 + i, *range(12)], 16)
        seen = held_shares(run)
        assert max(windows for _, windows in seen) == pytest.approx(of_windows)
        assert [1 - of_windows, of_windows] in [pytest.approx(shares) for shares in seen]
    run.finish()
    assert run.loop.stats().preemptions == 0


def test_what_a_group_has_cached_is_evicted_for_another() -> None:
    """The pages of a long prompt are found again after a few short requests, and not after many."""
    run = Run(Setting(max_num_batched_tokens=256, num_slots=40, max_model_len=600))
    long = [7, *range(500)]
    run.add("first", long, 1)
    run.finish()
    run.add("short", [1, *range(20)], 1)
    run.add("again", long, 1)
    run.finish()
    assert run.cached("again") == 496
    for i in range(20):
        run.add(f"short {i}", [10 + i, *range(40)], 1)
    run.finish()
    run.add("late", long, 1)
    run.finish()
    assert run.cached("late") == 0


@pytest.mark.long
@pytest.mark.parametrize("windows", [(24,), (34, 17)])
@pytest.mark.parametrize(
    ("overlap", "lazy", "most_drafts"), [(False, False, 0), (True, False, 0), (True, True, 0), (True, False, 3)]
)
def test_one_sequence_can_have_all_the_memory(
    windows: tuple[int, ...], *, overlap: bool, lazy: bool, most_drafts: int
) -> None:
    """Two pages of full attention in a slot, as in FP8. The longest request that is not refused runs to its end, and
    never waits for itself: chunks of a prompt end anywhere."""
    # A window of w tokens touches 1 + (w - 1) / 16 pages, rounded up, and one more is taken ahead.
    tokens = 2 * (12 - sum(2 + -(-(window - 1) // PAGE) for window in windows)) * PAGE
    for chunk in (7, 24, 1000):
        setting = Setting(
            max_num_seqs=2,
            max_num_batched_tokens=chunk,
            overlap=overlap,
            lazy=lazy,
            prefix_caching=chunk == 24,
            windows=windows,
            num_slots=12,
            per_slot=(2, *[1] * len(windows)),
            max_model_len=400,
            most_drafts=most_drafts,
        )
        run = Run(setting)
        for prompt in (tokens // 2, tokens):
            run.add(f"{prompt}", [i % 50 for i in range(prompt)], tokens + 1 - prompt)
            run.finish()
            assert run.tokens(f"{prompt}")
            run.add(f"{prompt} + 1", [i % 50 for i in range(prompt)], tokens + 2 - prompt)
            run.finish()
            assert f"do not fit a KV cache of {tokens} tokens" in str(run.outputs[f"{prompt} + 1"][0].error)
        assert run.loop.stats().preemptions == 0


def test_the_used_slots_are_those_with_pages_that_are_held() -> None:
    """Two pages of full attention in a slot, so three are in two of them. Cached pages do not count."""
    run = Run(Setting(num_slots=20, per_slot=(2, 1)))
    run.add("a", [*range(40)], 8)
    run.step()
    stats = run.loop.stats()
    assert (stats.full_pages_used, stats.sliding_pages_used) == (3, 3)
    assert (stats.kv_slots_used, stats.kv_slots_total) == (2 + 3, 20)
    assert (stats.full_pages_total, stats.sliding_pages_total) == (40, 20)
    assert stats.kv_usage == 0.25
    assert stats.kv_slots_cached == 0
    run.finish()
    assert run.loop.stats().kv_usage == 0
    assert run.loop.stats().kv_slots_cached == 1 + 2  # 47 tokens are computed, so two pages of each group are full


def test_of_memory_that_is_not_shared_the_fullest_counts() -> None:
    run = Run(Setting(num_full_pages=20, num_sliding_pages=4))
    run.add("a", [*range(40)], 8)
    run.step()
    assert (run.loop.stats().kv_slots_used, run.loop.stats().kv_slots_total) == (3, 4)
    assert run.loop.stats().kv_usage == 0.75


@pytest.mark.parametrize("length", [33, 40, 49])
def test_an_urgent_request_takes_pages_that_fill_half_of_a_slot(length: int) -> None:
    """Two pages of full attention in a slot. The first request has 3 or 4 in two slots, beside its window."""
    run = Run(Setting(num_slots=6, per_slot=(2, 1)))
    run.add("late", [1, *range(length - 1)], 12)
    run.step()
    run.add("urgent", [2, *range(39)], 5, priority=-1)
    run.step()
    assert run.outputs["urgent"]
    assert run.loop.stats().preemptions == 1
    run.finish()


def test_an_urgent_request_does_not_take_what_others_keep_from_it() -> None:
    """Slots that "late" shares with an equally urgent request do not open when it is preempted."""
    run = Run(Setting(num_slots=8, per_slot=(2, 1)))
    run.add("first", [1], 14, priority=-1)
    run.add("late", [2], 14)
    run.step()
    assert (run.loop.stats().full_pages_used, run.loop.stats().kv_slots_used) == (2, 3)
    run.add("urgent", [3, *range(88)], 5, priority=-1)  # 6 pages in 3 slots and a window in 3; one for each that grows
    run.step()
    assert run.loop.stats().preemptions == 0
    run.finish()


def test_an_urgent_request_does_not_take_what_others_share() -> None:
    """Pages of a prefix that "late" shares with an equally urgent request are not free when it is preempted."""
    run = Run(Setting(num_slots=20, max_num_batched_tokens=100))
    prefix = [7] * 80
    run.add("first", [*prefix, 1], 30, priority=-1)
    run.step()
    run.add("late", [*prefix, 2], 30)
    run.step()
    assert run.cached("late") == 80
    assert run.loop.stats().kv_slots_used == 7 + 4  # two in each group are not shared
    run.add("urgent", [3, *range(129)], 5, priority=-1)  # 9 pages and a window in 3
    run.step()
    assert run.loop.stats().preemptions == 0
    run.finish()
