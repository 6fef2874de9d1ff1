"""Latency counters, with the harness's clock of one second per step."""

import pytest

from .harness import Run, Setting

TEXT = [(11 * i) % 50 for i in range(150)]


def waits(run: Run) -> tuple[int, float, int, float]:
    stats = run.loop.stats()
    return stats.first_tokens, stats.first_token_s, stats.inter_tokens, stats.inter_token_s


def test_first_and_further_tokens() -> None:
    run = Run(Setting(max_num_batched_tokens=16))
    run.add("a", TEXT[:40], max_tokens=4)
    for _ in range(2):
        run.step()
    assert waits(run) == (0, 0.0, 0, 0.0)
    run.step()
    assert waits(run) == (1, 3.0, 0, 0.0)
    run.step()
    assert waits(run) == (1, 3.0, 1, 1.0)
    run.finish()
    assert waits(run) == (1, 3.0, 3, 3.0)
    run.add("b", TEXT[50:55], max_tokens=1)
    run.finish()
    assert waits(run) == (2, 4.0, 3, 3.0)


def test_a_token_that_is_late_counts_before_it_is_there() -> None:
    run = Run(Setting(max_num_seqs=1, max_num_batched_tokens=16))
    run.add("low", TEXT[:10], max_tokens=3, priority=1)
    run.step()
    run.add("urgent", TEXT[20:30], max_tokens=5)
    for _ in range(4):
        run.step()
    assert waits(run) == (2, 2.0, 3, 3.0 + 4.0)
    run.finish()
    assert waits(run) == (2, 2.0, 6, 4.0 + 7.0)


def test_continued_sequences_count_from_their_arrival_here() -> None:
    run = Run()
    run.add_cut("a", TEXT[:10], 5, max_tokens=8)
    run.finish()
    assert waits(run) == (1, 1.0, 2, 2.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("stream_interval", [1, 7])
def test_a_cancelled_request_counts_what_it_got(overlap: bool, stream_interval: int) -> None:
    run = Run(Setting(overlap=overlap, stream_interval=stream_interval))
    run.add("a", TEXT[:10], max_tokens=50)
    for _ in range(12):
        run.step()
    before = waits(run)
    run.loop.cancel("a")
    assert waits(run) == before
    assert before[2] == before[3] == run.loop.stats().generated_tokens - 1 > 5


def test_queued_and_active_tokens() -> None:
    run = Run(Setting(max_num_seqs=2, max_num_batched_tokens=16))
    run.add("a", TEXT[:10], max_tokens=20)
    run.add("b", TEXT[10:50], max_tokens=20)
    run.add("c", TEXT[50:80], max_tokens=20)
    assert run.loop.stats().queued_tokens == 10 + 40 + 30
    run.step()
    stats = run.loop.stats()
    assert (stats.queued_tokens, stats.active_tokens) == (34 + 30, 11 + 40)
    run.finish()
    stats = run.loop.stats()
    assert (stats.queued_tokens, stats.active_tokens) == (0, 0)
