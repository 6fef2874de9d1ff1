"""The API's end of the wire to an engine process: requests go out, outputs come back to the stream of their request."""

import asyncio
import logging
import time
from typing import Literal, Protocol

import zmq

from oscine.engine.process.descriptors import raise_descriptor_limit
from oscine.engine.process.member import Member
from oscine.engine.process.parent import SOCKETS
from oscine.engine.process.supervisor import STARVED_S, EngineSupervisor, pause_s
from oscine.engine.wire import messages as wire
from oscine.engine.wire.links import Link
from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded, RequestStream
from oscine.settings.config import EngineOptions
from oscine.system.owned_folder import OwnedFolder, make_temporary
from oscine.types import EngineInfo, EngineStats, GenerationOutput, GenerationRequest

__all__ = ["Engine", "EngineClient", "EngineDied", "EngineError", "EngineOverloaded", "EngineState", "RequestStream"]

logger = logging.getLogger(__name__)

_WATCH_S = 0.05  # the watch over a silent engine sleeps no less
_LOOKS = 4  # of the watch in the time that an engine may be silent

EngineState = Literal["starting", "ready", "restarting", "failed", "stopped"]


class Engine(Protocol):
    """What the API needs of an engine, wherever it runs. All methods belong to one event loop."""

    @property
    def state(self) -> EngineState: ...

    @property
    def error(self) -> str | None:
        """Why the last start or run of the engine failed, in one line; None while all is well."""
        ...

    @property
    def info(self) -> EngineInfo | None:
        """None until the engine was ready for the first time."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The newest snapshot; at most about 100 ms old while requests run, exact when none does."""
        ...

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of the GPUs of this machine that compute the model; none until it is ready."""
        ...

    @property
    def restarts(self) -> int:
        """Times that an engine which had been ready ended unasked."""
        ...

    async def start(self) -> None:
        """Returns at once; the engine loads meanwhile."""
        ...

    async def stop(self) -> None:
        """Ends the engine; live streams get EngineDied."""
        ...

    async def wait_ready(self) -> EngineInfo:
        """Raises EngineError when the engine failed for good or was stopped."""
        ...

    def submit(self, request: GenerationRequest) -> RequestStream:
        """Never waits. Raises EngineDied when the engine is not ready, ValueError for an id that is in use."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request early; its stream ends at once with finish_reason "cancelled"."""
        ...


