"""SageMaker's /invocations: the body says which of OpenAI's endpoints answers it."""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscine.api.common.errors import APIError
from oscine.api.http.body import read_body
from oscine.api.serving.schemas import decode
from oscine.api.serving.service import Service
from oscine.extensions.apis.conventions.schemas import Invocation

_INPUTS = ("messages", "prompt", "input")


class Invocations:
    """An ASGI application."""

    request_type = Invocation

    def __init__(self, service: Service, chat: ASGIApp, text: ASGIApp, responses: ASGIApp) -> None:
        self.service = service
        self._endpoints = dict(zip(_INPUTS, (chat, text, responses), strict=True))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        data = await read_body(Request(scope, receive), self.service.config.server.max_body_bytes)
        body = await decode(data, Invocation, scope)
        given = [name for name in _INPUTS if getattr(body, name) is not None]
        if len(given) != 1:
            raise APIError(f"Give exactly one of {', '.join(_INPUTS)}: it says what the body is.")
        await self._endpoints[given[0]](scope, _again(data, receive), send)


def _again(data: bytes, receive: Receive) -> Receive:
    """Gives the body once more, and then what comes after it."""
    whole: list[Message] = [{"type": "http.request", "body": data}]

    async def replay() -> Message:
        return whole.pop() if whole else await receive()

    return replay
