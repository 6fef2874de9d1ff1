"""A subscriber's picture of an engine that loses messages, forgets them and restarts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager

import zmq.asyncio

from oscine.extensions.replicas.routing.kv_index import KVIndex
from oscine.extensions.replicas.routing.kv_subscriber import KVSubscriber
from oscine.types import Endpoints, EngineStats
from tests.extensions.cluster.kv_publisher import Publisher
from tests.kept_port import kept_port
from tests.waiting import until

A, B, C, D = (bytes([i]) * 16 for i in range(4))


class Belief:
    def __init__(self) -> None:
        self.index = KVIndex()
        self.index.add("replica")
        self.stats: list[EngineStats] = []

    @property
    def pages(self) -> set[Hashable]:
        return {page for page in self.index._holders if self.index.overlap([page])}


@asynccontextmanager
async def serving(publisher: Publisher) -> AsyncIterator[Publisher]:
    task = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        publisher.close()


@asynccontextmanager
async def following(
    context: zmq.asyncio.Context, publisher: Publisher, replay: bool = True
) -> AsyncIterator[tuple[Belief, KVSubscriber]]:
    """Once the subscription is there."""
    belief = Belief()
    endpoints = Endpoints("", publisher.events_address, publisher.replay_address if replay else None)
    subscriber = KVSubscriber(context, endpoints, belief.index, "replica", belief.stats.append)
    task = asyncio.create_task(subscriber.run())
    try:
        await connected(publisher, belief)
        yield belief, subscriber
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def connected(publisher: Publisher, belief: Belief) -> None:
    """A subscription takes a moment, in which everything is lost."""
    heard = len(belief.stats)
    async with asyncio.timeout(20):
        while len(belief.stats) == heard:
            await publisher.report(EngineStats())
            await asyncio.sleep(0.01)


def run(test: Callable[[zmq.asyncio.Context], Awaitable[None]]) -> None:
    async def inside() -> None:
        with zmq.asyncio.Context() as context:
            await test(context)

    asyncio.run(inside())


def test_it_follows_and_begins_with_what_was_before_it() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher:
            await publisher.store(A, B)
            await publisher.remove(A)
            async with following(context, publisher) as (belief, subscriber):
                await until(lambda: belief.pages == {B})
                await publisher.store(C, D)
                await publisher.remove(B)
                await until(lambda: belief.pages == {C, D})
                await publisher.publish(["AllBlocksCleared"], ["BlockStored", [A], None, [], 16, None])
                await until(lambda: belief.pages == {A})
                await publisher.report(EngineStats(num_running=3))
                await until(lambda: belief.stats[-1].num_running == 3)
                assert subscriber.num_gaps == 0
                assert publisher.replays == 1

    run(test)


def test_pages_in_host_memory_and_in_files_count_as_cached() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher:
            await publisher.store(A, B, C)
            async with following(context, publisher) as (belief, _):
                await until(lambda: belief.pages == {A, B, C})
                stored = [["BlockStored", [page], None, [], 16, None, medium, None] for page, medium in
                          ((A, "CPU"), (B, "DISK"), (D, "CPU_PINNED"))]  # fmt: skip
                await publisher.publish(*stored, ["BlockRemoved", [A, B, C], "GPU"])
                await until(lambda: belief.pages == {A, B, D})
                await publisher.publish(["BlockRemoved", [A, D], "CPU"], ["BlockRemoved", [A], "GPU"])
                await until(lambda: belief.pages == {B})

    run(test)


def test_what_was_missed_is_asked_for() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher, following(context, publisher) as (belief, subscriber):
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.store(B, lose=True)
            await publisher.remove(A, lose=True)
            await publisher.store(C)
            await until(lambda: belief.pages == {B, C})
            assert subscriber.num_gaps == 1
            await publisher.store(D)
            await until(lambda: belief.pages == {B, C, D})
            assert subscriber.num_gaps == 1

    run(test)


def test_statistics_tell_that_the_last_messages_were_missed() -> None:
    """As those that are sent after a replay and before the subscription has begun."""

    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher, following(context, publisher) as (belief, subscriber):
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.store(B, lose=True)
            await publisher.report(EngineStats(kv_event_messages=2))
            await until(lambda: belief.pages == {A, B})
            await publisher.report(EngineStats(kv_event_messages=2))
            await publisher.store(C)
            await until(lambda: belief.pages == {A, B, C})
            assert (subscriber.num_gaps, publisher.replays) == (1, 2)

    run(test)


def test_missed_messages_that_are_not_given_again_are_asked_for_once() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with (
            serving(Publisher(context, kept=0)) as publisher,
            following(context, publisher) as (belief, subscriber),
        ):
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.store(B, lose=True)
            for _ in range(2):
                await publisher.report(EngineStats(kv_event_messages=2, num_running=7))
            await until(lambda: [stats.num_running for stats in belief.stats[-2:]] == [7, 7])
            assert not belief.pages, "what is there now is not known"
            await publisher.store(C)
            await until(lambda: belief.pages == {C})
            assert subscriber.num_gaps == 1

    run(test)


def test_what_nobody_remembers_is_believed_no_more() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context, kept=2)) as publisher, following(context, publisher) as (belief, _):
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.remove(A, lose=True)
            for page in (B, C, D):
                await publisher.store(page, lose=page is not D)
            await until(lambda: belief.pages == {C, D})

    run(test)


def test_without_replay_a_gap_is_a_new_beginning() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher, following(context, publisher, replay=False) as (belief, _):
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.store(B, lose=True)
            await publisher.store(C)
            await until(lambda: belief.pages == {C})
            await publisher.store(D)
            await until(lambda: belief.pages == {C, D})

    run(test)


def test_an_engine_that_starts_again_at_the_same_address_is_another_one() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        first = Publisher(context, ports=(events, replay))
        async with serving(first):
            await first.store(A)
            await first.store(B)
            lives = following(context, first)
            belief, _ = await lives.__aenter__()
            await until(lambda: belief.pages == {A, B})
        async with serving(Publisher(context, ports=(events, replay))) as second:
            await second.store(C)
            await second.store(D)  # as many as the first one had: the next number is the one expected
            await connected(second, belief)
            await second.remove(C)
            await until(lambda: belief.pages == {D})
            await lives.__aexit__(None, None, None)

    with kept_port() as events, kept_port() as replay:
        run(test)


def test_numbers_that_go_back_are_another_engine() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher, following(context, publisher) as (belief, _):
            for page in (A, B, C):
                await publisher.store(page)
            await until(lambda: belief.pages == {A, B, C})
            publisher._messages.clear()  # a proxy may hide that the connection was another one
            await publisher.store(D)
            await until(lambda: belief.pages == {D})

    run(test)


def test_what_is_no_event_is_passed_over() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher, following(context, publisher) as (belief, _):
            await publisher._events.send_multipart([b"kv-events", b"\0", b"\xc1"])
            await publisher._events.send_multipart([b"kv-events"])
            await publisher._events.send_multipart([b"oscine-stats", b"[]"])
            await publisher.publish(["SomethingNew", 3])
            await publisher.store(A)
            await until(lambda: belief.pages == {A})
            await publisher.publish(["BlockStored", 3])
            await publisher.publish(["BlockStored", [[]]])
            await publisher.store(B)
            await until(lambda: belief.pages == {A, B})

    run(test)


def test_what_cannot_be_read_is_passed_over_when_it_is_given_again() -> None:
    async def test(context: zmq.asyncio.Context) -> None:
        async with serving(Publisher(context)) as publisher:
            await publisher.store(A)
            publisher._messages.append(b"\xc1")
            await publisher.store(B)
            async with following(context, publisher) as (belief, subscriber):
                await until(lambda: belief.pages == {A, B})
                await publisher.store(C)
                await until(lambda: belief.pages == {A, B, C})
                assert (subscriber.num_gaps, publisher.replays) == (0, 1)

    run(test)
