"""The outermost middleware: a request gets a record, an id and a trace, and is counted and logged when it is over.

It is around Starlette, not within it, because Starlette's response to a crash skips Starlette's own middleware.
"""

import time

from oscine.api.common.asgi import INSIDE, ASGIApp, Message, Receive, Scope, Send
from oscine.api.common.errors import ANTHROPIC_PATH
from oscine.api.common.memory import Bodies, Held
from oscine.api.common.record import CLIENT_LEFT, RequestRecord, current
from oscine.api.telemetry.logs import log_request
from oscine.api.telemetry.metrics import Metrics
from oscine.api.telemetry.traces import Tracing


def note(record: RequestRecord, metrics: Metrics) -> None:
    """Counts and logs a finished request, or a connection that was refused before its request was read."""
    metrics.responded(record)
    log_request(record)


class Observe:
    """All in one layer, since each layer adds a cost per event of every stream."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None, bodies: Bodies) -> None:
        self.app = app
        self._metrics = metrics
        self._tracing = tracing
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            scope[INSIDE] = self
            await self.app(scope, receive, send)
            return
        record = RequestRecord.of(scope)
        span = None if self._tracing is None else self._tracing.begin(record, scope)

        held = Held(self._bodies, scope)

        async def count() -> Message:
            message = await receive()
            held.take(len(message.get("body", b"")))
            return message

        async def observe(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._respond(record, message)
            await send(message)

        outside = current.set(record)
        self._metrics.in_progress.inc()
        try:
            with held:
                await self.app(scope, count, observe)
        finally:
            self._finish(record, scope)
            if span is not None:
                span.end(record)
            current.reset(outside)

    def _respond(self, record: RequestRecord, message: Message) -> None:
        record.status = message["status"]
        limits = record.key.headers() if record.key is not None else ()
        # Anthropic's clients read the id from another header.
        names = (b"x-request-id", b"request-id") if record.path.startswith(ANTHROPIC_PATH) else (b"x-request-id",)
        ids = [(name, record.request_id) for name in names]
        lacking = [(b"x-tools-left-out", ", ".join(record.tools_left_out).encode())] if record.tools_left_out else []
        message["headers"] = [*message.get("headers", ()), *ids, *limits, *lacking]

    def _finish(self, record: RequestRecord, scope: Scope) -> None:
        record.ended_s = time.perf_counter()
        record.status = record.status or CLIENT_LEFT
        route = scope.get("route")  # set by the router; absent for unknown paths, which would be unbounded
        record.route = route.path if route else ""
        self._metrics.in_progress.dec()
        note(record, self._metrics)
