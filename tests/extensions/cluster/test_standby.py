"""An ingress places requests itself while the cluster's router is away: real routers, and real connections to them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from oscine.extensions.replicas.client.router import RouterAway, RouterClient
from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.routing.service import RouterService
from oscine.extensions.replicas.spec import router_messages
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from oscine.extensions.replicas.standby import StandbyRouter
from oscine.types import Endpoints, EngineInfo
from tests.engine_process.harness import run
from tests.extensions.cluster.test_model_router import placement
from tests.waiting import until

MODELS = [ModelSpec(("m",), (RoleSpec(),))]


def report(name: str, max_num_seqs: int = 64) -> ReplicaReport:
    info = EngineInfo("m", 4096, 300, page_size=64, max_num_seqs=max_num_seqs)
    return ReplicaReport("m", endpoints=Endpoints(f"tcp://{name}:1"), info=info)


class Site:
    """The routers that there are, an ingress's client of them, and its own router."""

    def __init__(self) -> None:
        self.address = ""
        self.standby = StandbyRouter()
        self.standby.reconfigure(MODELS)
        self.client = RouterClient(self.where, substitute=self.standby)
        self._enlisted: list[asyncio.Task[None]] = []

    async def where(self) -> str:
        if not self.address:
            raise RouterAway("there is none")
        return self.address

    @asynccontextmanager
    async def router(self) -> AsyncIterator[Router]:
        router = Router()
        router.reconfigure(MODELS)
        service = RouterService(router, "127.0.0.1")
        self.address = service.address
        try:
            yield router
        finally:
            for one in self._enlisted:
                one.cancel()
            self._enlisted.clear()
            await service.close()

    def enlist(self, router: Router, name: str, max_num_seqs: int = 64) -> None:
        self._enlisted.append(asyncio.create_task(router.enlist(name, report(name, max_num_seqs))))

    async def knows(self, *names: str) -> None:
        """The ingress's own router has just these replicas."""

        async def known() -> list[str]:
            return sorted(one.replica for one in (await self.standby.snapshot()).replicas)

        async with asyncio.timeout(20):
            while await known() != [*names]:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    one = Site()
    one.client.watch()
    try:
        yield one
    finally:
        one.client.close()
        await one.standby.close()


def test_a_router_that_is_lost_is_replaced_at_once_and_back_in_charge_later() -> None:
    async def test() -> None:
        async with site() as at:
            async with at.router() as router:
                at.enlist(router, "a")
                await at.knows("a")
                assert (await at.client.place(placement("1"))).replica == "a"
                assert at.standby.num_placed == 0, "the router is there"
            await until(lambda: at.standby.serves("m"))
            assert (await at.client.place(placement("2"))).replica == "a"
            assert (await at.client.describe("m")).max_num_seqs == 64
            assert at.standby.num_placed == 1
            async with at.router() as router:
                assert (await at.client.place(placement("3"))).replica == "a", "the new router knows no replica yet"
                assert at.standby.num_placed == 2
                at.enlist(router, "b")
                await at.knows("b")
                assert (await at.client.place(placement("4"))).replica == "b"
                assert at.standby.num_placed == 2

    run(test)


def test_a_request_that_waits_at_a_lost_router_is_placed_by_the_ingress() -> None:
    """The router's replica is full by its count; its own report at the ingress has room."""

    async def test() -> None:
        async with site() as at:
            async with at.router() as router:
                at.enlist(router, "a", max_num_seqs=1)
                await at.knows("a")
                bound = 5
                for number in range(bound):
                    await at.client.place(placement(str(number)))
                waiting = asyncio.create_task(at.client.place(placement("waits")))
                await until(lambda: router.queued() == {"m": 1})
            assert (await waiting).replica == "a"

    run(test)


def test_replicas_come_change_and_go() -> None:
    async def test() -> None:
        async with site() as at, at.router() as router:
            at.enlist(router, "a")
            at.enlist(router, "b")
            await at.knows("a", "b")
            leaving = asyncio.create_task(router.enlist("a", replace(report("a"), state="draining")))
            async with asyncio.timeout(20):
                while {one.state for one in (await at.standby.snapshot()).replicas} != {"draining", "ready"}:
                    await asyncio.sleep(0.01)
            leaving.cancel()
            await at.knows("b")
            at.standby.reconfigure([])
            await at.knows()

    run(test)


def test_without_a_router_and_without_replicas_it_is_waited_for() -> None:
    async def test() -> None:
        async with site() as at:
            async with at.router() as router:
                asked = asyncio.create_task(at.client.place(placement("1")))
                await until(lambda: router.queued() == {"m": 1})
            assert not at.standby.serves("m")
            async with at.router() as router:
                at.enlist(router, "a")
                assert (await asked).replica == "a"
                assert at.standby.num_placed == 0

    run(test)


def test_an_ingress_that_learns_its_models_last_knows_the_replicas_that_there_were() -> None:
    """The router tells its list at once, and Serve gives the ingress its models after that."""

    async def test() -> None:
        async with site() as at:
            at.standby.reconfigure([])
            async with at.router() as router:
                at.enlist(router, "a")
                await until(lambda: at.standby._of_router == {"m"})  # the list has come
                await at.knows()
                at.standby.reconfigure(MODELS)
                await at.knows("a")
            await until(lambda: at.standby.serves("m"))
            assert (await at.client.place(placement("1"))).replica == "a"

    run(test)


def test_a_request_that_waits_for_a_router_is_placed_once_the_ingress_can_do_it() -> None:
    """Far earlier than the minute for which it would wait for the router."""

    async def test() -> None:
        async with site() as at:
            asked = [asyncio.create_task(at.client.place(placement(str(number)))) for number in range(3)]
            described = asyncio.create_task(at.client.describe("m"))
            await until(lambda: at.client._connecting is not None)
            at.standby.hear({"a": report("a")})  # as from a router that is lost again before it is asked
            at.standby.hear(None)
            assert {place.replica for place in await asyncio.gather(*asked)} == {"a"}
            assert (await described).max_num_seqs == 64
            assert at.standby.num_placed == 3

    run(test)


def test_an_ingress_of_another_release_is_refused_in_one_line() -> None:
    async def test() -> None:
        async with site() as at, at.router() as router:
            at.enlist(router, "a")
            answer = await at.client._ask_once(router_messages.Watch(1 << 20, "0" * 16))
            assert isinstance(answer, router_messages.PlaceRefused)
            ours = router_messages.own_version()
            assert answer.message == (
                f"an ingress has messages {'0' * 16}, and the router {ours}: both need one release"
            )

    run(test)
