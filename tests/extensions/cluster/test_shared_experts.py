"""Engines that have a part of the experts each, behind one API process: real engines with the embedded model."""

import asyncio
import os
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from oscine.engine.process.client import EngineDied, EngineError
from oscine.extensions.replicas.data_parallel import DataParallelEngine
from oscine.settings.config import EngineOptions, ModelOptions
from tests.engine_process.harness import read, request, run, serving, tokens
from tests.extensions.cluster.test_data_parallel import first, kill, parallel, where
from tests.extensions.parallel.watch_clock import TIMEOUT_S, WatchClock
from tests.waiting import until

ONE = EngineOptions(quiet=True, num_threads=1)
REQUESTS = [
    request(str(i), [10 + i] * (70 * (i % 3) + 5), max_tokens=40, temperature=float(i % 2), seed=i) for i in range(7)
]


def group(size: int, options: EngineOptions = ONE) -> AbstractAsyncContextManager[DataParallelEngine]:
    return parallel(*[options] * size, share_experts=True)


async def answers(engine: DataParallelEngine) -> list[list[int]]:
    return [tokens(found) for found in await asyncio.gather(*(read(engine.submit(one)) for one in REQUESTS))]


def cpu_seconds(engine: DataParallelEngine) -> float:
    """Of all engines."""
    fields = [Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split() for one in engine.engines.values()]
    return sum(int(of_one[11]) + int(of_one[12]) for of_one in fields) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of one engine."""
    found: list[list[int]] = []

    async def test() -> None:
        async with serving(ONE) as engine:
            found.extend([tokens(await read(engine.submit(one))) for one in REQUESTS])

    run(test)
    return found


async def check_killed(engine: DataParallelEngine, victim: str, expected: list[list[int]]) -> None:
    """An engine that is killed ends the others; all begin again, and the answers are what they would have been."""
    pids = {one.pid for one in engine.engines.values()}
    streams = [engine.submit(one) for one in REQUESTS]
    begun = await asyncio.gather(*(first(stream, 5) for stream in streams))
    assert {name for stream in streams for name in where(stream)} == set(engine.engines)
    kill(engine, victim)
    rest = await asyncio.gather(*map(read, streams))
    assert [tokens(before + after) for before, after in zip(begun, rest, strict=True)] == expected
    await asyncio.gather(*(one.wait_ready() for one in engine.engines.values()))
    assert pids.isdisjoint(one.pid for one in engine.engines.values())
    assert [one.restarts for one in engine.engines.values()] == [1] * len(engine.engines)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("size", "victim"), [(3, "1"), pytest.param(2, "0", marks=SLOW), pytest.param(4, "1", marks=SLOW)]
)
def test_tokens_are_those_of_one_engine_though_one_is_killed_until_the_group_is_stopped(
    size: int, victim: str, expected: list[list[int]]
) -> None:
    async def test() -> None:
        async with group(size) as engine:
            await check_killed(engine, victim, expected)
            assert await answers(engine) == expected
            single = engine.submit(replace(REQUESTS[0], request_id="single"))
            assert tokens(await read(single)) == expected[0], "the other engines have nothing to do"
            pids = [one.pid for one in engine.engines.values()]
            stream = engine.submit(request("live", max_tokens=3000, stop_token_ids=()))
            await first(stream, 2)
            await engine.stop()
            with pytest.raises(EngineDied, match="stopped"):
                await read(stream)
            assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

    run(test)


@pytest.mark.slow  # observes two idle engines for two seconds
def test_engines_without_requests_cost_nothing() -> None:
    async def test() -> None:
        async with group(2) as engine:
            await answers(engine)
            await until(lambda: all(one.stats.num_running == 0 for one in engine.engines.values()))
            steps = [one.stats.steps for one in engine.engines.values()]
            before = cpu_seconds(engine)
            await asyncio.sleep(2)
            assert cpu_seconds(engine) - before < 0.2
            assert [one.stats.steps for one in engine.engines.values()] == steps

    run(test)


@pytest.mark.slow  # starts the group twice; test_watch.py tests one engine
def test_an_engine_that_hangs_ends_the_group(expected: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with group(2, replace(ONE, engine_timeout_s=TIMEOUT_S)) as engine:
            hung = engine.engines["1"].pid
            assert hung is not None
            stream = engine.submit(REQUESTS[0])
            await clock.hang(hung)
            assert tokens(await read(stream)) == expected[0]
            assert not Path(f"/proc/{hung}").exists()

    run(test)


def test_a_group_without_one_of_its_engines_fails() -> None:
    async def test() -> None:
        broken = EngineOptions(ModelOptions(model="/nowhere"), executor="fake")
        engine = DataParallelEngine([broken, ONE], "model", share_experts=True)
        await engine.start()
        with pytest.raises(EngineError):
            await engine.wait_ready()
        assert engine.state == "failed"
        await engine.stop()

    run(test)
