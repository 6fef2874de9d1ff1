"""The types of ASGI. With them, what serves requests needs no web framework."""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
ASGIApp = Callable[[Scope, Receive, Send], Awaitable[None]]
INSIDE = "oscine.inside"  # in the scope of a WebSocket: the application for requests that come over it
Write = Callable[[bytes], Awaitable[None]]  # sends a part of a body


class ClientLeftError(Exception):
    """The client has disconnected: no answer would reach it."""
