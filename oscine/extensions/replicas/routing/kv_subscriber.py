"""Follows the events of one engine: pages stored, removed, cleared, and its statistics, over ZeroMQ.

The format is that of vLLM's publisher (see oscine.extensions.kv_events.publisher), whose engines can be followed
too.

Messages can be lost, as those between a first replay and the beginning of a subscription, and engines can restart.
Either leaves a gap in the numbers, or fewer messages than the engine's statistics count, or numbers that go back. Then
the subscriber asks for the last known message and all later ones. If that message is unchanged, no other is missing.
If not, the earlier state is dropped, and rebuilt from the messages that the engine still has.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from oscine.engine.wire.messages import UNREADABLE
from oscine.engine.wire.tcp import connect
from oscine.extensions.kv_events.publisher import END, STATS_TOPIC
from oscine.extensions.replicas.routing.kv_index import CACHE, DISK, HOST, KVIndex
from oscine.types import Endpoints, EngineStats

EVENTS_TOPIC = b"kv-events"

_REPLAY_S = 2.0  # without an answer, after which an engine is assumed to have no replay
_BREATH = 64  # messages of a replay after which others on this event loop have their turn

_log = logging.getLogger(__name__)


def _medium(name: str) -> int:
    """Of the names that publishers have, such as CPU, CPU_PINNED and DISK."""
    return HOST if name.startswith("CPU") else DISK if name == "DISK" else CACHE


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """A message; later fields are not read."""

    time_s: float
    events: list[list[Any]]  # kind, then its fields in order


_decode_batch = msgspec.msgpack.Decoder(EventBatch).decode
_decode_stats = msgspec.msgpack.Decoder(EngineStats).decode


class KVSubscriber:
    """One engine process at a time at one address; `run` goes on until it is cancelled."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoints: Endpoints,
        index: KVIndex,
        replica: str,
        hear: Callable[[EngineStats], None],
        key: str = "",
    ) -> None:
        """Pages of the replica go to `index`, statistics to `hear`. `key`: see oscine.engine.wire.tcp."""
        self.num_gaps = 0  # gaps: missed messages, or a new beginning
        self.endpoints = endpoints
        self._context, self._key = context, key
        self._index, self._replica, self._hear = index, replica, hear
        self._next = 0  # number of the message expected
        self._doubt = False  # the connection was lost: another process may listen there now
        self._last: tuple[int, bytes, float] | None = None  # number, payload and time of the one before it

    async def run(self) -> None:
        socket = self._socket(zmq.SUB)
        socket.subscribe(EVENTS_TOPIC)
        socket.subscribe(STATS_TOPIC)
        lost = self._watch(socket)
        assert self.endpoints.kv_events is not None
        connect(socket, self.endpoints.kv_events, self._key)
        try:
            await self._rebuild()
            while True:
                frames = await socket.recv_multipart()
                while int(lost.get(zmq.EVENTS)) & zmq.POLLIN:  # poll() makes a poller each time
                    lost.recv_multipart()
                    self._doubt = True
                await self._receive(frames)
        finally:
            socket.disable_monitor()  # first, because unread monitor events would stop ZeroMQ's thread
            lost.close()
            socket.close()

    def _watch(self, socket: zmq.asyncio.Socket) -> zmq.Socket[bytes]:
        """Gets a message for each lost connection, before any message of the next one."""
        address = f"inproc://lost-{id(self)}"
        socket.monitor(address, zmq.EVENT_DISCONNECTED)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(self._context.underlying)
        monitor = context.socket(zmq.PAIR)
        monitor.set(zmq.LINGER, 0)
        monitor.connect(address)
        return monitor

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVHWM, 0)  # bounded by what the engine's socket holds back
        return socket

    async def _receive(self, frames: list[bytes]) -> None:
        try:
            if frames[0] == STATS_TOPIC:
                stats = _decode_stats(frames[-1])
                self._hear(stats)
                await self._catch_up(stats.kv_event_messages)
            elif len(frames) == 3:
                await self._take(int.from_bytes(frames[1], "big"), frames[2])
        except UNREADABLE as error:
            _log.warning("%s sent what is no event: %s", self.endpoints.kv_events, error)

    async def _take(self, number: int, payload: bytes) -> None:
        if self._doubt or number != self._next:
            if self._last is not None and number < self._next and _decode_batch(payload).time_s <= self._last[2]:
                return  # known by a replay already
            self.num_gaps += 1
            self._doubt = False
            await self._mend()
        if number == self._next:
            self._apply(number, payload)
        elif number > self._next:  # nothing was given again that reaches up to here
            self._index.clear(self._replica)
            self._apply(number, payload)

    async def _catch_up(self, num_sent: int) -> None:
        """So many messages were sent: the last ones may have been missed."""
        if num_sent <= self._next:
            return
        self.num_gaps += 1
        await self._mend()
        if num_sent > self._next:  # nothing was given again that reaches up to here
            self._index.clear(self._replica)
            self._next, self._last = num_sent, None

    async def _mend(self) -> None:
        """Asks for all messages after the last known one; begins anew if the engine's copy of that one differs."""
        if self._last is None:
            await self._rebuild()
            return
        known = False
        async with contextlib.aclosing(self._replay(self._last[0])) as messages:
            async for number, payload in messages:
                if known:
                    self._apply(number, payload)
                elif (number, payload) != self._last[:2]:
                    break
                known = True
        if not known:
            await self._rebuild()

    async def _rebuild(self) -> None:
        """Drops what is believed, and begins with the first message that the engine still has."""
        self._index.clear(self._replica)
        self._next, self._last = 0, None
        async for number, payload in self._replay(0):
            self._apply(number, payload)

    def _apply(self, number: int, payload: bytes) -> None:
        """One that cannot be read is passed over, and not asked for again."""
        self._next, self._last = number + 1, (number, payload, 0.0)
        try:
            batch = _decode_batch(payload)
            self._last = (number, payload, batch.time_s)
            for event in batch.events:
                self._tell(event)
        except (*UNREADABLE, TypeError) as error:  # TypeError: for invalid pages
            _log.warning("%s sent what is no event: %s", self.endpoints.kv_events, error)

    def _tell(self, event: list[Any]) -> None:
        match event:
            case ["BlockStored", pages, _, _, _, _, str(medium), *_]:
                self._index.store(self._replica, pages, _medium(medium))
            case ["BlockStored", pages, *_]:
                self._index.store(self._replica, pages)
            case ["BlockRemoved", pages, str(medium), *_]:
                self._index.remove(self._replica, pages, _medium(medium))
            case ["BlockRemoved", pages, *_]:
                self._index.remove(self._replica, pages)
            case ["AllBlocksCleared", *_]:
                self._index.clear(self._replica)

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """The messages from a number on that the engine remembers; none if it does not answer."""
        address = self.endpoints.kv_replay
        if address is None:
            return
        socket = self._socket(zmq.DEALER)
        try:
            connect(socket, address, self._key)
            await socket.send_multipart([b"", start.to_bytes(8, "big")])
            count = 0
            while True:
                async with asyncio.timeout(_REPLAY_S):
                    *_, number, payload = await socket.recv_multipart()
                if number == END:
                    return
                yield int.from_bytes(number, "big"), payload
                count += 1
                if count % _BREATH == 0:
                    await asyncio.sleep(0)
        except (TimeoutError, ValueError):  # ValueError: of a message without a number
            _log.warning("%s gives no events again", address)
        finally:
            socket.close()


