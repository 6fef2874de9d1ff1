"""The router's end of the wire: questions of ingresses and replicas come in over one ZeroMQ socket, answers go out.

Knows sockets and who waits for an answer; not how a place is found, nor Ray.
"""

import asyncio
import logging
from typing import NoReturn, Protocol

import zmq

from oscine.cluster.spec.placement import NoPlace, Place, Placement, Placer
from oscine.cluster.spec.router_messages import (
    WAITING_S,
    Answer,
    CancelQuestion,
    Describe,
    Described,
    Enlist,
    FindPlace,
    Found,
    FromRouter,
    Look,
    PlaceRefused,
    Question,
    Seen,
    ToRouter,
    Waiting,
    decode_to_router,
)
from oscine.cluster.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.engine.wire.messages import UNREADABLE, encode
from oscine.engine.wire.tcp import bind_tcp, expect_heartbeats

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0  # what a client is told when the router did not know what to do


class RouterPolicy(Placer, Protocol):
    """Who knows the answers."""

    def place_now(self, placement: Placement) -> Place | None:
        """As `place`, but None where it would wait or refuse."""
        ...

    async def snapshot(self) -> ClusterSnapshot: ...

    async def enlist(self, replica: str, report: ReplicaReport) -> NoReturn:
        """The replica is there until this is cancelled."""
        ...

    def queued(self) -> dict[str, int]:
        """Requests that wait for a place, of the models that have any."""
        ...


class RouterService:
    """Listens from the beginning, on the running event loop.

    A client that is gone is noticed when it is next sent to. So those with open questions hear every WAITING_S that
    they have some: nothing is placed for long for an ingress that died, nor on a replica that did.
    """

    def __init__(self, router: RouterPolicy, host: str, key: str = "") -> None:
        """`host`: an address of this machine; the port is a free one. `key`: see oscine.engine.wire.tcp.

        Raises ValueError.
        """
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone raises
        self._socket.set(zmq.SNDHWM, 0)  # bounded by the requests that ingresses take
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        expect_heartbeats(self._socket)
        self.address = bind_tcp(self._socket, host, key)
        self._open: dict[tuple[bytes, int], asyncio.Task[None]] = {}  # (client, id of the question)
        self._enlisted: set[tuple[bytes, int]] = set()  # of these, those of replicas
        self._looking_after = asyncio.create_task(self._look_after())
        self._fd = self._socket.FD
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)

    @property
    def num_open(self) -> int:
        """Questions without an answer, those of replicas left out."""
        return len(self._open) - len(self._enlisted)

    @property
    def is_listening(self) -> bool:
        return not self._looking_after.done()

    async def close(self) -> None:
        """Breaks all connections; what was asked stays without an answer."""
        tasks = [self._looking_after, *self._open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.remove_reader(self._fd)
        self._context.destroy()

    def _read(self) -> None:
        """All that has arrived; the socket's descriptor signals nothing again before that."""
        while not self._socket.closed:
            try:
                client, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._take(client, decode_to_router(b"".join(frames)))
            except UNREADABLE as error:
                _log.warning("a message that is no question: %s", error)

    def _take(self, client: bytes, message: ToRouter) -> None:
        key = client, message.id
        asked = self._open.get(key)
        if isinstance(message, CancelQuestion):
            if asked is not None:
                asked.cancel()
        elif asked is not None:
            _log.warning("a question with the id of another one: %d", message.id)
        elif isinstance(message, FindPlace) and (place := self._router.place_now(message.placement)):
            self._send(client, Found(message.id, place))
        else:
            task = self._open[key] = asyncio.create_task(self._reply(client, message))
            if isinstance(message, Enlist):
                self._enlisted.add(key)
            task.add_done_callback(lambda _: self._close_question(key))

    def _close_question(self, key: tuple[bytes, int]) -> None:
        del self._open[key]
        self._enlisted.discard(key)

    async def _reply(self, client: bytes, question: Question) -> None:
        self._send(client, await self._answer(question))

    async def _answer(self, question: Question) -> Answer:
        try:
            match question:
                case FindPlace():
                    return Found(question.id, await self._router.place(question.placement))
                case Describe():
                    return Described(question.id, await self._router.describe(question.model))
                case Look():
                    return Seen(question.id, await self._router.snapshot())
                case Enlist():
                    await self._router.enlist(question.replica, question.report)
        except NoPlace as no:
            return PlaceRefused(question.id, no.message, no.retry_after_s, no.overloaded)
        except Exception:
            _log.exception("a question without an answer")
            return PlaceRefused(question.id, "the request could not be placed", _RETRY_AFTER_S, overloaded=False)

    async def _look_after(self) -> None:
        """Those that wait hear so; what was asked by one that is gone is cancelled."""
        while True:
            await asyncio.sleep(WAITING_S)
            queued = self._router.queued()
            waiting = {client for client, _ in self._open}
            gone = {client for client in waiting if not self._send(client, Waiting(queued))}
            for (client, _), task in self._open.items():
                if client in gone:
                    task.cancel()

    def _send(self, client: bytes, message: FromRouter) -> bool:
        """False when the client is gone."""
        try:
            self._socket.send_multipart((client, encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        self._loop.call_soon(self._read)  # sending may consume the signal that something can be read
        return True
