"""What endpoints that generate have in common: a request is read, decoded, and matched with a model that is ready.

Knows HTTP bodies and names of models; not what is asked.
"""

import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from oscine.api.http.body import read_body
from oscine.api.http.sse import EventStream
from oscine.api.serving.schemas import decode
from oscine.api.serving.served_model import ReadyModel
from oscine.api.serving.service import Service


class Asked(Protocol):
    """The record that a body is decoded into."""

    @property
    def model(self) -> str | None: ...


T = TypeVar("T", bound=Asked)


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request as an endpoint gets it."""

    asked: T
    name: str  # of the model, as the client calls it
    model: ReadyModel
    size: int  # of the body, in bytes
    arrived_s: float  # on the clock of time.perf_counter


class Endpoint(ABC, Generic[T]):
    """An ASGI application: the response of a stream is written without a layer in between."""

    request_type: type[T]

    def __init__(self, service: Service) -> None:
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived_s = time.perf_counter()
        with suppress(ClientDisconnect):
            body = await read_body(Request(scope, receive), self.service.config.server.max_body_bytes)
            asked = decode(body, self.request_type)
            name, model = self.service.find(asked.model)
            await self.answer(Call(asked, name, model.ready(), len(body), arrived_s), scope, receive, send)

    def events(self, send: Send, *, stream: bool | None) -> EventStream | None:
        """The stream for the events of one answer; None if the answer is not streamed."""
        return EventStream(send, comments=self.service.config.server.keep_alive_comments) if stream else None

    @abstractmethod
    async def answer(self, call: Call[T], scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response. Raises APIError if nothing was sent yet, ClientDisconnect if nothing is to be sent."""
