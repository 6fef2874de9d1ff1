"""The connection to an engine process, and the requests that the process has."""

import asyncio
import logging
import time
from collections.abc import Callable

import zmq

from oscine.engine.process.supervisor import STARVED_S, pause_s
from oscine.engine.wire import messages as wire
from oscine.engine.wire.links import Link
from oscine.engine.wire.stream import EngineDied, EngineOverloaded, RequestStream
from oscine.types import GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)


class EngineConnection:
    """The socket to an engine process, and the streams of its requests.

    A restarted process has the same address and new requests.
    """

    def __init__(
        self,
        receive: Callable[[wire.ToClient], None],
        on_down: Callable[[], None],
        on_starved: Callable[[str], None],
    ) -> None:
        """`receive` gets each message before the requests do. `on_starved` is told why no socket could be opened for
        STARVED_S."""
        self._receive, self._on_down, self._on_starved = receive, on_down, on_starved
        self._address = ""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made by open()
        self._link: Link[wire.ToClient] | None = None
        self._starved_at: float | None = None  # time since which no socket can be opened
        self._failures = 0  # consecutive failures to open one
        self._retry: asyncio.TimerHandle | None = None
        self._streams: dict[str, RequestStream] = {}

    @property
    def has_requests(self) -> bool:
        return bool(self._streams)

    def open(self, address: str) -> None:
        self._context, self._address = zmq.Context(), address

    def close(self) -> None:
        if self._context is not None:
            self._context.term()

    def connect(self) -> None:
        """If no socket can be opened, tries again after a pause, until the engine is given up."""
        assert self._context is not None
        try:
            hear = (lambda: self.send(wire.Hello())), self._hear, self._on_down
            self._link = Link(self._context, self._address, wire.decode_to_client, *hear)
        except (zmq.ZMQError, OSError) as error:
            self._starve(f"no socket can be opened for the engine: {error}")
        else:
            self._starved_at, self._failures = None, 0

    def _starve(self, reason: str) -> None:
        self._failures += 1
        if self._starved_at is None:
            logger.error(reason)
            self._starved_at = time.monotonic()
        if time.monotonic() - self._starved_at < STARVED_S:
            self._retry = asyncio.get_running_loop().call_later(pause_s(self._failures), self.connect)
        else:
            self._on_starved(reason)

    def disconnect(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        if self._link is not None:
            self._link.close()
            self._link = None

    def send(self, message: wire.ToEngine) -> None:
        assert self._link is not None
        self._link.send(message)

    # ---- requests ----

    def submit(self, request: GenerationRequest) -> RequestStream:
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        self.send(wire.Submit(request))
        stream = RequestStream(request.request_id, self.abandon)
        self._streams[request.request_id] = stream
        return stream

    def abandon(self, request_id: str) -> RequestStream | None:
        """Tells the engine, and forgets the stream."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.send(wire.Cancel(request_id))
        return stream

    def _hear(self, message: wire.ToClient) -> None:
        self._receive(message)
        match message:
            case wire.Outputs():
                self._deliver(message.outputs)
            case wire.Refused():
                self._refuse(message.request_id, message.message)

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # closed here while the output was under way
            if output.finish_reason is not None:
                del streams[output.request_id]
            stream.put(output)

    def _refuse(self, request_id: str, message: str) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(EngineOverloaded(message))

    def fail_all(self, error: str | None) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(EngineDied(error))
