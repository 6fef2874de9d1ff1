"""The router as ingresses and replicas see it: questions that outlast the router's own death."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn, Protocol, TypeVar

import zmq

from oscine.engine.wire.links import Link
from oscine.extensions.replicas.spec import router_messages as wire
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement, Placer
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.types import EngineInfo

logger = logging.getLogger(__name__)

A = TypeVar("A", wire.Found, wire.Described, wire.Seen)

_AGAIN_S = 0.1  # between two tries to reach a router
_WHERE_S = 10.0  # for an answer to the question where it is, before that is asked again
_MAX_LOSSES = 4  # routers that may be lost while they have a question: perhaps they are because of it
_RETRY_AFTER_S = 5.0  # what a client is told when there was none
_SILENT = "it does not answer"
_LOOK_S = wire.WAITING_S  # between two looks whether the router has spoken
# Looks without a message, though something was asked. Not seconds: an ingress that had no turn could not hear any.
_SILENT_LOOKS = 15


class RouterAway(Exception):  # noqa: N818  (reads as what happened)
    """The router's address is not known. The message says why."""


class _RouterLost(Exception):  # noqa: N818
    """The router is gone, and gave no answer."""


class Substitute(Placer, Protocol):
    """Places requests while the router is away."""

    def hear(self, replicas: dict[str, ReplicaReport] | None) -> None:
        """The replicas that the router knows now; None: the router is away."""
        ...

    def serves(self, model: str) -> bool:
        """Whether requests of the model are placed here now."""
        ...


class _Substituted(Exception):  # noqa: N818
    """The substitute is to be asked."""


