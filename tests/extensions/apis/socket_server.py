"""The real HTTP server in a thread, over a scripted engine, and clients that speak to it by WebSocket."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

from oscine.api.apis import make_service
from oscine.api.server import Server
from oscine.chat.tokenizer import Tokenizer
from oscine.settings.config import Config, EngineOptions, ModelOptions, SchedulerOptions, ServerOptions
from oscine.types import GenerationOutput, GenerationRequest
from tests.api.scripted_engine import ScriptedEngine, in_pieces

Json = dict[str, Any]
_ENDS = ("response.completed", "response.incomplete", "response.failed", "error")
WAIT_S = 30.0


class SocketServer:
    """Context manager. `engine.script` may be changed between requests."""

    def __init__(
        self, folder: Path, engine: ScriptedEngine | None = None, name: str = "fake", **server_options: Any
    ) -> None:
        self.tokenizer = Tokenizer(folder)
        self.engine = engine or ScriptedEngine(in_pieces([self.tokenizer.return_], 1))
        options = EngineOptions(model=ModelOptions(model=str(folder)), scheduler=SchedulerOptions())
        config = Config(options, ServerOptions(port=0, **{"date": "2025-08-05", **server_options}))
        self.service = make_service(config)
        self.model = self.service.add(self.engine, options, (name,))
        self.server = Server(config, self.service)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self.server.run_service(lambda info: self._ready.set()))

    def __enter__(self) -> "SocketServer":
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        self.url = self.server.url
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.loop.call_soon_threadsafe(self.server.request_stop)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def connect(self, headers: dict[str, str] | None = None, **options: Any) -> "Client":
        address = f"ws{self.url.removeprefix('http')}/v1/responses"
        return Client(connect(address, additional_headers=headers, max_size=None, proxy=None, **options))

    def post(self, path: str, body: Json) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=WAIT_S)

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """What `work` returns on the server's event loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(WAIT_S)

    def saying(self, *texts: str) -> None:
        """One text for each request to the engine, in turn."""
        t, left = self.tokenizer, list(texts)

        def script(request: GenerationRequest) -> list[GenerationOutput]:
            ids = [t.channel, *t.encode("final"), t.message, *t.encode(left.pop(0)), t.return_]
            outputs = [GenerationOutput(request.request_id, [i]) for i in ids[:-1]]
            return [*outputs, GenerationOutput(request.request_id, ids[-1:], finish_reason="stop")]

        self.engine.script = script

    def prompt(self) -> str:
        return self.tokenizer.decode(self.engine.requests[-1].prompt_token_ids)


class Client:
    """Context manager."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def send(self, **event: Any) -> None:
        self.connection.send(json.dumps(event))

    def create(self, **body: Any) -> None:
        self.send(type="response.create", model="fake", **body)

    def event(self) -> Json:
        return dict(json.loads(self.connection.recv(timeout=WAIT_S)))

    def events(self) -> list[Json]:
        """Those of one response, or an error."""
        events = [self.event()]
        while events[-1]["type"] not in _ENDS:
            events.append(self.event())
        return events

    def until(self, kind: str) -> list[Json]:
        events = [self.event()]
        while events[-1]["type"] != kind:
            assert events[-1]["type"] not in _ENDS, events[-1]
            events.append(self.event())
        return events

    def respond(self, **body: Any) -> Json:
        """The response at the end of its events."""
        self.create(**body)
        last = self.events()[-1]
        assert last["type"] == "response.completed", last
        return dict(last["response"])

    def refused(self, **body: Any) -> Json:
        self.create(**body)
        (event,) = self.events()
        assert event["type"] == "error", event
        return event
