"""Questions of an ingress and answers of the router over a real connection, also after the death of either."""

import asyncio
import itertools
import logging
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio

from oscine.engine.wire.messages import encode
from oscine.engine.wire.version import version_of
from oscine.extensions.replicas.client import router as router_client
from oscine.extensions.replicas.client.router import RouterAway, RouterClient
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.routing.service import RouterService
from oscine.extensions.replicas.spec import router_messages
from oscine.extensions.replicas.spec.deployment import QueueLimits, RoleSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.extensions.replicas.spec.snapshot import ReplicaReport
from tests import clock
from tests.engine_process.harness import run
from tests.extensions.cluster.scripted_router import INFO, PLACE, PLACEMENT, SNAPSHOT, ScriptedRouter, served
from tests.extensions.cluster.test_model_router import ROUTE, Cluster, placement
from tests.waiting import until

DYING_INGRESS = """
import asyncio, sys
from oscine.extensions.replicas.client.router import RouterClient
from tests import clock
from tests.extensions.cluster.scripted_router import PLACEMENT

async def address() -> str:
    return sys.argv[1]

async def ask() -> None:
    await RouterClient(address).place(PLACEMENT)

asyncio.run(ask())
"""


class Whereabouts:
    """What Serve would say: the address of the last router, or that there is none."""

    def __init__(self, *services: RouterService) -> None:
        self.addresses = [service.address for service in services]
        self.asked = 0

    async def __call__(self) -> str:
        self.asked += 1
        if not self.addresses:
            raise RouterAway("ActorDiedError")
        return self.addresses.pop(0) if len(self.addresses) > 1 else self.addresses[0]


@asynccontextmanager
async def asking(where: Whereabouts, key: str = "", **limits: float) -> AsyncIterator[RouterClient]:
    client = RouterClient(where, key=key, **limits)
    try:
        yield client
    finally:
        client.close()


@asynccontextmanager
async def pair(router: ScriptedRouter) -> AsyncIterator[tuple[RouterService, RouterClient]]:
    async with served(router) as service, asking(Whereabouts(service)) as client:
        yield service, client


def named(name: str) -> Placement:
    return replace(PLACEMENT, request_id=name)


def test_records_arrive_as_they_were_sent() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        async with pair(router) as (_, client):
            assert await client.place(PLACEMENT) == PLACE
            assert router.asked == [PLACEMENT]
            assert await client.describe("model") == INFO
            assert await client.snapshot() == SNAPSHOT

    run(test)


def test_what_the_router_refuses_comes_as_it_said_it() -> None:
    async def test() -> None:
        async with pair(ScriptedRouter()) as (_, client):
            with pytest.raises(NoPlace, match="the model 'other' is not deployed") as caught:
                await client.describe("other")
            assert (caught.value.retry_after_s, caught.value.overloaded) == (7.5, True)

    run(test)


def test_a_router_that_fails_says_so_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        router = ScriptedRouter()
        async with pair(router) as (service, client):
            router.error = KeyError("a bug")
            with pytest.raises(NoPlace, match="the request could not be placed"):
                await client.place(PLACEMENT)
            router.error = None
            assert await client.place(PLACEMENT) == PLACE
            assert service.is_listening
        assert "a bug" in caplog.text

    run(test)


def test_answers_come_in_any_order_to_whoever_asked() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        router.gates = {name: asyncio.Event() for name in "abc"}
        async with served(router) as service, asking(Whereabouts(service)) as one, asking(Whereabouts(service)) as two:
            clients = {"a": one, "b": two, "c": one}  # their questions have the same ids
            asked = {name: asyncio.create_task(client.place(named(name))) for name, client in clients.items()}
            await until(lambda: len(router.asked) == 3)
            for name in "cba":
                assert not asked[name].done()
                router.gates[name].set()
                assert await asked[name] == PLACE
            assert service.num_open == 0

    run(test)


class Queueing(ScriptedRouter):
    """A real queue in front of replicas that have no room."""

    def __init__(self, router: ModelRouter) -> None:
        super().__init__()
        self._router = router

    async def place(self, placement: Placement) -> Place:
        return await self._router.place(placement)

    def place_now(self, placement: Placement) -> Place | None:
        return self._router.place_now(placement)


