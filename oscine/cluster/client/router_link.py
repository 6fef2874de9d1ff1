"""A client's connection to one life of the router.

Knows which questions are open; what becomes of those that have no answer when the router is gone is decided elsewhere.
"""

import asyncio
import logging
from collections.abc import Callable

import zmq

from oscine.cluster.spec.router_messages import (
    WAITING_S,
    Answer,
    CancelQuestion,
    FromRouter,
    Question,
    Waiting,
    decode_from_router,
)
from oscine.engine.wire.links import Link

logger = logging.getLogger(__name__)

# Looks without a word, though something was asked. Not seconds: an ingress that had no turn could not hear any.
_SILENT_LOOKS = 15


class RouterLost(Exception):  # noqa: N818  (reads as what happened)
    """The router is gone, and gave no answer."""


class RouterLink:
    """Good for questions until it is lost: refused, broken, or silent, as where another process has the port now."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, key: str, on_lost: Callable[[], None]
    ) -> None:
        """Raises ZMQError when there can be no such connection. `key`: see oscine.engine.wire.tcp."""
        self._on_lost = on_lost
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self.queued: dict[str, int] = {}  # model -> requests that wait for a place, while a question is open
        self._silent_looks = 0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._link = Link(
            context, address, decode_from_router, lambda: None, self._receive, self._lose, key=key, patient=False
        )
        self._timer = self._loop.call_later(WAITING_S, self._look)

    async def ask(self, question: Question) -> Answer:
        """Raises RouterLost. Cancelled, it tells the router."""
        if self._is_closed:
            raise RouterLost
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._open[question.id] = answer
        self._link.send(question)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._open.pop(question.id, None) is not None:
                self._link.send(CancelQuestion(question.id))
            raise

    def close(self) -> None:
        """Whoever waits gets RouterLost."""
        self._is_closed = True
        self._timer.cancel()
        self._link.close()
        waiting, self._open = list(self._open.values()), {}
        for answer in waiting:
            if not answer.done():
                answer.set_exception(RouterLost())

    def _receive(self, message: FromRouter) -> None:
        self._silent_looks = 0
        if isinstance(message, Waiting):
            self.queued = message.queued
            return
        answer = self._open.pop(message.id, None)
        if answer is not None and not answer.done():  # else it was cancelled while the answer was under way
            answer.set_result(message)

    def _look(self) -> None:
        self._silent_looks = self._silent_looks + 1 if self._open else 0
        if self._silent_looks > _SILENT_LOOKS:
            self._lose()
        else:
            self._timer = self._loop.call_later(WAITING_S, self._look)

    def _lose(self) -> None:
        logger.warning("the router is lost; %d questions are asked again", len(self._open))
        self.close()
        self._on_lost()
