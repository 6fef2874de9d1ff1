"""What endpoints that generate have in common: a request is read, matched with a ready model, and answered."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Generic, Protocol, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oscine.api.common.asgi import ClientLeftError, Write
from oscine.api.common.connection import run_while_connected
from oscine.api.common.errors import APIError, internal
from oscine.api.common.keys import Caller
from oscine.api.http.body import read_body
from oscine.api.http.sse import EventStream
from oscine.api.serving.call import Call, T
from oscine.api.serving.schemas import decode
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service
from oscine.api.turns.generation import Generation

logger = logging.getLogger(__name__)

Run = Callable[[Write | None], Coroutine[Any, Any, None]]  # makes an answer; writes its events, if given where


class Answer(Protocol):
    """The answer to one request."""

    def last_event(self) -> bytes:
        """The end of a stream: the usage if requested, and [DONE]."""

    def failure(self, error: APIError) -> bytes:
        """The end of a stream that fails after its begin."""

    def body(self) -> bytes:
        """The whole answer as JSON, when all choices are complete."""


class Endpoint(ABC, Generic[T]):
    """An ASGI application: the response of a stream is written without a layer in between."""

    request_type: type[T]

    def __init_subclass__(cls) -> None:
        (cls.request_type,) = get_args(cls.__dict__["__orig_bases__"][0])  # T

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        with suppress(ClientLeftError):
            data = await read_body(Request(scope, receive), self.service.config.server.max_body_bytes)
            body = await decode(data, self.request_type, scope)
            name, model = self.find(self.wanted(body, scope))
            if await self.answered(body, name, model, scope, receive, send):
                return
            caller = Caller.of(scope, receive)
            async with self.service.using(model, receive):
                ready = model.ready(caller.threads, name)
                with model.uses([ready.adapter] if ready.adapter else []):
                    call = Call(body, name, ready, caller, len(data), arrived_s)
                    await self.answer(call, scope, receive, send)

    async def answered(
        self, body: T, name: str, model: ServedModel, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Answers a request that needs no model in memory. Whether it was one. Raises APIError."""
        return False

    def wanted(self, body: T, scope: Scope) -> str | None:
        """The name of the model, as the request gives it."""
        return body.model

    def find(self, name: str | None) -> tuple[str, ServedModel]:
        """The model that the request names: Service.find."""
        return self.service.find(name)

    def stream(self, send: Send) -> EventStream:
        return EventStream(send, comments=self.service.config.server.keep_alive_comments)

    @abstractmethod
    async def answer(self, call: Call[T], scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Raises APIError if nothing was sent yet, ClientLeftError if nothing is to be sent."""

    async def generate(
        self, generation: Generation, answer: Answer, scope: Scope, receive: Receive, send: Send, *, stream: bool | None
    ) -> None:
        """Runs the generation and sends its answer. Raises APIError if nothing was sent yet."""
        with generation.admit():
            await self.respond(generation.run, answer, scope, receive, send, stream=stream)

    async def respond(
        self, run: Run, answer: Answer, scope: Scope, receive: Receive, send: Send, *, stream: bool | None
    ) -> None:
        """Sends the answer that `run` makes, as events if `stream`. When the client leaves, `run` is cancelled.

        Raises APIError if nothing was sent yet.
        """
        if stream:
            events = self.stream(send)
            await run_while_connected(receive, _streamed(run, answer, events), on_idle=events.keep_alive)
        elif await run_while_connected(receive, run(None)):
            await Response(answer.body(), media_type="application/json")(scope, receive, send)


async def _streamed(run: Run, answer: Answer, events: EventStream) -> None:
    try:
        await run(events.write)
        await events.end(answer.last_event())
    except APIError as error:
        if not events.started:
            raise
        await events.end(answer.failure(error))
    except Exception:
        if not events.started:
            raise
        logger.exception("a stream failed")
        await events.end(answer.failure(internal()))
