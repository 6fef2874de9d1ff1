"""One `response.create`: a request as by POST, whose events become frames.

So keys, limits, the log, metrics, and all that a request means are the same as over HTTP.
"""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from oscine.api.common.asgi import ASGIApp, Message, Scope
from oscine.extensions.apis.responses.run import WITHIN, Within
from oscine.extensions.apis.websocket.frames import error_frame, inner_error, with_lane

SendText = Callable[[str], Awaitable[None]]
_DROPPED = (  # headers of the handshake that say nothing about a request
    *(b"upgrade", b"connection", b"content-length", b"content-type", b"transfer-encoding", b"x-request-id"),
    *(b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-protocol"),
)


class ConnectionRequest:
    def __init__(self, app: ASGIApp, outer: Scope, frame: str, within: Within, gone: asyncio.Event) -> None:
        """`outer`: of the connection. `gone` is set when the client leaves."""
        self._app, self._body, self._gone = app, frame.encode(), gone
        self._stream_id: str | None = None
        self._headers: dict[str, str] = {}
        self._status = 0
        self._whole: list[bytes] = []  # of an answer that is no stream
        self._sent = False
        headers = [field for field in outer["headers"] if field[0] not in _DROPPED]
        self._scope: Scope = {
            **{name: outer[name] for name in ("asgi", "http_version", "server", "client", "root_path", "path")},
            **{"type": "http", "method": "POST", "query_string": b"", "raw_path": outer["raw_path"], "state": {}},
            "scheme": "https" if outer["scheme"] == "wss" else "http",
            "headers": [*headers, (b"content-type", b"application/json")],
            "extensions": {},
            WITHIN: within,
        }

    async def run(self, send: SendText, stream_id: str | None) -> bool:
        """Sends its frames. Returns whether the response was refused or has failed."""
        self._stream_id, self._send_text = stream_id, send
        self._failed = False
        await self._app(self._scope, self._receive, self._send)
        return self._failed or self._status != 200

    async def _receive(self) -> Message:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): text.decode("latin-1") for name, text in message["headers"]
            }
        elif self._status == 200:
            for event in message["body"].split(b"\n\n"):
                await self._event(event)
        else:
            self._whole.append(message["body"])
            if not message.get("more_body", False):
                error = msgspec.json.decode(b"".join(self._whole))["error"]
                await self._send_text(with_lane(error_frame(self._status, error, self._headers), self._stream_id))

    async def _event(self, event: bytes) -> None:
        """Comments have no data."""
        name, _, data = event.partition(b"\ndata: ")
        if not data:
            return
        if name == b"event: error":
            self._failed, data = True, inner_error(data)
        elif name == b"event: response.failed":
            self._failed = True
        await self._send_text(with_lane(data, self._stream_id))
