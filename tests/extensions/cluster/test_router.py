"""A router and the replicas that enlist with it."""

import asyncio
from collections import Counter

import pytest

from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Placement
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.types import Endpoints, EngineInfo
from tests.engine_process.harness import run
from tests.waiting import until


def report(name: str, **changes: object) -> ReplicaReport:
    info = EngineInfo("m", 4096, 300, page_size=64, max_num_seqs=64)
    return ReplicaReport("m", endpoints=Endpoints(f"tcp://{name}:1"), info=info, **changes)  # type: ignore[arg-type]


def router() -> Router:
    made = Router()
    made.reconfigure([ModelSpec(("m",), (RoleSpec(),), start_timeout_s=20)])
    return made


def placement(name: str) -> Placement:
    return Placement(name, "m", [name.encode().ljust(16)], 100, 8)


def test_requests_that_waited_for_a_router_are_spread_over_all_replicas() -> None:
    async def test() -> None:
        made = router()
        waiting = [asyncio.create_task(made.place(placement(str(i)))) for i in range(8)]
        await asyncio.sleep(0)
        assert made.missing() == [("m", "aggregated")]
        replicas = [asyncio.create_task(made.enlist("a", report("a")))]
        await asyncio.sleep(0.01)
        replicas.append(asyncio.create_task(made.enlist("b", report("b"))))
        found = Counter([place.replica for place in await asyncio.gather(*waiting)])
        assert min(found["a"], found["b"]) >= 3
        for replica in replicas:
            replica.cancel()
        await asyncio.gather(*replicas, return_exceptions=True)
        assert (await made.snapshot()).replicas == []

    run(test)


def test_a_newer_report_replaces_the_older_one() -> None:
    async def test() -> None:
        made = router()
        first = asyncio.create_task(made.enlist("a", report("a")))
        assert (await made.place(placement("1"))).replica == "a"
        second = asyncio.create_task(made.enlist("a", report("a", state="draining")))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        (replica,) = (await made.snapshot()).replicas
        assert replica.state == "draining"
        assert made.place_now(placement("2")) is None
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert (await made.snapshot()).replicas == []

    run(test)


def test_models_come_and_go_and_their_replicas_stay() -> None:
    async def test() -> None:
        made = router()
        replica = asyncio.create_task(made.enlist("a", report("a")))
        await made.place(placement("1"))
        made.reconfigure([])
        with pytest.raises(NoPlace, match="the model 'm' is not deployed"):
            await made.place(placement("2"))
        made.reconfigure([ModelSpec(("m",), (RoleSpec(),))])
        await until(lambda: made.place_now(placement("3")) is not None)
        replica.cancel()
        await asyncio.gather(replica, return_exceptions=True)

    run(test)
