"""The lag of the event loop, as measured by the server itself."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from oscine.api.telemetry import loop_lag
from oscine.api.telemetry.loop_lag import core_wait, measure_lag
from tests.server import ServerProcess


def longest_lag(monkeypatch: pytest.MonkeyPatch, waited_s: float) -> float:
    """Of a loop that is kept for 0.2 s. `waited_s`: what the kernel counts, between two looks, of waits for a core."""
    looks = count()

    @contextmanager
    def scripted() -> Iterator[Callable[[], float]]:
        yield lambda: next(looks) * waited_s

    async def lags() -> list[float]:
        found: list[float] = []
        measuring = asyncio.create_task(measure_lag(found.append))
        while not found:
            await asyncio.sleep(0)
        time.sleep(0.2)
        before = len(found)
        while len(found) == before:
            await asyncio.sleep(0)
        measuring.cancel()
        return found[before:]

    monkeypatch.setattr(loop_lag, "core_wait", scripted)
    return max(asyncio.run(lags()))


def test_work_that_keeps_the_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_lag(monkeypatch, 0.0) > 0.1


def test_waits_for_a_core_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    assert longest_lag(monkeypatch, 1000.0) == 0.0


def test_waits_for_a_core_only_grow() -> None:
    with core_wait() as waited_s:
        assert 0.0 <= waited_s() <= waited_s()


def test_a_server_measures_it(fake_server: ServerProcess) -> None:
    assert fake_server.metric("oscine:event_loop_lag_seconds_count") > 0
