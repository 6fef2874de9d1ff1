"""The router's fleet, over real engine processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest

from oscine.engine.core.prefix_index import extend_digests, root_of
from oscine.engine.process.client import EngineClient
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, PeerOptions, SchedulerOptions
from oscine.types import EngineInfo, GenerationRequest, SamplingParams
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines

SEED = "5eed"
PAGE = 16
OPTIONS = EngineOptions(
    ModelOptions(max_model_len=512),
    CacheOptions(page_size=PAGE),
    SchedulerOptions(max_num_seqs=2),  # so there are 64 pages
    PeerOptions(host="127.0.0.1", kv_events=True, prefix_seed=SEED),
    executor="fake",
    quiet=True,
)


def digests_of(tokens: list[int]) -> list[bytes]:
    digests: list[bytes] = []
    extend_digests(digests, tokens, (len(tokens) - 1) // PAGE, page_size=PAGE, root=root_of(SEED))
    return digests


def report(engine: EngineClient) -> ReplicaReport:
    assert engine.info is not None
    return ReplicaReport("m", endpoints=engine.info.endpoints, info=engine.info)


async def generate(engine: EngineClient, name: str, prompt: list[int]) -> int:
    """Returns how many tokens of it were cached."""
    cached = 0
    async with engine.submit(GenerationRequest(name, prompt, SamplingParams(max_tokens=4))) as stream:
        async for outputs in stream:
            cached = max([cached, *[output.num_cached_tokens for output in outputs]])
    return cached


@asynccontextmanager
async def cluster() -> AsyncIterator[tuple[Fleet, EngineClient]]:
    engine, fleet = EngineClient(OPTIONS), Fleet()
    await engine.start()
    try:
        await engine.wait_ready()
        fleet.join("a", report(engine))
        yield fleet, engine
    finally:
        await fleet.close()
        await engine.stop()


def run(test: Callable[[Fleet, EngineClient], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with cluster() as (fleet, engine):
            await test(fleet, engine)

    asyncio.run(inside())


def idle_after(fleet: Fleet, num_requests: int) -> bool:
    stats = fleet.snapshot()[0].stats
    return stats.requests == num_requests and not stats.num_running


def known_tokens(fleet: Fleet, prompt: list[int]) -> int:
    return fleet.overlap_pages(digests_of(prompt)).get("a", 0) * PAGE


def test_it_knows_what_each_engine_will_find() -> None:
    prompts = [[i] * 200 + list(range(50)) for i in range(8)]  # 8 times 15 pages are more than there are

    async def test(fleet: Fleet, engine: EngineClient) -> None:
        for i, prompt in enumerate([*prompts, prompts[-1], prompts[0], prompts[-2]]):
            await until(partial(idle_after, fleet, i))
            believed = known_tokens(fleet, prompt)
            assert await generate(engine, f"r{i}", prompt) == believed
        (snapshot,) = fleet.snapshot()
        assert fleet.num_gaps == 0
        assert 0 < snapshot.num_indexed_pages <= 64

    run(test)


def test_an_engine_that_is_killed_comes_back_with_nothing() -> None:
    prompt = list(range(300))

    async def test(fleet: Fleet, engine: EngineClient) -> None:
        await generate(engine, "1", prompt)
        await until(lambda: known_tokens(fleet, prompt) == 288)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        await engine.wait_ready()
        fleet.join("a", report(engine))
        assert known_tokens(fleet, prompt) == 0
        await generate(engine, "2", prompt)
        await until(lambda: known_tokens(fleet, prompt) == 288)

    run(test)


def test_whoever_comes_later_learns_all_that_is_cached() -> None:
    prompt = list(range(300))

    async def test(fleet: Fleet, engine: EngineClient) -> None:
        await generate(engine, "1", prompt)
        later = Fleet()
        later.join("a", report(engine))
        await until(lambda: known_tokens(later, prompt) == 288)
        await later.close()

    run(test)


def test_a_model_is_described_by_a_replica_that_there_is_and_by_the_last_one_where_there_is_none() -> None:
    fleet, old, new = Fleet(), EngineInfo("m", 512, 300, 64, 64), EngineInfo("m", 1024, 300, 64, 64)
    fleet.join("a", ReplicaReport("m", info=old))
    assert fleet.info == old
    fleet.join("b", ReplicaReport())
    fleet.remove("a")
    assert fleet.info is None, "the new one has not said yet what it is"
    fleet.join("b", ReplicaReport("m", info=new))
    assert fleet.info == new
    fleet.remove("b")
    assert fleet.info == new