class RouterClient:
    """Implements Placer. Belongs to one event loop, from the first question on.

    A connection is good for questions until it is lost: refused, broken, or silent, as where another process has the
    port now. Then the questions are asked again. So one may be answered twice; the router forgets a place that is not
    used.
    """

    def __init__(
        self,
        where: Callable[[], Awaitable[str]],
        *,
        key: str = "",
        absence_s: float = 60.0,
        answer_s: float = 3600.0,
        substitute: Substitute | None = None,
    ) -> None:
        """`where` says the router's address, or raises RouterAway. It is asked once for each life of the router.
        `key`: see oscine.engine.wire.tcp.

        `absence_s`: how long a question waits for a router that is away; `answer_s`: for one that is there. A router
        bounds the wait for a place itself, by what the deployment file says; so the latter is for an answer that got
        lost. `substitute` answers instead of a router that is away, if `watch` runs.
        """
        self._substitute = substitute
        self._where, self._key, self._absence_s, self._answer_s = where, key, absence_s, answer_s
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._ids = itertools.count()
        self._link: Link[wire.FromRouter] | None = None
        self._connecting: asyncio.Task[None] | None = None  # of all that wait for a link
        self._serving: dict[str, asyncio.Task[None]] = {}  # by model, of all that wait for a link or the substitute
        self._away = _SILENT  # why there is no link
        self._open: dict[int, asyncio.Future[wire.Answer]] = {}  # questions that were sent over the link
        self._watching: asyncio.Task[None] | None = None
        self._silent_looks = 0
        self._timer: asyncio.TimerHandle | None = None  # of the next look
        self.queued: dict[str, int] = {}  # model -> requests that wait for a place, heard while a question is open

    async def place(self, placement: Placement) -> Place:
        try:
            return (await self._ask(wire.FindPlace(next(self._ids), placement), wire.Found, placement.model)).place
        except _Substituted:
            assert self._substitute is not None
            return await self._substitute.place(placement)

    async def describe(self, model: str) -> EngineInfo:
        try:
            return (await self._ask(wire.Describe(next(self._ids), model), wire.Described, model)).info
        except _Substituted:
            assert self._substitute is not None
            return await self._substitute.describe(model)

    async def snapshot(self) -> ClusterSnapshot:
        """Raises NoPlace when there is no router."""
        return (await self._ask(wire.Look(next(self._ids)), wire.Seen)).snapshot

    async def enlist(self, replica: str, report: ReplicaReport) -> NoReturn:
        """Lets the router place requests on a replica, whichever router there is, until this is cancelled.

        To change the report, call it again and then cancel the earlier call. Logs once why the router refuses it.
        """
        await self._keep_open(lambda number: wire.Enlist(number, replica, report, wire.own_version()))

    def watch(self) -> None:
        """Keeps the substitute told of the replicas, whichever router there is, until the client is closed."""
        self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> NoReturn:
        assert self._substitute is not None
        substitute = self._substitute
        await self._keep_open(lambda number: wire.Watch(number, wire.own_version()), lambda: substitute.hear(None))

    async def _keep_open(
        self, question: Callable[[int], wire.Question], closed: Callable[[], None] = lambda: None
    ) -> NoReturn:
        """Asks a question that stays open again whenever it has ended, and calls `closed` then."""
        refused = ""
        while True:
            with contextlib.suppress(_RouterLost, NoPlace):
                answer = await self._ask_once(question(next(self._ids)))
                if isinstance(answer, wire.PlaceRefused) and answer.message != refused:
                    refused = answer.message
                    logger.error(refused)
            closed()
            await asyncio.sleep(_AGAIN_S)

    def close(self) -> None:
        """Nothing may be asked any more."""
        if self._watching is not None:
            self._watching.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        for serving in self._serving.values():
            serving.cancel()
        self._disconnect()
        self._context.term()

    async def _ask(self, question: wire.Question, expected: type[A], model: str | None = None) -> A:
        """Raises NoPlace, the router's own or one that says that there is no router.

        Raises _Substituted where the question is of a model that the substitute serves.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._answer_s):
                for _ in range(_MAX_LOSSES):
                    if model is not None and self._is_substituted(model):
                        raise _Substituted
                    with contextlib.suppress(_RouterLost):
                        answer = await self._ask_once(question, model)
                        if isinstance(answer, wire.PlaceRefused):
                            raise NoPlace(
                                answer.message, retry_after_s=answer.retry_after_s, overloaded=answer.overloaded
                            )
                        assert isinstance(answer, expected)
                        return answer
                    await asyncio.sleep(_AGAIN_S)
        raise _absent(_SILENT)

    def _is_substituted(self, model: str) -> bool:
        return self._substitute is not None and self._substitute.serves(model)

    async def _ask_once(self, question: wire.Question, model: str | None = None) -> wire.Answer:
        """Raises _RouterLost, or NoPlace when there was no router for too long. Cancelled, it tells the router.

        Raises _Substituted when the substitute serves `model` before there is a router.
        """
        if self._link is None:
            await self._reach(model)
        link = self._link
        if link is None:
            raise _RouterLost
        answer: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._open[question.id] = answer
        link.send(question)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._open.pop(question.id, None) is not None:
                link.send(wire.CancelQuestion(question.id))
            raise

    # ---- the link ----

    async def _reach(self, model: str | None) -> None:
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect())
        waits = {self._connecting}
        if model is not None and self._substitute is not None:
            if model not in self._serving:
                self._serving[model] = asyncio.create_task(self._serves(model))
            waits.add(self._serving[model])
        done, _ = await asyncio.wait(waits, timeout=self._absence_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise _absent(self._away)
        for one in done:
            one.result()
        if self._link is None and model is not None and self._is_substituted(model):
            raise _Substituted

    async def _serves(self, model: str) -> None:
        """Until the substitute serves the model, or a router is there."""
        try:
            while self._link is None and not self._is_substituted(model):
                await asyncio.sleep(_AGAIN_S)
        finally:
            del self._serving[model]

    async def _connect(self) -> None:
        """For as long as it takes: others may wait for it when the first one does not any more."""
        try:
            hear = (lambda: None), self._receive, self._lose
            address = await self._address()
            self._link = Link(self._context, address, wire.decode_from_router, *hear, key=self._key, patient=False)
            self._silent_looks = 0
            self._look()
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

    def _receive(self, message: wire.FromRouter) -> None:
        self._silent_looks = 0
        if isinstance(message, wire.Waiting):
            self.queued = message.queued
            return
        if isinstance(message, wire.Enlisted):
            if self._substitute is not None:
                self._substitute.hear(message.replicas)
            return
        answer = self._open.pop(message.id, None)
        if answer is not None and not answer.done():  # else it was cancelled while the answer was under way
            answer.set_result(message)

    def _look(self) -> None:
        self._silent_looks = self._silent_looks + 1 if self._open else 0
        if self._silent_looks > _SILENT_LOOKS:
            self._lose()
        else:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _lose(self) -> None:
        logger.warning("the router is lost; %d questions are asked again", len(self._open))
        if self._substitute is not None:
            self._substitute.hear(None)
        self._disconnect()

    def _disconnect(self) -> None:
        """Open questions raise _RouterLost."""
        if self._timer is not None:
            self._timer.cancel()
        if self._link is not None:
            self._link.close()
        waiting, self._open = list(self._open.values()), {}
        self._link, self.queued = None, {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(_RouterLost())


def _absent(reason: str) -> NoPlace:
    return NoPlace(f"the router cannot be reached: {reason}", retry_after_s=_RETRY_AFTER_S, overloaded=False)
