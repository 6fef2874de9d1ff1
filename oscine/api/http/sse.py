"""Server-sent events, or lines of JSON, as a raw ASGI response.

This module does the framing only. One write is one ASGI message, for any number of events.
"""

import asyncio

from oscine.api.common.asgi import Send

DONE = b"data: [DONE]\n\n"
_KEEP_ALIVE = b": keep-alive\n\n"
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # tells nginx to pass events on as they come
]


def event(data: bytes) -> bytes:
    """`data` is one line, such as compact JSON."""
    return b"data: " + data + b"\n\n"


def named_event(name: str, data: bytes) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


class EventStream:
    """Starts the response with its first write, so that a failure before it can still be a plain error response."""

    def __init__(self, send: Send, *, comments: bool, media_type: str = f"{SSE}; charset=utf-8") -> None:
        """`comments`: whether an idle stream gets comments. Some clients take every line for an event."""
        self._send, self._comments = send, comments
        self._headers = [(b"content-type", media_type.encode()), *_HEADERS]
        self.started = False
        self._ended = False
        self._clock = asyncio.get_running_loop().time
        self._idle_since = self._clock()

    async def write(self, events: bytes) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
        self._idle_since = self._clock()
        await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def keep_alive(self, idle_s: float) -> None:
        """Writes a comment if nothing was written for idle_s, so that proxies and clients do not give up."""
        if self._comments and not self._ended and self._clock() - self._idle_since >= idle_s:
            await self.write(_KEEP_ALIVE)

    async def end(self, events: bytes) -> None:
        """`events` are the last ones."""
        self._ended = True
        await self.write(events)
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