class EngineClient:
    """An engine in a process that this client owns: starts it, restarts it when it dies, and ends it."""

    def __init__(self, options: EngineOptions, member: Member | None = None) -> None:
        """`member`: of a group of engines that share experts."""
        self.state: EngineState = "starting"
        self.error: str | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self.restarts = 0
        self._folder: OwnedFolder | None = None  # of the socket
        self.address = ""  # ZeroMQ endpoint of the engine, made by start()
        self._options = options
        self._supervisor = EngineSupervisor(options, self._on_exit, member)
        self._watching: asyncio.Task[None] | None = None
        self._heard_s = 0.0  # when the engine last said something, or was first asked for something after that
        self._greeted = False  # asked whether it is there; no answer yet
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None  # made by start()
        self._link: Link[wire.ToClient] | None = None
        self._starved_at: float | None = None  # time since which no socket can be opened
        self._failures = 0  # consecutive failures to open one
        self._streams: dict[str, RequestStream] = {}
        self._changed = asyncio.Event()  # set, and replaced, at each change of state

    @property
    def gpus(self) -> tuple[str, ...]:
        return () if self.info is None else self.info.gpus

    @property
    def pid(self) -> int | None:
        """Of the engine process."""
        return self._supervisor.pid

    async def start(self) -> None:
        raise_descriptor_limit()
        try:
            self._folder = make_temporary(SOCKETS, logger.warning)  # mode 0700: no other user may connect
        except OSError as error:
            raise EngineError(str(error)) from None
        self._context = zmq.Context()
        self.address = f"ipc://{self._folder.path}/engine"
        self._supervisor.start(self.address)
        if self._options.engine_timeout_s:
            self._watching = asyncio.create_task(self._watch())
        self._connect()

    async def stop(self) -> None:
        if self.state == "stopped":
            return
        self._enter("stopped", "the engine was stopped")
        if self._watching is not None:
            self._watching.cancel()
        await self._supervisor.stop()
        if self._context is not None:
            self._context.term()
        if self._folder is not None:
            self._folder.remove(logger.warning)

    async def wait_ready(self) -> EngineInfo:
        while self.state in ("starting", "restarting"):
            await self._changed.wait()
        if self.state != "ready":
            raise EngineError(self.error)
        assert self.info is not None
        return self.info

    async def changed(self) -> None:
        """Returns at the next change of state."""
        await self._changed.wait()

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self.state != "ready":
            raise EngineDied(self.error or "the engine is starting")
        if request.request_id in self._streams:
            raise ValueError(f"request id {request.request_id!r} is in use")
        if not self._streams:
            self._heard_s = time.monotonic()
        self._send(wire.Submit(request))
        stream = RequestStream(request.request_id, self._abandon)
        self._streams[request.request_id] = stream
        return stream

    def cancel(self, request_id: str) -> None:
        stream = self._abandon(request_id)
        if stream is not None:
            stream.put(GenerationOutput(request_id, finish_reason="cancelled"))

    def _abandon(self, request_id: str) -> RequestStream | None:
        """Tells the engine, and forgets the stream."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self._send(wire.Cancel(request_id))
        return stream

    def _send(self, message: wire.ToEngine) -> None:
        assert self._link is not None
        self._link.send(message)

    async def _watch(self) -> None:
        """Kills an engine that has requests and says nothing: each step is news, and the engine waits for no client.

        One that others reach may have requests of theirs: it is asked whether it is there, and answers after its step.
        """
        timeout_s, is_shared = self._options.engine_timeout_s, self._options.peers.host is not None
        while True:
            waits = bool(self._streams) or self._greeted
            if waits and time.monotonic() - self._heard_s >= timeout_s:
                self.error = f"the engine process did nothing for {timeout_s:g} s and was killed"
                self._supervisor.kill(self.error)
                self._heard_s = time.monotonic()
            elif is_shared and not waits and self.state == "ready":
                self._greeted, self._heard_s = True, time.monotonic()
                self._send(wire.Hello())
            await asyncio.sleep(max(timeout_s / _LOOKS, _WATCH_S))

    # ---- what the link and the supervisor report ----

    def _connect(self) -> None:
        """Connects. If no socket can be opened, tries again after a pause, until the engine is given up."""
        if self.state not in ("starting", "restarting"):
            return
        assert self._context is not None
        try:
            hear = (lambda: self._send(wire.Hello())), self._receive, self._on_down
            self._link = Link(self._context, self.address, wire.decode_to_client, *hear)
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
            asyncio.get_running_loop().call_later(pause_s(self._failures), self._connect)
            return
        self._supervisor.give_up()
        self._supervisor.kill(reason)
        self._enter("failed", reason)

    def _receive(self, message: wire.ToClient) -> None:
        self._heard_s, self._greeted = time.monotonic(), False
        match message:
            case wire.Outputs():
                if message.stats is not None:
                    self.stats = message.stats
                self._deliver(message.outputs)
            case wire.Refused():
                stream = self._streams.pop(message.request_id, None)
                if stream is not None:
                    stream.fail(EngineOverloaded(message.message))
            case wire.Ready():
                self.info = message.info
                self._supervisor.mark_ready()
                self._enter("ready", None)
            case wire.Ending():
                self.error = message.message
            case wire.Failed():
                self._supervisor.give_up()
                self._enter("failed", message.message)

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # closed here while the output was under way
            if output.finish_reason is not None:
                del streams[output.request_id]
            stream.put(output)

    def _on_down(self) -> None:
        """The engine's socket is gone; the next engine gets a link of its own."""
        self._disconnect()
        if self.state == "ready":
            self.restarts += 1
            self._enter("restarting", self.error or "the engine process ended")
        self._connect()

    def _on_exit(self, reason: str, gave_up: bool) -> None:
        """The process is gone, whether or not its socket ever was there; live streams end when the socket has."""
        if gave_up and self.state in ("starting", "restarting"):
            self._enter("failed", reason)
        elif self.state in ("ready", "starting", "restarting"):
            self.error = reason

    def _disconnect(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None

    def _enter(self, state: EngineState, error: str | None) -> None:
        self.state, self.error = state, error
        if state != "ready":
            self.stats, self._greeted = EngineStats(), False
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.fail(EngineDied(error))
        if state in ("failed", "stopped"):
            self._disconnect()
        self._changed.set()
        self._changed = asyncio.Event()
