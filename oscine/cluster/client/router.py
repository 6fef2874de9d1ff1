"""The router as ingresses and replicas see it: questions that outlast the router's own death.

Knows how long to wait, and what to ask again; not how a place is chosen, nor who says where the router is.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from typing import NoReturn

import zmq

from oscine.cluster.client.router_link import RouterLink, RouterLost
from oscine.cluster.spec.placement import NoPlace, Place, Placement
from oscine.cluster.spec.router_messages import (
    Answer,
    Describe,
    Described,
    Enlist,
    FindPlace,
    Found,
    Look,
    PlaceRefused,
    Question,
    Seen,
)
from oscine.cluster.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.types import EngineInfo

_AGAIN_S = 0.1  # between two tries to reach a router
_WHERE_S = 10.0  # for whoever knows where it is to say so, before that is asked again
_MAX_LOSSES = 4  # routers that may be lost while they have a question: perhaps they are because of it
_RETRY_AFTER_S = 5.0  # what a client is told when there was none
_SILENT = "it does not answer"


class RouterAway(Exception):  # noqa: N818  (reads as what happened)
    """Nobody knows where the router is. The message says why."""


class RouterClient:
    """Implements Placer. Belongs to one event loop, from the first question on.

    A question that was asked again may have been answered twice; a place that nobody took is forgotten by the router.
    """

    def __init__(
        self,
        where: Callable[[], Awaitable[str]],
        *,
        key: str = "",
        absence_s: float = 60.0,
        answer_s: float = 3600.0,
    ) -> None:
        """`where` says the router's address, or raises RouterAway. It is asked once for each life of the router.
        `key`: see oscine.engine.wire.tcp.

        `absence_s`: how long a question waits for a router that is away; `answer_s`: for one that is there. A router
        bounds the wait for a place itself, by what the deployment file says; so the latter is for an answer that got
        lost.
        """
        self._where, self._key, self._absence_s, self._answer_s = where, key, absence_s, answer_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ids = itertools.count()
        self._link: RouterLink | None = None
        self._connecting: asyncio.Task[RouterLink] | None = None  # of all that wait for a link
        self._away = _SILENT  # why there is none

    async def place(self, placement: Placement) -> Place:
        answer = await self._ask(FindPlace(next(self._ids), placement))
        assert isinstance(answer, Found)
        return answer.place

    async def describe(self, model: str) -> EngineInfo:
        answer = await self._ask(Describe(next(self._ids), model))
        assert isinstance(answer, Described)
        return answer.info

    async def snapshot(self) -> ClusterSnapshot:
        """Raises NoPlace when there is no router."""
        answer = await self._ask(Look(next(self._ids)))
        assert isinstance(answer, Seen)
        return answer.snapshot

    async def enlist(self, replica: str, report: ReplicaReport) -> NoReturn:
        """Lets the router place requests on a replica, whichever router there is, until this is cancelled.

        To change the report, call it again and then cancel the earlier call.
        """
        while True:
            with contextlib.suppress(RouterLost, NoPlace):
                link = await self._reach()
                await link.ask(Enlist(next(self._ids), replica, report))
            await asyncio.sleep(_AGAIN_S)

    @property
    def queued(self) -> dict[str, int]:
        """Model -> requests that wait for a place at the router; an enlisted replica hears of it every second."""
        return self._link.queued if self._link is not None else {}

    def close(self) -> None:
        """Nothing may be asked any more."""
        if self._connecting is not None:
            self._connecting.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None
        self._context.term()

    async def _ask(self, question: Question) -> Answer:
        """Raises NoPlace, the router's own or one that says that there is no router."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                for _ in range(_MAX_LOSSES):
                    link = await self._reach()
                    with contextlib.suppress(RouterLost):
                        return _checked(await link.ask(question))
                    await asyncio.sleep(_AGAIN_S)
        raise self._absent(_SILENT)

    async def _reach(self) -> RouterLink:
        """The link to the router that there is. Raises NoPlace when there was none for too long."""
        if self._link is not None:
            return self._link
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        try:
            async with asyncio.timeout(self._absence_s):
                return await asyncio.shield(self._connecting)
        except TimeoutError:
            raise self._absent(self._away) from None

    async def _connect(self) -> RouterLink:
        """For as long as it takes: others may wait for it when the first one does not any more."""
        try:
            self._link = RouterLink(self._context, await self._address(), self._key, self._on_lost)
            return self._link
        finally:
            self._connecting, self._away = None, _SILENT

    async def _address(self) -> str:
        while True:
            try:
                async with asyncio.timeout(_WHERE_S):
                    return await self._where()
            except (RouterAway, TimeoutError) as error:
                self._away = str(error) or _SILENT
            await asyncio.sleep(_AGAIN_S)

    def _on_lost(self) -> None:
        self._link = None

    def _absent(self, reason: str) -> NoPlace:
        return NoPlace(f"the router cannot be reached: {reason}", retry_after_s=_RETRY_AFTER_S, overloaded=False)


def _checked(answer: Answer) -> Answer:
    """Raises NoPlace where the answer says so."""
    if isinstance(answer, PlaceRefused):
        raise NoPlace(answer.message, retry_after_s=answer.retry_after_s, overloaded=answer.overloaded)
    return answer
