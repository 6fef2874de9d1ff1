"""A client does not see the death of an engine in the middle of its answer. The real API, client and engines."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from oscine.api.apis import make_service
from oscine.api.server import Server
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.client.live_request import LiveRequest
from oscine.settings.config import Config, EngineOptions, ServerOptions
from oscine.types import GenerationOutput
from tests.extensions.cluster.local_placer import Fleet

MODEL = "oscine-nano"
TOKENS_BEFORE_DEATH = 12


class ClusterServer:
    """Context manager: a server in a thread of its own, over two engine processes."""

    def __init__(self) -> None:
        self.fleet = Fleet([EngineOptions(quiet=True)] * 2)
        self.engine = ClusterEngine(self.fleet, MODEL, prefix_seed=self.fleet.seed)
        config = Config(server=ServerOptions(port=0, date="2025-08-05"))
        service = make_service(config)
        service.add(self.engine, EngineOptions(), (MODEL,))
        self.server = Server(config, service)
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=self.server.config.get_loop_factory()) as runner:
            self.loop = runner.get_loop()
            runner.run(self._serve())

    async def _serve(self) -> None:
        await self.fleet.start()
        await self.fleet.wait_ready()
        await self.server.run_service(lambda info: self._ready.set())
        await self.fleet.stop()

    def __enter__(self) -> "ClusterServer":
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.server.request_stop)
        self._thread.join(60)

    def wait_ready(self) -> None:
        asyncio.run_coroutine_threadsafe(self.fleet.wait_ready(), self.loop).result(60)


@pytest.fixture(scope="module")
def cluster() -> Iterator[ClusterServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with ClusterServer() as server:
            yield server


@pytest.fixture(scope="module")
def client(cluster: ClusterServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def deadly(cluster: ClusterServer, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As long as a name is in the list, the engine of the next request that has said enough is killed."""
    armed: list[str] = []
    take = LiveRequest.take

    def take_and_kill(live: LiveRequest, output: GenerationOutput) -> None:
        take(live, output)
        if armed and len(live.generated) >= TOKENS_BEFORE_DEATH:
            armed.clear()
            cluster.fleet.kill(cluster.fleet.where[live.request.request_id][-1])

    monkeypatch.setattr(LiveRequest, "take", take_and_kill)
    return armed


def chat_answer(client: openai.OpenAI, body: dict[str, Any]) -> dict[str, Any]:
    """All that a stream says, put together."""
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": {}, "tokens": [], "finish": None}
    options = {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    for chunk in client.chat.completions.create(**{"model": MODEL, **options, **body}):
        if chunk.usage is not None:
            found["usage"] = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            found["content"] += choice.delta.content or ""
            found["reasoning"] += (choice.delta.model_extra or {}).get("reasoning") or ""
            for part in choice.delta.tool_calls or ():
                name, arguments = found["calls"].setdefault(part.index, ("", ""))
                assert part.function is not None
                found["calls"][part.index] = (
                    name + (part.function.name or ""),
                    arguments + (part.function.arguments or ""),
                )
            if choice.logprobs is not None:
                found["tokens"] += [entry.token for entry in choice.logprobs.content or ()]
            found["finish"] = choice.finish_reason or found["finish"]
    return found


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS, "strict": True}}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BODIES: dict[str, dict[str, Any]] = {
    "greedy": {"messages": user("What is 27 + 58?"), "logprobs": True},
    "tool": {"messages": user("What is the weather in Lisbon?"), "tools": [TOOL], "tool_choice": "required"},
    "schema": {
        "messages": user("Anna is 31 years old."),
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BODIES)
def test_the_answer_is_that_of_an_undisturbed_run(
    cluster: ClusterServer, client: openai.OpenAI, deadly: list[str], kind: str
) -> None:
    cluster.wait_ready()
    calm = chat_answer(client, BODIES[kind])
    before, moved = cluster.engine.migrations.migrations, 0
    for _ in range(8):  # on a busy machine an engine may have sent all of its answer before it is killed
        deadly.append(kind)
        assert chat_answer(client, BODIES[kind]) == calm
        moved = cluster.engine.migrations.migrations - before
        if moved:
            break
        cluster.wait_ready()
    assert moved == 1
    if kind == "tool":
        assert [(name, set(json.loads(arguments))) for name, arguments in calm["calls"].values()] == [
            ("get_weather", {"city"})
        ]
    if kind == "schema":
        assert set(json.loads(calm["content"])) == {"name", "age"}


@pytest.mark.long
def test_all_choices_of_a_completion_go_on(cluster: ClusterServer, client: openai.OpenAI, deadly: list[str]) -> None:
    def ask() -> list[str]:
        answer = client.completions.create(model=MODEL, prompt="The", n=3, seed=5, temperature=1.5, max_tokens=30)
        return [choice.text for choice in answer.choices]

    cluster.wait_ready()
    calm = ask()
    deadly.append("completion")
    assert ask() == calm
    assert not deadly
