"""What an API is: a part of the server beside OpenAI's chat completions, completions and models."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from starlette.requests import Request
from starlette.responses import Response

from oscine.api.common.asgi import ASGIApp
from oscine.api.openapi import Operation
from oscine.api.serving.service import Service, ServiceApi

Front = Callable[[Request], Awaitable[Response]]


class Api(ServiceApi):
    """One API of a server; it lives as long as its service, and belongs to the same event loop.

    Its requests have examples: Operation.example.
    """

    front: Front | None = None  # the answer to GET / where no page is asked for

    def __init__(self, service: Service) -> None:
        """Raises ValueError, in one line, for an option that cannot be used."""
        self.service = service

    @property
    def websockets(self) -> Mapping[str, ASGIApp]:
        """ASGI applications of WebSockets by their paths; see oscine.api.http.websocket."""
        return {}

    @property
    def operations(self) -> Sequence[Operation]:
        """In the order in which paths are matched."""
        raise NotImplementedError
