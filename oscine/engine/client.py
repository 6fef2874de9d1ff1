"""The API's end of the wire to an engine process: requests go out, outputs come back to the stream of their request.

Knows token ids only: no text, no HTTP, no torch.
"""

from typing import Literal, Protocol

from oscine.config import EngineOptions
from oscine.engine.stream import EngineDied, EngineError, EngineOverloaded, RequestStream
from oscine.types import EngineInfo, EngineStats, GenerationRequest

__all__ = ["Engine", "EngineClient", "EngineDied", "EngineError", "EngineOverloaded", "EngineState", "RequestStream"]

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
        """Never waits. Raises EngineDied when the engine is not ready."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request early; its stream, if it is still read, ends with finish_reason "cancelled"."""
        ...


class EngineClient:
    """An engine in a process of its own, started and restarted by this client: implements Engine."""

    def __init__(self, options: EngineOptions) -> None:
        self.options = options
        self.state: EngineState = "starting"
        self.error: str | None = None
        self.info: EngineInfo | None = None
        self.stats = EngineStats()

    async def start(self) -> None:
        raise NotImplementedError

    async def stop(self) -> None:
        raise NotImplementedError

    async def wait_ready(self) -> EngineInfo:
        raise NotImplementedError

    def submit(self, request: GenerationRequest) -> RequestStream:
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        raise NotImplementedError
