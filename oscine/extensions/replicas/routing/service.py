"""The router's end of the wire: questions of ingresses and replicas come in over one ZeroMQ socket, answers go out."""

import asyncio
import logging
from typing import NoReturn

from oscine.engine.wire.clients import Clients
from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.spec import router_messages as wire
from oscine.extensions.replicas.spec.placement import NoPlace

_log = logging.getLogger(__name__)

_RETRY_AFTER_S = 1.0  # what a client is told when the router did not know what to do


class RouterService:
    """Listens from the beginning, on the running event loop.

    Every WAITING_S, clients with open questions hear that these are open. So a client that is gone is noticed soon:
    nothing is placed for long for an ingress that died, nor on a replica that died.
    """

    def __init__(self, router: Router, host: str, key: str = "") -> None:
        """`host`: an address of this machine; the port is a free one. `key`: see oscine.engine.wire.tcp.

        Raises ValueError.
        """
        self._router = router
        self._loop = asyncio.get_running_loop()
        self._clients = Clients(wire.decode_to_router)
        self.address = self._clients.listen(host, key)
        self._open: dict[tuple[bytes, int], tuple[wire.Question, asyncio.Task[None]]] = {}  # by client and id
        self._refused: set[str] = set()  # replicas and ingresses with other messages, as they were named
        self._looking_after = asyncio.create_task(self._look_after())
        self._fd = self._clients.socket.FD
        self._loop.add_reader(self._fd, self._read)
        self._loop.call_soon(self._read)

    @property
    def num_open(self) -> int:
        """Questions without an answer; not Enlist and Watch, which stay open."""
        return sum(not isinstance(question, wire.Enlist | wire.Watch) for question, _ in self._open.values())

    @property
    def is_listening(self) -> bool:
        return not self._looking_after.done()

    async def close(self) -> None:
        """Breaks all connections; what was asked stays without an answer."""
        tasks = [self._looking_after, *(task for _, task in self._open.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop.remove_reader(self._fd)
        self._clients.close()

    def _read(self) -> None:
        """All that has arrived; the socket's descriptor signals nothing again before that."""
        for client, message in self._clients.receive():
            self._take(client, message)

    def _take(self, client: bytes, message: wire.ToRouter) -> None:
        key = client, message.id
        if isinstance(message, wire.CancelQuestion):
            if key in self._open:
                self._open[key][1].cancel()
        elif key in self._open:
            _log.warning("a question with the id of another one: %d", message.id)
        elif isinstance(message, wire.FindPlace) and (place := self._router.place_now(message.placement)):
            self._send(client, wire.Found(message.id, place))
        else:
            task = asyncio.create_task(self._reply(client, message))
            self._open[key] = message, task
            task.add_done_callback(lambda _: self._open.pop(key))

    async def _reply(self, client: bytes, question: wire.Question) -> None:
        answer: wire.Answer
        try:
            match question:
                case wire.FindPlace():
                    answer = wire.Found(question.id, await self._router.place(question.placement))
                case wire.Describe():
                    answer = wire.Described(question.id, await self._router.describe(question.model))
                case wire.Look():
                    answer = wire.Seen(question.id, await self._router.snapshot())
                case wire.Enlist() | wire.Watch() if question.version != wire.own_version():
                    answer = self._refusal(question)
                case wire.Enlist():
                    await self._router.enlist(question.replica, question.report)
                case wire.Watch():
                    await self._tell(client, question)
        except NoPlace as no:
            answer = wire.PlaceRefused(question.id, no.message, no.retry_after_s, no.overloaded)
        except Exception:
            _log.exception("a question without an answer")
            answer = wire.PlaceRefused(question.id, "the request could not be placed", _RETRY_AFTER_S, overloaded=False)
        self._send(client, answer)

    async def _tell(self, client: bytes, question: wire.Watch) -> NoReturn:
        async for reports in self._router.reports():
            self._send(client, wire.Enlisted(question.id, reports))
        raise AssertionError("reports do not end")

    def _refusal(self, question: wire.Enlist | wire.Watch) -> wire.PlaceRefused:
        """For a replica or an ingress with other messages. The log has it once per replica, and once for ingresses."""
        theirs, ours = question.version or "of an older release", wire.own_version()
        who = f"replica {question.replica}" if isinstance(question, wire.Enlist) else "an ingress"
        message = f"{who} has messages {theirs}, and the router {ours}: both need one release"
        if who not in self._refused:
            self._refused.add(who)
            _log.error(message)
        return wire.PlaceRefused(question.id, message, _RETRY_AFTER_S, overloaded=False)

    async def _look_after(self) -> None:
        """Those that wait hear so; what was asked by one that is gone is cancelled."""
        while True:
            await asyncio.sleep(wire.WAITING_S)
            queued = self._router.queued()
            waiting = {client for client, _ in self._open}
            gone = {client for client in waiting if not self._send(client, wire.Waiting(queued))}
            for (client, _), (_, task) in self._open.items():
                if client in gone:
                    task.cancel()

    def _send(self, client: bytes, message: wire.FromRouter) -> bool:
        """False when the client is gone."""
        is_there = self._clients.send(client, message)
        self._loop.call_soon(self._read)  # sending may consume the signal that something can be read
        return is_there
