"""The real application over a scripted engine, in this process, with a plain HTTP client in front."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from oscine.api.apis import make_service
from oscine.api.app import create_app
from oscine.chat.tokenizer import Tokenizer
from oscine.settings.config import Config, EngineOptions, ModelOptions, SchedulerOptions, ServerOptions
from tests.api.scripted_engine import Script, ScriptedEngine, in_pieces

T = TypeVar("T")
JSON = {"Content-Type": "application/json"}


class ScriptedServer:
    """Context manager. `engine.script` may be changed between requests."""

    def __init__(
        self,
        folder: Path,
        scheduler: SchedulerOptions | None = None,
        engine: ScriptedEngine | None = None,
        **server_options: Any,
    ) -> None:
        self._runner = asyncio.Runner()
        self.tokenizer = Tokenizer(folder)
        self.engine = engine or ScriptedEngine(in_pieces([self.tokenizer.return_], 1))
        options = EngineOptions(model=ModelOptions(model=str(folder)), scheduler=scheduler or SchedulerOptions())
        server = ServerOptions(**{"date": "2025-08-05", **server_options})
        self.service = make_service(Config(options, server))
        self.model = self.service.add(self.engine, options, server.served_model_names)

    def __enter__(self) -> "ScriptedServer":
        self._runner.run(self.service.start())
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self._runner.run(self.service.stop())
        self._runner.close()

    def says(self, *parts: str | int, size: int = 3, finish: str = "stop") -> Script:
        """Makes the engine answer with texts and special ids, `size` tokens at a time."""
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self.tokenizer.encode(part)
        self.engine.script = in_pieces(ids, size, finish)
        return self.engine.script

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the server's event loop."""
        return self._runner.run(work)

    def post(self, path: str, body: Any) -> httpx.Response:
        """`body` is JSON, or bytes as they are."""
        return self._runner.run(self._request("POST", path, body if isinstance(body, bytes) else json.dumps(body)))

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return self._runner.run(self._request("GET", path, b"", headers))

    def request(self, method: str, path: str, body: Any, headers: dict[str, str]) -> httpx.Response:
        """`body` is JSON, or None for none."""
        content = b"" if body is None else json.dumps(body)
        return self._runner.run(self._request(method, path, content, headers))

    def delete(self, path: str) -> httpx.Response:
        return self._runner.run(self._request("DELETE", path, b""))

    async def _request(
        self, method: str, path: str, content: bytes | str, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        transport = httpx.ASGITransport(create_app(self.service), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, path, content=content, headers=JSON | (headers or {}))

    def chat(self, content: str = "hi", **parameters: Any) -> dict[str, Any]:
        """The answer's JSON; fails unless the status is 200."""
        response = self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **parameters})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat_events(self, content: str = "hi", **parameters: Any) -> list[dict[str, Any]]:
        """The JSON of a stream's events, without the [DONE] that must end it."""
        body = {"messages": [{"role": "user", "content": content}], "stream": True, **parameters}
        return events_of(self.post("/v1/chat/completions", body))


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *events, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]