class KVSubscriptions:
    """Follows the present engine of each replica."""

    def __init__(self, index: KVIndex, key: str) -> None:
        """`key`: see oscine.engine.wire.tcp."""
        self._index, self._key = index, key
        self._running: dict[str, tuple[KVSubscriber, asyncio.Task[None]]] = {}  # by replica
        self._ended_gaps = 0  # of subscriptions that are over
        self._context: zmq.asyncio.Context | None = None  # made by the first subscription

    @property
    def num_gaps(self) -> int:
        return self._ended_gaps + sum(subscriber.num_gaps for subscriber, _ in self._running.values())

    def follow(self, replica: str, endpoints: Endpoints | None, hear: Callable[[EngineStats], None]) -> bool:
        """Subscribes to the events of an engine. True: it replaces another one, whose pages are gone."""
        replaces = replica in self._running
        if replaces:
            if self._running[replica][0].endpoints == endpoints:
                return False
            self.end(replica)
            self._index.clear(replica)
        if endpoints is not None and endpoints.kv_events is not None:
            if self._context is None:
                self._context = zmq.asyncio.Context()
            subscriber = KVSubscriber(self._context, endpoints, self._index, replica, hear, self._key)
            self._running[replica] = subscriber, asyncio.create_task(subscriber.run())
        return replaces

    def end(self, replica: str) -> None:
        if replica in self._running:
            subscriber, task = self._running.pop(replica)
            self._ended_gaps += subscriber.num_gaps
            task.cancel()

    async def close(self) -> None:
        tasks = [task for _, task in self._running.values()]
        for replica in list(self._running):
            self.end(replica)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None