def test_a_cancelled_request_leaves_the_queue() -> None:
    async def test() -> None:
        cluster = Cluster()
        cluster.start("a")
        router = cluster.router(replace(ROUTE, roles=(RoleSpec(),), queue=QueueLimits(max_requests=3)))
        async with pair(Queueing(router)) as (service, client):
            placed = 0
            while cluster.decode.room() > 0:
                await client.place(placement(f"first-{placed}"))
                placed += 1
            waiting = [asyncio.create_task(client.place(placement(name))) for name in "xyz"]
            await until(lambda: router.num_queued == 3)
            waiting[1].cancel()
            await until(lambda: router.num_queued == service.num_open == 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.place(placement("impatient"))
            await until(lambda: router.num_queued == 2)
            for task in waiting:
                task.cancel()
            await until(lambda: service.num_open == router.num_queued == 0)
            assert router.counters.placed == placed

    run(test)


def test_questions_wait_for_the_next_router_at_another_port() -> None:
    async def test() -> None:
        first, second = ScriptedRouter(), ScriptedRouter()
        first.gates = second.gates = {"waits": asyncio.Event()}
        async with served(first) as service, served(second) as successor:
            where = Whereabouts(service)
            async with asking(where) as client:
                asked = asyncio.create_task(client.place(named("waits")))
                await until(lambda: len(first.asked) == 1)
                where.addresses = []
                await service.close()
                late = asyncio.create_task(client.snapshot())
                await until(lambda: where.asked > 2)
                where.addresses = [successor.address]
                assert await late == SNAPSHOT
                await until(lambda: second.asked == [named("waits")])
                second.gates["waits"].set()
                assert await asked == PLACE
                assert first.cancelled == ["waits"]

    run(test)


def test_a_question_that_no_router_survives_is_given_up() -> None:
    async def test() -> None:
        async with served(ScriptedRouter()) as service:
            where = Whereabouts(service)
            await service.close()
            async with asking(where) as client:
                with pytest.raises(NoPlace, match="the router cannot be reached: it does not answer"):
                    await client.place(PLACEMENT)
            assert where.asked == 4

    run(test)


def test_an_answer_that_never_comes_is_not_waited_for() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        router.gates = {"r": asyncio.Event()}
        async with served(router) as service, asking(Whereabouts(service), answer_s=3600) as client:
            asked = asyncio.create_task(client.place(PLACEMENT))
            await until(lambda: router.asked == [PLACEMENT])
            clock.pass_time(3600)
            with pytest.raises(NoPlace, match="the router cannot be reached: it does not answer"):
                await asked
            await until(lambda: router.cancelled == ["r"])

    clock.run(test())


def test_who_says_nothing_is_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine that got the port of a router that is gone."""
    monkeypatch.setattr(router_client, "_LOOK_S", 3600)  # the test calls _look

    async def test() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as stranger:
            port = stranger.bind_to_random_port("tcp://127.0.0.1")
            async with served(ScriptedRouter()) as service:
                where = Whereabouts(service)
                where.addresses.insert(0, f"tcp://127.0.0.1:{port}")
                async with asking(where) as client:
                    asked = asyncio.create_task(client.place(PLACEMENT))
                    await until(lambda: bool(client._open))
                    for _ in range(router_client._SILENT_LOOKS + 1):
                        client._look()
                    assert await asked == PLACE
                    assert where.asked == 2

    run(test)


def test_a_long_wait_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client looks more often than it would at a silent router. A sign of life arrives between two looks."""
    monkeypatch.setattr(router_client, "_LOOK_S", 3600)  # the test calls _look
    monkeypatch.setattr(router_messages, "WAITING_S", 0.01)

    async def test() -> None:
        router = ScriptedRouter()
        router.gates = {"r": asyncio.Event()}
        async with pair(router) as (_, client):
            asked = asyncio.create_task(client.place(PLACEMENT))
            await until(lambda: router.asked == [PLACEMENT])
            for _ in range(router_client._SILENT_LOOKS + 3):
                client._look()
                assert client._silent_looks == 1
                await until(lambda: client._silent_looks == 0, "a sign of life")
            router.gates["r"].set()
            assert await asked == PLACE
            assert len(router.asked) == 1

    run(test)


def test_what_a_dead_ingress_asked_is_cancelled() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        router.gates = {"r": asyncio.Event(), "other": asyncio.Event()}
        async with pair(router) as (service, client):
            other = asyncio.create_task(client.place(named("other")))
            ingress = subprocess.Popen([sys.executable, "-c", DYING_INGRESS, service.address])
            await until(lambda: len(router.asked) == 2)
            ingress.kill()
            ingress.wait()
            await until(lambda: router.cancelled == ["r"])
            assert service.num_open == 1
            router.gates["other"].set()
            assert await other == PLACE

    run(test)


DYING_REPLICA = """
import asyncio, sys
from oscine.extensions.replicas.client.router import RouterClient
from oscine.extensions.replicas.spec.snapshot import ReplicaReport

async def address() -> str:
    return sys.argv[1]

asyncio.run(RouterClient(address).enlist("dies", ReplicaReport("model")))
"""


@pytest.mark.long
def test_a_replica_is_enlisted_until_it_goes_and_with_its_newest_report() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        async with pair(router) as (service, client):
            here, draining = ReplicaReport("model"), ReplicaReport("model", state="draining")
            first = asyncio.create_task(client.enlist("a", here))
            await until(lambda: router.replicas == {"a": here})
            await until(lambda: client.queued == {"model": 3})
            second = asyncio.create_task(client.enlist("a", draining))
            await asyncio.sleep(0)
            first.cancel()
            await until(lambda: router.replicas == {"a": draining})
            assert await client.place(PLACEMENT) == PLACE
            assert router.replicas == {"a": draining}, "the first one's end changes nothing"
            assert service.num_open == 0, "only questions with an answer count"
            second.cancel()
            await until(lambda: router.replicas == {})

    run(test)


def test_a_replica_enlists_with_the_next_router() -> None:
    async def test() -> None:
        first, second, report = ScriptedRouter(), ScriptedRouter(), ReplicaReport("model")
        async with served(first) as service, served(second) as successor:
            where = Whereabouts(service)
            async with asking(where) as client:
                enlisting = asyncio.create_task(client.enlist("a", report))
                await until(lambda: bool(first.replicas))
                where.addresses = [successor.address]
                await service.close()
                await until(lambda: second.replicas == {"a": report})
                enlisting.cancel()
                await until(lambda: not second.replicas)

    run(test)


@pytest.mark.parametrize("theirs", ["", "0123456789abcdef"], ids=["older", "other"])
def test_a_replica_with_other_messages_is_refused_in_one_line(
    theirs: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = router_messages.own_version()
    told = itertools.cycle([theirs, ours, ours])  # by the replica; the router compares, and says what it compared
    asked: list[str] = []

    def own_version() -> str:
        asked.append(next(told))
        return asked[-1]

    monkeypatch.setattr(router_messages, "own_version", own_version)

    async def test() -> None:
        router = ScriptedRouter()
        async with pair(router) as (_, client):
            enlisting = asyncio.create_task(client.enlist("a", ReplicaReport("model")))
            await until(lambda: len(asked) > 9)  # it asks for the fourth time: nothing more is said meanwhile
            enlisting.cancel()
            assert not router.replicas
            assert await client.snapshot() == SNAPSHOT, "others are served"

    run(test)
    said = f"replica a has messages {theirs or 'of an older release'}, and the router {ours}: both need one release"
    assert caplog.messages == [said] * 2, "the router and the replica"


def test_the_version_of_messages_is_that_of_their_fields() -> None:
    class First(msgspec.Struct, tag="a"):
        """A text."""

        number: int

    class Second(msgspec.Struct, tag="a"):
        number: int

    class Third(msgspec.Struct, tag="a"):
        number: int
        text: str = ""

    Second.__name__ = Third.__name__ = "First"
    assert version_of(First) == version_of(Second) != version_of(Third)


def test_a_replica_that_dies_is_gone() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        async with served(router) as service:
            replica = subprocess.Popen([sys.executable, "-c", DYING_REPLICA, service.address])
            await until(lambda: "dies" in router.replicas)
            replica.kill()
            replica.wait()
            await until(lambda: not router.replicas)

    run(test)


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"", b"\x00"],
        [b"\x81\xa4type\xa4nope"],
        [encode({"type": "find_place", "id": "x", "placement": {}})],
        [encode({"type": "find_place", "id": 1})],
        [encode({"type": "cancel", "id": 99})],
        [encode(router_messages.FindPlace(1, PLACEMENT)), b"more"],
        [bytes(1 << 20)],
    ],
    ids=lambda frames: repr(frames[0][:24]),
)
def test_bad_messages_disturb_nobody(frames: list[bytes], caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        router = ScriptedRouter()
        async with pair(router) as (service, client):
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 0)
                stranger.connect(service.address)
                await stranger.send_multipart(frames)
                await stranger.send(encode(router_messages.FindPlace(1, named("after"))))
                await stranger.recv()
            assert await client.place(PLACEMENT) == PLACE
            assert service.is_listening
            assert router.asked == [named("after"), PLACEMENT]

    with caplog.at_level(logging.WARNING):
        run(test)


