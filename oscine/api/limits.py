"""What a client may ask of the server: a key, a body of bounded size sent in bounded time, a place in the queue.

Knows ASGI messages and headers; not what a body says.
"""

import asyncio
import hmac
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from oscine.api.errors import APIError, response, unavailable

BODY_TIMEOUT_S = 60.0


class ApiKeys:
    """Middleware of an endpoint that asks for `Authorization: Bearer KEY`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self.app = app
        self.keys = [key.encode() for key in keys]

    def admits(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [hmac.compare_digest(key.strip(), known) for known in self.keys]  # all of them: constant time
        return scheme.lower() == b"bearer" and any(matches)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.admits(scope):
            await self.app(scope, receive, send)
            return
        error = APIError(
            "This server asks for an API key: send it as 'Authorization: Bearer KEY'.",
            status=401,
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await response(error)(scope, receive, send)


async def read_body(request: Request, limit: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body, sent with a length or in chunks. Raises APIError 413 above `limit` bytes, 408 when it is late.

    Raises starlette's ClientDisconnect when the client goes away meanwhile.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        headers = {"Connection": "close"}
        raise APIError(f"The body did not arrive within {timeout_s:g} s.", status=408, headers=headers) from None
    return b"".join(chunks)


def _too_large(limit: int) -> APIError:
    return APIError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large")


class Admission:
    """Counts the sequences between their admission and their end, and refuses more than `limit`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sequences = 0
        self._empty = asyncio.Event()
        self._empty.set()

    def check(self, sequences: int) -> None:
        """Raises APIError: 503 when there is no room now, 400 for a request that could never fit."""
        if sequences > self.limit:
            raise APIError(f"The request asks for {sequences} sequences; this server takes {self.limit} at once.")
        if self.sequences + sequences > self.limit:
            raise unavailable("The server has as many requests as it can queue.", code="overloaded")

    @contextmanager
    def hold(self, sequences: int) -> Iterator[None]:
        """Raises APIError as check does."""
        self.check(sequences)
        self.sequences += sequences
        self._empty.clear()
        try:
            yield
        finally:
            self.sequences -= sequences
            if not self.sequences:
                self._empty.set()

    async def wait_empty(self) -> None:
        await self._empty.wait()
