"""An engine in this process that plays the script of a test, and records its requests."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from oscine.engine.process.client import EngineState
from oscine.engine.wire.stream import EngineDied, EngineError, RequestStream
from oscine.types import AdapterInfo, EngineInfo, EngineStats, GenerationOutput, GenerationRequest

Script = Callable[[GenerationRequest], Iterable[GenerationOutput | EngineError]]

MAX_MODEL_LEN = 2048
VOCAB_SIZE = 320


class ScriptedEngine:
    """An oscine.engine.process.client.Engine. A script may end without a last output: then the request hangs."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.state: EngineState = "starting"
        self.error: str | None = None
        self.restarts = 0
        self.gpus: tuple[str, ...] = ()
        self.info: EngineInfo | None = None
        self.adapters: dict[str, AdapterInfo] = {}
        self.stats = EngineStats(kv_slots_total=8, full_pages_total=8, sliding_pages_total=8)
        self.requests: list[GenerationRequest] = []
        self.cancelled: list[str] = []
        self.streams: dict[str, RequestStream] = {}

    async def start(self) -> None:
        self.info = EngineInfo("scripted", MAX_MODEL_LEN, VOCAB_SIZE, page_size=64, max_num_seqs=64)
        self.state = "ready"

    async def stop(self) -> None:
        self.state = "stopped"

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        raise NotImplementedError

    def forget_adapter(self, name: str) -> AdapterInfo:
        raise NotImplementedError

    def drop_adapter(self, identity: str) -> None:
        raise NotImplementedError

    async def wait_ready(self) -> EngineInfo:
        assert self.info is not None
        return self.info

    def submit(self, request: GenerationRequest) -> RequestStream:
        if self.state != "ready":
            raise EngineDied("the engine is gone")
        self.requests.append(request)
        stream = RequestStream(request.request_id, self.cancelled.append)
        self.streams[request.request_id] = stream
        self._play(stream, iter(self.script(request)))
        return stream

    def _play(self, stream: RequestStream, news: Iterator[GenerationOutput | EngineError]) -> None:
        """One piece of news a turn of the event loop, so that the reader sees each by itself."""
        output = next(news, None)
        if isinstance(output, EngineError):
            stream.fail(output)
        elif output is not None:
            stream.put(output)
            asyncio.get_running_loop().call_soon(self._play, stream, news)

    def cancel(self, request_id: str) -> None:
        self.streams[request_id].put(GenerationOutput(request_id, finish_reason="cancelled"))


def in_pieces(ids: list[int], size: int, finish: str = "stop") -> Script:
    """A script that says the same to everybody, `size` tokens at a time."""

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
        for piece in pieces[:-1]:
            yield GenerationOutput(request.request_id, piece, num_cached_tokens=3)
        yield GenerationOutput(request.request_id, pieces[-1], finish_reason=finish, num_cached_tokens=3)  # type: ignore[arg-type]

    return script
