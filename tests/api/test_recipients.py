"""Calls reach a client only under names that it declared, in every API, for any output of the model."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
WEATHER = "What is the weather in Paris? Call get_weather."
DECLARED: tuple[tuple[str, ...], ...] = ((), ("tell_time",))


def asks(path: str, *names: str, text: str = "hi", model: str = "") -> dict[str, Any]:
    """A request that declares functions of these names."""
    messages = [{"role": "user", "content": text}]
    tools: list[dict[str, Any]]
    match path:
        case "/v1/responses":
            tools = [{"type": "function", "name": name, "parameters": SCHEMA, "strict": False} for name in names]
            return {"input": text, "tools": tools}
        case "/v1/messages":
            tools = [{"name": name, "input_schema": SCHEMA} for name in names]
            return {"model": model, "max_tokens": 300, "messages": messages, "tools": tools}
        case _:
            tools = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in names]
            return {"messages": messages, "tools": tools}


def called(path: str, answer: dict[str, Any]) -> list[str]:
    match path:
        case "/v1/responses":
            return [item["name"] for item in answer["output"] if item["type"].endswith("_call")]
        case "/v1/messages":
            return [block["name"] for block in answer["content"] if block["type"] == "tool_use"]
        case _:
            return [call["function"]["name"] for call in answer["choices"][0]["message"].get("tool_calls", ())]


def post(server: ScriptedServer, path: str, *names: str, **more: Any) -> dict[str, Any]:
    model = server.get("/v1/models").json()["data"][0]["id"]
    answer = server.post(path, {**asks(path, *names, model=model), **more})
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def says_call(server: ScriptedServer, name: str) -> None:
    t = server.tokenizer
    server.says(t.channel, f"commentary to=functions.{name} ", t.constrain, "json", t.message, '{"a": 1}', t.call)


@pytest.mark.long
@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_name_that_was_not_declared_reaches_no_client(scripted: ScriptedServer, path: str) -> None:
    for name in ("add", "ad", "add_all", "python"):
        says_call(scripted, name)
        for declared in ((), ("other",), ("other", "add")):
            assert called(path, post(scripted, path, *declared)) == [name] * (name in declared)
        says_call(scripted, name)
        choice = {"type": "none"} if path == MESSAGES else "none"
        assert called(path, post(scripted, path, "add", tool_choice=choice)) == []


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_headers_are_held_to_the_names_that_were_declared(scripted: ScriptedServer, path: str) -> None:
    scripted.says(scripted.tokenizer.return_)
    for declared in ((), ("add", "find")):
        post(scripted, path, *declared)
        sampling = scripted.engine.requests[-1].sampling
        assert sampling.grammar is None
        assert sampling.headers is not None
        assert [f"functions.{name}" in sampling.headers for name in ("add", "find")] == [bool(declared)] * 2
        assert ("to=" in sampling.headers) == bool(declared)


def test_an_answer_that_is_no_call_ends_as_one(scripted: ScriptedServer) -> None:
    says_call(scripted, "add")
    (choice,) = post(scripted, CHAT)["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning"] == '{"a": 1}'


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_the_embedded_model_calls_what_it_was_given(nano_server: ServerProcess, path: str) -> None:
    def calls_only(declared: tuple[str, ...], seed: int) -> None:
        asked = {**asks(path, *declared, text=WEATHER, model="oscine-nano"), "temperature": 1.0}
        extra = {} if path == MESSAGES else {"seed": seed}
        answer = httpx.post(f"{nano_server.url}{path}", json={**asked, **extra}, timeout=120)
        assert answer.status_code == 200, answer.text
        assert set(called(path, answer.json())) <= set(declared)

    with ThreadPoolExecutor(8) as clients:  # at once, which costs little more than one alone
        for answered in [clients.submit(calls_only, declared, seed) for declared in DECLARED for seed in range(4)]:
            answered.result()
