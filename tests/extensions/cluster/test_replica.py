"""A replica over a real engine process, without a Ray cluster around it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray import serve

from benchmarks.serving.server import engines_below
from oscine.engine.process.client import EngineClient, EngineDied, EngineError
from oscine.extensions.cluster.ray.replica import Replica, ReplicaOptions
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions
from oscine.types import GenerationRequest, SamplingParams
from tests.extensions.cluster.local_placer import guest
from tests.extensions.cluster.scripted_router import ScriptedRouter, served
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines

FAKE = EngineOptions(executor="fake", fake_step_s=0.01, quiet=True)


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray would say."""
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="ab12cd34"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@asynccontextmanager
async def replica(
    engine: EngineOptions = FAKE, drain_s: float = 20.0, count: int = 1
) -> AsyncIterator[tuple[Replica, ScriptedRouter]]:
    router = ScriptedRouter()
    async with served(router) as service:

        async def where() -> str:
            return service.address

        made = Replica(ReplicaOptions("fake", "aggregated", (engine,) * count, "5eed", drain_s), where)
        await made.start()
        try:
            yield made, router
        finally:
            await made.shutdown()


@asynccontextmanager
async def ingress(router: ScriptedRouter) -> AsyncIterator[ClusterEngine]:
    """Another process that reaches the replica's engine where the router knows it."""
    await until(lambda: "ab12cd34" in router.replicas)
    endpoints = router.replicas["ab12cd34"].endpoints
    assert endpoints is not None
    client = guest(endpoints.requests)
    await client.start()
    await client.wait_ready()
    try:
        yield client
    finally:
        await client.stop()


def engine_of(made: Replica) -> EngineClient:
    (engine,) = made._engines.values()
    return engine


def request(max_tokens: int) -> GenerationRequest:
    return GenerationRequest("r", [1, 2, 3], SamplingParams(max_tokens, temperature=0.0))


async def count(client: ClusterEngine, max_tokens: int) -> int:
    return sum([len(output.token_ids) async for outputs in client.submit(request(max_tokens)) for output in outputs])


def engines() -> set[psutil.Process]:
    """Those of other tests of this process too."""
    return {*engines_below(psutil.Process())}


def test_it_says_where_its_engine_is_and_how_it_does() -> None:
    async def run() -> None:
        async with replica() as (made, router), ingress(router) as client:
            assert await count(client, 20) == 20
            said = router.replicas["ab12cd34"]
            assert (said.model, said.role, said.node, said.state) == ("fake", "aggregated", "127.0.0.1", "ready")
            assert said.endpoints is not None
            assert said.endpoints.requests.startswith("tcp://127.0.0.1:")
            assert (said.endpoints.kv_events or "").startswith("tcp://127.0.0.1:")
            await until(lambda: engine_of(made).stats.generated_tokens == 20)  # an engine says when it is idle
            grown = await made.record_autoscaling_stats()
            assert (grown["generated_tokens"], grown["first_tokens"]) == (20.0, 1.0)
            assert (await made.record_autoscaling_stats())["generated_tokens"] == 0.0
            await made.check_health()

    asyncio.run(run())


def test_each_of_its_engines_is_enlisted_and_their_loads_add_up() -> None:
    async def run() -> None:
        async with replica(count=2) as (made, router):
            names = ["ab12cd34.0", "ab12cd34.1"]
            await until(lambda: sorted(router.replicas) == names)
            for i, name in enumerate(names):
                endpoints = router.replicas[name].endpoints
                assert endpoints is not None
                client = guest(endpoints.requests)
                await client.start()
                await client.wait_ready()
                assert await count(client, 10 + i) == 10 + i
                await client.stop()
            await until(lambda: sum(one.stats.generated_tokens for one in made._engines.values()) == 21)
            grown = await made.record_autoscaling_stats()
            assert (grown["generated_tokens"], grown["first_tokens"]) == (21.0, 2.0)
            most = [one.info.max_num_seqs for one in made._engines.values() if one.info is not None]
            assert grown["max_num_seqs"] == sum(most)
            await made.check_health()

    asyncio.run(run())


def test_it_lets_streams_end_before_it_does_and_says_that_it_drains() -> None:
    before = engines()

    async def run() -> None:
        async with replica() as (made, router), ingress(router) as client:
            stream = asyncio.create_task(count(client, 100))
            await until(lambda: engine_of(made).stats.num_running == 1)
            ending = asyncio.create_task(made.shutdown())
            await until(lambda: router.replicas["ab12cd34"].state == "draining")
            assert await stream == 100
            await ending
            assert engines() <= before

    asyncio.run(run())


def test_an_engine_that_is_started_again_is_enlisted_with_its_new_address() -> None:
    async def run() -> None:
        async with replica() as (made, router), ingress(router):
            before = router.replicas["ab12cd34"].endpoints
            psutil.Process(engine_of(made).pid).kill()
            await until(lambda: router.replicas["ab12cd34"].state == "starting")
            await until(lambda: router.replicas["ab12cd34"].state == "ready")
            assert router.replicas["ab12cd34"].endpoints != before

    asyncio.run(run())


def test_scaling_hears_of_requests_that_wait_at_the_router() -> None:
    async def run() -> None:
        async with replica() as (made, router):
            router_queue = {"fake": 5}
            router.queued = lambda: router_queue  # type: ignore[method-assign]
            await until(lambda: made._router.queued == router_queue)
            assert (await made.record_autoscaling_stats())["held_back"] == 5.0

    asyncio.run(run())


def test_streams_that_take_too_long_break_off() -> None:
    async def run() -> None:
        async with replica(drain_s=0.2) as (made, router), ingress(router) as client:
            stream = asyncio.create_task(count(client, 10_000))
            await until(lambda: engine_of(made).stats.num_running == 1)
            await made.shutdown()
            with pytest.raises(EngineDied):
                await stream

    asyncio.run(run())


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing() -> None:
    before = engines()

    async def run() -> None:
        options = EngineOptions(model=ModelOptions(max_model_len=131072), cache=CacheOptions(kv_cache_bytes=1000))
        with pytest.raises(EngineError) as caught:
            async with replica(options):
                pass
        assert "\n" not in str(caught.value)
        assert engines() <= before

    asyncio.run(run())