def test_an_id_that_is_in_use_is_not_asked_again() -> None:
    async def test() -> None:
        router = ScriptedRouter()
        router.gates = {"r": asyncio.Event()}
        async with served(router) as service:
            with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 0)
                stranger.connect(service.address)
                for _ in range(2):
                    await stranger.send(encode(router_messages.FindPlace(1, PLACEMENT)))
                await stranger.send(encode(router_messages.FindPlace(2, named("after"))))
                await stranger.recv()
                assert router.asked == [PLACEMENT, named("after")]

    run(test)


def test_an_answer_that_cannot_be_read_is_passed_over() -> None:
    async def test() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as odd:
            odd.set(zmq.LINGER, 0)
            port = odd.bind_to_random_port("tcp://127.0.0.1")
            where = Whereabouts()
            where.addresses = [f"tcp://127.0.0.1:{port}"]
            async with asking(where) as client:
                asked = asyncio.create_task(client.snapshot())
                ingress, _ = await odd.recv_multipart()
                for answer in (b"\xc1", encode({"type": "new"}), encode(router_messages.Seen(0, SNAPSHOT))):
                    await odd.send_multipart((ingress, answer))
                assert await asked == SNAPSHOT

    run(test)


@pytest.mark.long
def test_strangers_find_no_router() -> None:
    key = "k" * 32

    async def test() -> None:
        router = ScriptedRouter()
        async with served(router, key) as service:
            async with asking(Whereabouts(service), key) as member:
                assert await member.place(PLACEMENT) == PLACE
            for other in ("", "o" * 32):
                async with asking(Whereabouts(service), other) as stranger:
                    with pytest.raises(NoPlace, match="the router cannot be reached"):
                        await stranger.place(PLACEMENT)
            assert router.asked == [PLACEMENT]

    run(test)
