"""The router's end of the wire: questions of all ingresses come in over one ZeroMQ socket, answers go out.

Knows sockets and who waits for an answer; not how a place is found, nor Ray.
"""

import asyncio
import logging
from typing import Protocol

import zmq
import zmq.asyncio

from oscine.cluster.spec.placement import NoPlace, Placer
from oscine.cluster.spec.router_messages import (
    WAITING_S,
    Answer,
    CancelQuestion,
    Describe,
    Described,
    FindPlace,
    Found,
    Look,
    PlaceRefused,
    Question,
    Seen,
    ToIngress,
    ToRouter,
    Waiting,
    decode_to_router,
)
from oscine.cluster.spec.snapshot import ClusterSnapshot
from oscine.engine.wire.messages import UNREADABLE, encode
from oscine.engine.wire.tcp import bind_tcp, expect_heartbeats

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0  # what a client is told when the router did not know what to do


class RouterPolicy(Placer, Protocol):
    """Who knows the answers."""

    async def snapshot(self) -> ClusterSnapshot: ...


class RouterService:
    """Listens from the beginning, on the running event loop.

    An ingress that is gone is noticed when it is next sent to; so those that wait hear every WAITING_S that they do,
    and nothing is placed for long for one that died.
    """

    def __init__(self, router: RouterPolicy, host: str, key: str = "") -> None:
        """`host`: an address of this machine; the port is a free one. `key`: see oscine.engine.wire.tcp.

        Raises ValueError.
        """
        self._router = router
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to an ingress that is gone raises
        self._socket.set(zmq.SNDHWM, 0)  # bounded by the requests that ingresses take
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        expect_heartbeats(self._socket)
        self.address = bind_tcp(self._socket, host, key)
        self._open: dict[tuple[bytes, int], asyncio.Task[None]] = {}  # (ingress, id of the question)
        self._working = [asyncio.create_task(work) for work in (self._receive(), self._look_after())]

    @property
    def num_open(self) -> int:
        """Questions without an answer."""
        return len(self._open)

    @property
    def is_listening(self) -> bool:
        return not any(task.done() for task in self._working)

    async def close(self) -> None:
        """Breaks all connections; what was asked stays without an answer."""
        tasks = [*self._working, *self._open.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy()

    async def _receive(self) -> None:
        while True:
            ingress, *frames = await self._socket.recv_multipart()
            try:
                self._take(ingress, decode_to_router(b"".join(frames)))
            except UNREADABLE as error:
                _log.warning("a message that is no question: %s", error)

    def _take(self, ingress: bytes, message: ToRouter) -> None:
        key = ingress, message.id
        asked = self._open.get(key)
        if isinstance(message, CancelQuestion):
            if asked is not None:
                asked.cancel()
        elif asked is not None:
            _log.warning("a question with the id of another one: %d", message.id)
        else:
            task = self._open[key] = asyncio.create_task(self._reply(ingress, message))
            task.add_done_callback(lambda _: self._open.pop(key))

    async def _reply(self, ingress: bytes, question: Question) -> None:
        await self._send(ingress, await self._answer(question))

    async def _answer(self, question: Question) -> Answer:
        try:
            match question:
                case FindPlace():
                    return Found(question.id, await self._router.place(question.placement))
                case Describe():
                    return Described(question.id, await self._router.describe(question.model))
                case Look():
                    return Seen(question.id, await self._router.snapshot())
        except NoPlace as no:
            return PlaceRefused(question.id, no.message, no.retry_after_s, no.overloaded)
        except Exception:
            _log.exception("a question without an answer")
            return PlaceRefused(question.id, "the request could not be placed", _RETRY_AFTER_S, overloaded=False)

    async def _look_after(self) -> None:
        """Those that wait hear so; what was asked by one that is gone is cancelled."""
        while True:
            await asyncio.sleep(WAITING_S)
            waiting = {ingress for ingress, _ in self._open}
            gone = {ingress for ingress in waiting if not await self._send(ingress, Waiting())}
            for (ingress, _), task in self._open.items():
                if ingress in gone:
                    task.cancel()

    async def _send(self, ingress: bytes, message: ToIngress) -> bool:
        """False when the ingress is gone."""
        try:
            await self._socket.send_multipart((ingress, encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True
