"""The API's end of the wire to an engine process: requests go out, outputs come back to the stream of their request."""

import asyncio
import logging
import time
from collections.abc import Mapping
from math import inf
from typing import Literal, Protocol

from oscine.engine.process.adapters import ClientAdapters
from oscine.engine.process.connection import EngineConnection
from oscine.engine.process.descriptors import raise_descriptor_limit
from oscine.engine.process.member import Member
from oscine.engine.process.parent import SOCKETS
from oscine.engine.process.supervisor import EngineSupervisor
from oscine.engine.wire import messages as wire
from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded, RequestStream
from oscine.settings.config import GPU_TIMEOUT_S, EngineOptions
from oscine.system.owned_folder import OwnedFolder, make_temporary
from oscine.types import AdapterInfo, EngineInfo, EngineStats, GenerationOutput, GenerationRequest

__all__ = ["Engine", "EngineClient", "EngineDied", "EngineError", "EngineOverloaded", "EngineState", "RequestStream"]

logger = logging.getLogger(__name__)

_WATCH_S = 0.05  # the watch over a silent engine sleeps no less
_LOOKS = 4  # of the watch in the time that an engine may be silent

EngineState = Literal["unloaded", "starting", "ready", "asleep", "restarting", "failed", "stopped"]


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

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Low-rank adapters by the names that requests use."""
        ...

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        """`in_place`: another one may have the name. Raises ValueError, in one line, for one that cannot be loaded, and
        EngineDied."""
        ...

    def forget_adapter(self, name: str) -> AdapterInfo:
        """Frees the name of an adapter, which goes on to serve requests. Raises KeyError."""
        ...

    def drop_adapter(self, identity: str) -> None:
        """No further request will have the adapter. An adapter with another name stays."""
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
        self._connection = EngineConnection(self._receive, self._on_down, self._on_starved)
        self._changed = asyncio.Event()  # set, and replaced, at each change of state
        self._turning: asyncio.Future[None] | None = None  # until it sleeps or is awake
        self._adapters = ClientAdapters(self._connection.send)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return self._adapters.by_name

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        if self.state != "ready":
            raise EngineDied(self.error or "the engine is starting")
        return await self._adapters.load(name, path, in_place)

    def forget_adapter(self, name: str) -> AdapterInfo:
        return self._adapters.forget(name)

    def drop_adapter(self, identity: str) -> None:
        if self.state == "ready":  # else it is gone already
            self._adapters.drop(identity)

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
        self.address = f"ipc://{self._folder.path}/engine"
        self._connection.open(self.address)
        self._supervisor.start(self.address)
        if self._options.hang_limit_s(on_gpu=False) < inf:
            self._watching = asyncio.create_task(self._watch())
        self._connection.connect()

    async def stop(self) -> None:
        if self.state == "stopped":
            return
        self._enter("stopped", "the engine was stopped")
        if self._watching is not None:
            self._watching.cancel()
        await self._supervisor.stop()
        self._connection.close()
        if self._folder is not None:
            self._folder.remove(logger.warning)

    async def sleep(self) -> None:
        """Frees the engine's memory, once it has no request. Returns when it is done. Raises EngineError."""
        await self._turn(asleep=True)

    async def wake(self) -> None:
        """Undoes `sleep`. Raises EngineError; if memory was lacking, the engine sleeps on."""
        await self._turn(asleep=False)

    async def _turn(self, *, asleep: bool) -> None:
        if self.state not in ("ready", "asleep"):
            raise EngineError(self.error or f"the engine is {self.state}")
        if self._turning is not None:
            raise EngineError("the engine falls asleep or wakes up just now")
        self._turning = asyncio.get_running_loop().create_future()
        try:
            self._connection.send(wire.Sleep(asleep))
            await self._turning
        finally:
            self._turning = None

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
        if not self._connection.has_requests:
            self._heard_s = time.monotonic()
        return self._connection.submit(request)

    def cancel(self, request_id: str) -> None:
        stream = self._connection.abandon(request_id)
        if stream is not None:
            stream.put(GenerationOutput(request_id, finish_reason="cancelled"))

    async def _watch(self) -> None:
        """Kills an engine that has requests and says nothing: each step is news, and the engine waits for no client.

        One that others reach may have requests of theirs: it is asked whether it is there, and answers after its step.
        """
        is_shared = self._options.peers.host is not None
        while True:
            timeout_s = self._options.hang_limit_s(on_gpu=bool(self.gpus))
            waits = self._connection.has_requests or self._greeted
            if waits and time.monotonic() - self._heard_s >= timeout_s:
                self.error = f"the engine process did nothing for {timeout_s:g} s and was killed"
                self._supervisor.end_hung(self.error)
                self._heard_s = time.monotonic()
            elif is_shared and not waits and self.state == "ready":
                self._greeted, self._heard_s = True, time.monotonic()
                self._connection.send(wire.Hello())
            # Until the engine is ready its device is unknown: look as often as for a GPU.
            await asyncio.sleep(max(min(timeout_s, GPU_TIMEOUT_S) / _LOOKS, _WATCH_S))

    # ---- what the connection and the supervisor report ----

    def _receive(self, message: wire.ToClient) -> None:
        self._heard_s, self._greeted = time.monotonic(), False
        match message:
            case wire.Outputs(stats=EngineStats() as stats):
                self.stats = stats
            case wire.AdapterNews():
                self._adapters.hear(message)
            case wire.Ready():
                self.info = message.info
                self._supervisor.mark_ready()
                if self.state != "ready":
                    self._adapters.ready(message.info)
                self._enter("ready", None)
            case wire.Ending():
                self.error = message.message
            case wire.Failed():
                self._supervisor.give_up()
                self._enter("failed", message.message)
            case wire.Slept():
                self._enter("asleep" if message.asleep else "ready", None)
                if self._turning is not None and not self._turning.done():
                    why = message.error
                    self._turning.set_result(None) if why is None else self._turning.set_exception(EngineError(why))

    def _on_down(self) -> None:
        """The engine's socket is gone; the next engine gets a link of its own."""
        self._connection.disconnect()
        if self.state in ("ready", "asleep"):
            self.restarts += 1
            self._enter("restarting", self.error or "the engine process ended")
        if self.state in ("starting", "restarting"):
            self._connection.connect()

    def _on_starved(self, reason: str) -> None:
        self._supervisor.give_up()
        self._supervisor.kill(reason)
        self._enter("failed", reason)

    def _on_exit(self, reason: str, gave_up: bool) -> None:
        """The process is gone, whether or not its socket ever was there; live streams end when the socket has."""
        if gave_up and self.state in ("starting", "restarting"):
            self._enter("failed", reason)
        elif self.state in ("ready", "asleep", "starting", "restarting"):
            self.error = reason

    def _enter(self, state: EngineState, error: str | None) -> None:
        self.state, self.error = state, error
        if state != "ready":
            self.stats, self._greeted = EngineStats(), False
            self._connection.fail_all(error)
            self._adapters.fail(error or "the engine ended")
        if state in ("failed", "stopped"):
            self._connection.disconnect()
        if state not in ("ready", "asleep") and self._turning is not None and not self._turning.done():
            self._turning.set_exception(EngineError(error))
        self._changed.set()
        self._changed = asyncio.Event()
