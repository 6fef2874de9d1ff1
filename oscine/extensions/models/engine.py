"""An engine that is started on demand. Its process exists only between start and stop."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from oscine.engine.process.client import EngineClient, EngineDied, EngineError, EngineState
from oscine.engine.wire.stream import RequestStream
from oscine.settings.config import EngineOptions
from oscine.types import AdapterInfo, EngineInfo, EngineStats, GenerationRequest

_NO_STATS = EngineStats()


class DemandEngine:
    """An Engine whose `start` and `stop` may be called again and again."""

    def __init__(self, options: EngineOptions) -> None:
        self.left_bytes = 0  # of each GPU, that the next start leaves to other engines
        self._options = options
        self._client: EngineClient | None = None
        self._info: EngineInfo | None = None  # of the last start
        self._error: str | None = None
        self._guard: asyncio.Task[None] | None = None
        self._restarts = 0  # of engines before this one

    @property
    def state(self) -> EngineState:
        return "unloaded" if self._client is None else self._client.state

    @property
    def error(self) -> str | None:
        return self._error if self._client is None else self._client.error

    @property
    def info(self) -> EngineInfo | None:
        return self._info if self._client is None or self._client.info is None else self._client.info

    @property
    def stats(self) -> EngineStats:
        return _NO_STATS if self._client is None else self._client.stats

    @property
    def gpus(self) -> tuple[str, ...]:
        return () if self._client is None else self._client.gpus

    @property
    def restarts(self) -> int:
        return self._restarts + (0 if self._client is None else self._client.restarts)

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        return {}  # --enable-lora is refused

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        raise ValueError("adapters are for a server of one model: --enable-lora")

    def forget_adapter(self, name: str) -> AdapterInfo:
        raise KeyError(name)

    def drop_adapter(self, identity: str) -> None:
        """There is none."""

    async def start(self) -> None:
        await self.stop()
        options = self._options
        self._client = EngineClient(replace(options, cache=replace(options.cache, left_bytes=self.left_bytes)))
        await self._client.start()

    async def stop(self) -> None:
        client, self._client = self._client, None
        self._watch(False)
        if client is not None:
            self._info, self._error = client.info or self._info, client.error
            self._restarts += client.restarts
            await client.stop()

    async def wait_ready(self) -> EngineInfo:
        if self._client is None:
            raise EngineError("the engine was not started")
        info = await self._client.wait_ready()
        self._error = None
        return info

    async def sleep(self) -> bool:
        """Whether it sleeps now. One that dies in its sleep is not started again. Raises EngineError if it cannot."""
        if self._client is None:
            return False
        await self._client.sleep()
        self._watch(True)
        return self.state == "asleep"

    async def wake(self) -> None:
        """Raises EngineError if it cannot; also if it has died."""
        self._watch(False)
        if self._client is None:
            raise EngineError("the engine has ended")
        try:
            await self._client.wake()
        except EngineError:
            self._watch(self.state == "asleep")
            raise

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self._client is None:
            raise EngineDied("the model was unloaded")
        return self._client.submit(request)

    def cancel(self, request_id: str) -> None:
        if self._client is not None:
            self._client.cancel(request_id)

    def _watch(self, is_asleep: bool) -> None:
        if self._guard is not None and self._guard is not asyncio.current_task():
            self._guard.cancel()
        self._guard = asyncio.create_task(self._end_with_it()) if is_asleep else None

    async def _end_with_it(self) -> None:
        """Another engine may have its memory by now, so the supervisor must not load the model again."""
        client = self._client
        while client is not None and client.state == "asleep":
            await client.changed()
        if client is not None and client is self._client:
            await self.stop()
