"""Evicted pages: they are saved ahead, come back right, survive a restart, and never delay or spoil anything."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.types import GenerationRequest, SamplingParams
from tests.engine.harness import PAGE, Setting
from tests.extensions.offload.offload_run import PAGE_BYTES, STEP_S, OffloadRun

SMALL = Setting(num_full_pages=12, num_sliding_pages=14, max_num_batched_tokens=32, overlap=True, lazy=True)


def prompt(num_tokens: int, start: int = 0) -> list[int]:
    return [(start + 7 * i) % 50 for i in range(num_tokens)]


def sessions(run: OffloadRun, count: int = 4, turns: int = 3) -> dict[str, int]:
    """Sessions of several turns, one after the other in each turn. Returns the cached tokens of each request."""
    known, cached = [prompt(40, 3 * i) for i in range(count)], {}
    for turn in range(turns):
        for i in range(count):
            name = f"{turn} {i} {len(run.requests)}"
            cached[name] = run.ask(name, list(known[i]))
            known[i] += run.tokens(name) + prompt(20, turn)
    return cached


def test_pages_that_the_cache_evicts_come_back_from_host_memory() -> None:
    with_offload, without = OffloadRun(SMALL), OffloadRun(SMALL, slots=1)
    found, lost = sessions(with_offload), sessions(without)
    assert with_offload.outputs.keys() == without.outputs.keys()
    assert all(with_offload.tokens(name) == without.tokens(name) for name in found)
    assert list(found.values()) == [0] * 4 + [32] * 4 + [64] * 4
    assert sum(lost.values()) < sum(found.values()) / 2
    stats = with_offload.loop.stats()
    assert stats.offload_host_hits > 0
    assert stats.offload_saved_pages >= stats.offload_host_pages > 0
    assert stats.offload_host_bytes == stats.offload_host_pages * PAGE_BYTES
    assert stats.prefix_hits == sum(found.values())
    assert stats.offload_lost_pages == stats.offload_disk_pages == 0


def test_an_idle_engine_saves_all_that_is_cached_and_then_rests() -> None:
    run = OffloadRun(SMALL)
    run.ask("a", prompt(100))
    assert not run.loop.has_work
    assert run.loop.stats().offload_host_pages == 6 + 2 + 1  # full pages, the last window, and one before it
    run.evict()
    assert run.ask("b", prompt(100)) == 96


def test_running_requests_go_on_while_pages_come_back() -> None:
    run = OffloadRun(replace(SMALL, num_full_pages=30, num_sliding_pages=30))
    run.ask("a", prompt(100))
    run.evict()
    run.add("running", prompt(10), max_tokens=60)
    for _ in range(3):
        run.step()
    run.add("b", prompt(100))
    while not run.is_done("b"):
        before = len(run.tokens("running"))
        run.step()
        assert len(run.tokens("running")) == before + 1
    run.finish()
    assert run.cached("b") == 96


def test_two_requests_share_what_one_of_them_brings_back() -> None:
    run = OffloadRun(replace(SMALL, num_full_pages=30, num_sliding_pages=30))
    run.ask("a", prompt(100))
    run.evict()
    for name in ("b", "c"):
        run.add(name, prompt(100))
    run.finish()
    assert (run.cached("b"), run.cached("c")) == (96, 96)
    assert run.loop.stats().offload_host_hits == 8


def test_a_page_that_is_given_away_while_it_is_copied_is_thrown_away() -> None:
    run = OffloadRun(SMALL)
    run.add("a", prompt(100))
    while not run.is_done("a"):
        run.step()
    while run.offload.saver._saving is None:
        run.loop.step()
    run.evict()  # before the copy, which then reads what others write
    for memory in run.executor.memory:
        for page in range(len(memory)):
            memory[page] = [-1] * PAGE
    run.finish()
    assert run.loop.stats().offload_host_pages == 0
    assert run.ask("b", prompt(100)) == 0


def test_a_request_that_is_cancelled_while_its_pages_come_leaves_nothing_behind() -> None:
    for steps in range(8):
        run = OffloadRun(SMALL)
        run.ask("a", prompt(100))
        run.evict()
        run.add("b", prompt(100))
        for _ in range(steps):
            run.step()
        run.loop.cancel("b")
        run.add("c", prompt(100, 1))
        run.finish()
        assert run.ask("d", prompt(100)) == 96


def test_a_request_that_is_cancelled_when_its_pages_have_just_come_leaves_nothing_behind() -> None:
    run = OffloadRun(SMALL)
    run.ask("a", prompt(100))
    run.evict()
    run.add("b", prompt(100))
    while not run.tasks:
        run.loop.step()
    while run.tasks:
        run.tasks.popleft()()
    run.loop.cancel("b")  # before the loop looks at the copy
    run.finish()
    assert run.ask("c", prompt(100)) == 96


def test_prompt_logprobs_and_salts_are_as_without_offloading() -> None:
    run = OffloadRun(SMALL)
    run.ask("a", prompt(100), cache_salt="mine")
    run.evict()
    assert run.ask("b", prompt(100)) == 0
    assert run.ask("c", prompt(100), cache_salt="yours") == 0
    run.evict()
    assert run.ask("d", prompt(100), cache_salt="mine") == 96
    run.evict()
    run.add("e", prompt(100), prompt_logprobs=0)
    run.finish()
    assert run.cached("e") == 0


def test_pages_do_not_come_back_where_computing_is_quicker() -> None:
    run = OffloadRun(SMALL)
    run.ask("a", prompt(100))
    run.evict()
    run.offload.kept.rates.token.note(1e-9, 1e6)
    run.offload.kept.rates.host.note(1e3, 1)
    assert run.ask("b", prompt(100)) == 0
    assert run.loop.stats().offload_declined == 1
    assert run.loop.stats().offload_host_hits == 0


@pytest.mark.parametrize("is_copying", [False, True])
def test_pages_that_do_not_come_in_time_are_computed(is_copying: bool) -> None:
    run = OffloadRun(SMALL)
    run.ask("a", prompt(100))
    run.evict()
    run.add("b", prompt(100))
    if is_copying:
        while run.offload.loader._returns[0].loading is None:
            run.loop.step()
    run.now += 1e6 / STEP_S
    run.loop.step()
    assert run.offload.requests == []
    run.finish()
    assert run.cached("b") == 0
    assert run.loop.stats().offload_host_hits == 0


def test_a_tier_that_is_refused_is_tried_again_in_the_end() -> None:
    run = OffloadRun(replace(SMALL, prefix_caching=True))
    run.ask("a", prompt(100))
    run.offload.kept.rates.host.note(1e-3, 1.0)
    for i in range(2000):
        run.evict()
        if run.offload.kept.rates.host.per_unit < 1e-6 or run.ask(f"b{i}", prompt(100)):
            break
        run.offload.kept.rates.token._seconds, run.offload.kept.rates.token._units = 1.0, 1e5
    else:
        pytest.fail("never tried again")


# ---- files ----


def test_pages_go_to_files_and_survive_a_restart(tmp_path: Path) -> None:
    first = OffloadRun(SMALL, slots=4, folder=tmp_path)
    found = sessions(first)
    assert first.loop.stats().offload_disk_hits > 0
    disk_pages = first.loop.stats().offload_disk_pages
    assert first.loop.stats().offload_disk_bytes == sum(path.stat().st_size for path in first.files())
    first.end()
    second = OffloadRun(SMALL, folder=tmp_path)
    assert second.loop.stats().offload_disk_pages == disk_pages
    assert len(second.events.known["DISK"]) > 0
    again = sessions(second)
    assert all(after >= before for before, after in zip(found.values(), again.values(), strict=True))
    assert list(again.values())[:4] == [32] * 4
    for before, after in zip(found, again, strict=True):
        assert first.tokens(before) == second.tokens(after)


def test_a_file_of_another_model_is_never_used(tmp_path: Path) -> None:
    first = OffloadRun(SMALL, folder=tmp_path)
    first.ask("a", prompt(100))
    first.end()
    other = OffloadRun(SMALL, folder=tmp_path, identity="another")
    assert other.ask("a", prompt(100)) == 0
    other.end()
    same = OffloadRun(SMALL, folder=tmp_path)
    assert same.ask("a", prompt(100)) == 96


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "page":
        data[-5] ^= 1
    elif how == "header":
        data[3] ^= 1
    elif how == "cut":
        del data[-100:]
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["header", "cut", "removed"])
def test_a_file_that_a_restart_cannot_use_is_removed_and_its_prompt_computed(tmp_path: Path, how: str) -> None:
    first = OffloadRun(SMALL, folder=tmp_path)
    first.ask("a", prompt(100))
    first.end()
    [path] = first.files()
    if how == "removed":
        path.unlink()
    else:
        damage(path, how)
    (path.parent / "0000000000000009.part").write_bytes(b"half")
    second = OffloadRun(SMALL, folder=tmp_path)
    assert os.listdir(path.parent) == ["lock"]
    assert second.ask("b", prompt(100)) == 0


@pytest.mark.parametrize("how", ["page", "cut", "removed"])
def test_a_file_that_is_found_damaged_is_removed_and_its_prompt_computed(tmp_path: Path, how: str) -> None:
    run = OffloadRun(SMALL, folder=tmp_path)
    run.ask("a", prompt(100))
    run.end()
    run = OffloadRun(SMALL, folder=tmp_path)
    [path] = run.files()
    if how == "removed":
        path.unlink()
    else:
        damage(path, how)
    assert run.ask("b", prompt(100)) == 0
    assert run.loop.stats().offload_disk_failures == 1
    assert len(run.said) == 1
    assert path not in run.files()
    run.evict()
    assert run.ask("c", prompt(100)) == 96  # it was computed, and saved again


def test_two_requests_may_find_the_same_file_damaged(tmp_path: Path) -> None:
    setting = replace(SMALL, num_full_pages=30, num_sliding_pages=30)
    run = OffloadRun(setting, folder=tmp_path)
    for start in range(2):
        run.add(f"{start}", prompt(50, start))
    run.finish()
    run.end()
    run = OffloadRun(setting, folder=tmp_path)
    [path] = run.files()
    path.unlink()
    for start in range(2):
        run.add(f"{start}", prompt(50, start))
    run.finish()
    assert [run.cached(f"{start}") for start in range(2)] == [0, 0]
    assert run.loop.stats().offload_disk_failures == 1


def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(descriptor: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("oscine.extensions.offload.page_files.os.write", write)


def test_a_full_disk_ends_writing_for_a_while_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OffloadRun(SMALL, folder=tmp_path)
    with monkeypatch.context() as patch:
        full_disk(patch)
        found = sessions(run)
        assert list(found.values()) == [0] * 4 + [32] * 4 + [64] * 4  # host memory goes on
        assert run.loop.stats().offload_disk_failures == len(run.said) > 0
        assert "No space left on device" in run.said[0]
        assert run.files() == []
        assert os.listdir(run.files.__self__.store._files.folder) == ["lock"]  # type: ignore[union-attr]
    run.now += 100.0 / STEP_S
    run.ask("later", prompt(20, 9))
    assert run.loop.stats().offload_disk_pages > 0


def test_files_keep_to_their_limit_and_the_least_used_one_goes_first(tmp_path: Path) -> None:
    limit = 40_000
    run = OffloadRun(SMALL, slots=8, folder=tmp_path, disk_bytes=limit)
    for i in range(12):
        run.ask(f"{i}", prompt(60, i))
        assert sum(path.stat().st_size for path in run.files()) == run.loop.stats().offload_disk_bytes <= limit
    run.evict()
    assert run.ask("first", prompt(60, 0)) == 0
    stats = run.loop.stats()
    assert 0 < stats.offload_saved_pages <= 13 * 6  # what the cache still has is not saved again and again


def test_what_earlier_engines_left_counts_and_goes_first(tmp_path: Path) -> None:
    old = OffloadRun(SMALL, folder=tmp_path, identity="old", disk_bytes=40_000)
    for i in range(6):
        old.ask(f"{i}", prompt(60, i))
    old.end()
    left = sum(path.stat().st_size for path in old.files())
    run = OffloadRun(SMALL, folder=tmp_path, disk_bytes=40_000)
    assert run.store.leftover_bytes == left
    for i in range(6):
        run.ask(f"{i}", prompt(60, i))
    assert run.store.leftover_bytes == 0
    assert old.files() == []


def test_a_limit_that_no_file_fits_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--kv-offload-disk-bytes must be at least"):
        OffloadRun(SMALL, folder=tmp_path, disk_bytes=1000)


# ---- anything ----

REQUESTS = st.lists(
    st.tuples(
        st.integers(0, 3),  # session
        st.integers(1, 40),  # tokens that it adds
        st.integers(1, 12),  # to generate
        st.integers(0, 12),  # steps before the next one
        st.sampled_from([None, None, None, 1, 4]),  # steps until it is cancelled
        st.integers(0, 1),  # priority
    ),
    min_size=1,
    max_size=14,
)


@pytest.mark.long
@given(
    requests=REQUESTS,
    slots=st.sampled_from([1, 3, 9, 60]),
    disk=st.sampled_from([0, 35_000, 200_000]),
    late=st.integers(1, 4),
    overlap=st.booleans(),
    windows=st.sampled_from([(24,), (40, 5)]),
)
@settings(max_examples=40)
def test_any_requests_get_the_tokens_that_they_would_get_without(
    tmp_path_factory: pytest.TempPathFactory,
    requests: list[tuple[int, int, int, int, int | None, int]],
    slots: int,
    disk: int,
    late: int,
    overlap: bool,
    windows: tuple[int, ...],
) -> None:
    folder = tmp_path_factory.mktemp("kv") if disk else None
    setting = replace(SMALL, overlap=overlap, lazy=overlap, windows=windows)
    run = OffloadRun(setting, slots=slots, folder=folder, disk_bytes=disk)
    known = [prompt(10, i) for i in range(4)]
    ends: dict[str, int] = {}
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if run.tasks and steps % late == 0:
            run.tasks.popleft()()
        super(OffloadRun, run).step()
        for name in [name for name, end in ends.items() if end <= steps]:
            del ends[name]
            run.loop.cancel(name)

    for i, (session, added, max_tokens, pause, end, priority) in enumerate(requests):
        known[session] = (known[session] + prompt(added, i))[:140]
        name = f"{i}"
        run.submit(GenerationRequest(name, list(known[session]), SamplingParams(max_tokens=max_tokens), priority))
        if end is not None:
            ends[name] = steps + end
        for _ in range(pause):
            step()
    run.finish()
    run.end()
