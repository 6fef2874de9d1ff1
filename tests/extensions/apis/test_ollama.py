"""Ollama's API over a scripted engine: lines of JSON, what a request asks of the engine, errors, keys."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from oscine.api.app import create_app
from oscine.engine.wire.stream import EngineDied, EngineOverloaded
from oscine.types import GenerationOutput, GenerationRequest, ModelSize
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer

QUESTION = [{"role": "user", "content": "hi"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, served_model_names=("fake",)) as server:
        yield server


def chat(server: ScriptedServer, **parameters: Any) -> httpx.Response:
    return server.post("/api/chat", {"model": "fake", "messages": QUESTION, **parameters})


def generate(server: ScriptedServer, **parameters: Any) -> httpx.Response:
    return server.post("/api/generate", {"model": "fake", "prompt": "hi", **parameters})


def records(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    *lines, end = response.text.split("\n")
    assert end == ""
    return [json.loads(line) for line in lines]


def asked(server: ScriptedServer) -> GenerationRequest:
    return server.engine.requests[-1]


def prompt(server: ScriptedServer) -> str:
    return server.tokenizer.decode(asked(server).prompt_token_ids)


def say(server: ScriptedServer, answer: str = "It is 4.", size: int = 3) -> None:
    t = server.tokenizer
    thought = (t.channel, "analysis", t.message, "2 + 2", t.end, t.start, "assistant")
    server.says(*thought, t.channel, "final", t.message, answer, t.return_, size=size)


def say_calls(server: ScriptedServer, *arguments: str, size: int = 3) -> None:
    t = server.tokenizer
    parts: list[str | int] = []
    for text in arguments:
        parts += [t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, text]
        parts += [t.call] if text is arguments[-1] else [t.end, t.start, "assistant"]
    server.says(*parts, size=size)


def test_a_stream_is_the_default_and_has_a_record_per_line(server: ScriptedServer) -> None:
    say(server)
    *parts, last = records(chat(server))
    assert all(part.keys() == {"model", "created_at", "message", "done"} for part in parts)
    assert all((part["model"], part["done"], part["message"]["role"]) == ("fake", False, "assistant") for part in parts)
    assert "".join(part["message"].get("thinking", "") for part in parts) == "2 + 2"
    assert "".join(part["message"]["content"] for part in parts) == "It is 4."
    assert (last["done"], last["done_reason"], last["message"]) == (True, "stop", {"role": "assistant", "content": ""})
    assert last["prompt_eval_count"] == len(asked(server).prompt_token_ids)
    assert all(type(last[name]) is int and last[name] >= 0 for name in DURATIONS)


def test_a_whole_answer_is_one_object(server: ScriptedServer) -> None:
    say(server)
    response = chat(server, stream=False)
    assert response.headers["content-type"] == "application/json"
    answer = response.json()
    assert answer["message"] == {"role": "assistant", "content": "It is 4.", "thinking": "2 + 2"}
    assert (answer["done"], answer["done_reason"]) == (True, "stop")
    assert answer["eval_count"] == len("analysis" + "2 + 2" + "assistant" + "final" + "It is 4.") + 7
    answer = generate(server, stream=False).json()
    assert (answer["response"], answer["thinking"]) == ("It is 4.", "2 + 2")
    assert "message" not in answer


def test_line_separators_within_a_record_are_escaped(server: ScriptedServer) -> None:
    odd = "a\x85b\u2028c\u2029d\x0be\nf"
    say(server, odd, size=1000)

    async def read() -> str:
        transport = httpx.ASGITransport(create_app(server.service))
        async with ollama.AsyncClient("http://localhost", transport=transport) as client:
            parts = await client.chat("fake", QUESTION, stream=True)
            return "".join([part.message.content or "" async for part in parts])

    assert server.run(read()) == odd


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_a_call_comes_whole_with_its_arguments_as_an_object(server: ScriptedServer, size: int) -> None:
    say_calls(server, '{"a": 1}', '{"a": 2', size=size)
    *parts, last = records(chat(server, tools=[ADD]))
    calls = [call for part in parts for call in part["message"].get("tool_calls", ())]
    assert [call["function"] for call in calls] == [
        {"name": "add", "arguments": {"a": 1}, "index": 0},
        {"name": "add", "arguments": {"invalid_json": '{"a": 2'}, "index": 1},
    ]
    assert len({call["id"] for call in calls}) == 2
    assert last["done_reason"] == "stop"
    whole = chat(server, tools=[ADD], stream=False).json()["message"]["tool_calls"]
    assert [call["function"] for call in whole] == [call["function"] for call in calls]


@pytest.mark.parametrize(
    "results",
    [
        [{"content": "3", "tool_name": "add"}, {"content": "5", "tool_name": "sub"}],
        [{"content": "3", "name": "add"}, {"content": "5", "name": "sub"}],
        [{"content": "3"}, {"content": "5"}],
        [{"content": "5", "tool_name": "sub"}, {"content": "3"}],
        [{"content": "5", "tool_call_id": "two"}, {"content": "3", "tool_call_id": "one"}],
    ],
    ids=["tool_name", "name", "order", "the rest", "ids"],
)
def test_a_tool_result_is_matched_to_its_call(server: ScriptedServer, results: list[dict[str, str]]) -> None:
    calls = [
        {"id": "one", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        {"id": "two", "function": {"name": "sub", "arguments": {}}},
    ]
    said = {"role": "assistant", "content": "", "thinking": "I add.", "tool_calls": calls}
    talk = [*QUESTION, said, *({"role": "tool", **result} for result in results)]
    assert chat(server, messages=talk).status_code == 200
    text = prompt(server)
    assert 'to=functions.add <|constrain|>json<|message|>{"a":1,"b":2}<|call|>' in text
    assert "I add." in text
    for name, result in (("add", "3"), ("sub", "5")):
        assert f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}<|end|>" in text


def test_a_result_without_a_call_is_refused(server: ScriptedServer) -> None:
    error = chat(server, messages=[*QUESTION, {"role": "tool", "content": "3"}])
    assert error.status_code == 400
    assert "messages[1]" in error.json()["error"]


@pytest.mark.parametrize(
    ("think", "effort", "shown"),
    [
        (None, "medium", True),
        (True, "medium", True),
        (False, "low", False),
        ("low", "low", True),
        ("max", "high", True),
    ],
)
def test_think_sets_the_effort_and_shows_or_hides_the_reasoning(
    server: ScriptedServer, think: Any, effort: str, shown: bool
) -> None:
    say(server)
    assert ("thinking" in chat(server, think=think, stream=False).json()["message"]) == shown
    assert f"Reasoning: {effort}\n" in prompt(server)
    assert any("thinking" in record for record in records(generate(server, think=think))) == shown
    assert f"Reasoning: {effort}\n" in prompt(server)


def test_options_set_sampling_parameters(server: ScriptedServer) -> None:
    options = {
        **{"num_predict": 9, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 7},
        **{"repeat_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3, "stop": ["."]},
    }
    for ask in (chat, generate):
        say(server, "A. B.")
        answer = ask(server, options=options, stream=False)
        assert "A." not in answer.text
        sampling = asked(server).sampling
        assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (9, 0.5, 4, 0.9)
        assert (sampling.min_p, sampling.seed, sampling.repetition_penalty) == (0.1, 7, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)


@pytest.mark.parametrize("wanted", [MAX_MODEL_LEN - 1, 10**12])
def test_a_limit_beyond_the_context_ends_at_the_context(server: ScriptedServer, wanted: int) -> None:
    """As in Ollama, whose clients ask for more tokens than there is room for."""
    for parameters in ({}, {"raw": True}):
        assert generate(server, options={"num_predict": wanted}, **parameters).status_code == 200
        room = MAX_MODEL_LEN - len(asked(server).prompt_token_ids)
        assert asked(server).sampling.max_tokens == room
    assert chat(server, options={"num_predict": wanted}).status_code == 200
    assert server.post("/v1/completions", {"model": "fake", "prompt": "hi", "max_tokens": wanted}).status_code == 400


def test_ignored_parameters_are_accepted(server: ScriptedServer) -> None:
    ignored = {"num_ctx": 4096, "num_gpu": 99, "mirostat": 2, "repeat_last_n": 64, "unknown": [], "typical_p": 1.0}
    nothing = {"temperature": None, "num_predict": -1, "seed": -1}
    plain: dict[str, Any] = {"options": {"num_predict": 0}}
    for parameters in (plain, {"options": ignored | nothing}, {"keep_alive": -1, "truncate": True, "format": ""}):
        assert chat(server, **parameters).status_code == 200
    kept = {(request.sampling.max_tokens, request.sampling.temperature) for request in server.engine.requests}
    assert kept == {(MAX_MODEL_LEN - len(asked(server).prompt_token_ids), 1.0)}
    defaults = {"suffix": "", "template": "", "system": "", "context": [], "images": [], "raw": False}
    assert generate(server, **defaults).status_code == 200


@pytest.mark.parametrize(
    ("path", "parameters", "named"),
    [
        ("/api/chat", {"messages": [{"role": "user", "content": "", "images": ["AAAA"]}]}, "messages[0].images"),
        ("/api/chat", {"format": "xml"}, "format"),
        ("/api/chat", {"format": {"not": {}}}, "format"),
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p"),
        ("/api/chat", {"options": {"dynatemp_range": 0.5}}, "options.dynatemp_range"),
        ("/api/generate", {"options": {"lora_path": "x"}}, "options.lora_path"),
        ("/api/chat", {"options": {"temperature": "hot"}}, "options.temperature"),
        ("/api/chat", {"think": "very"}, "think"),
        ("/api/chat", {"messages": [{"role": "robot"}]}, "messages[0].role"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a" * 2 * MAX_MODEL_LEN}]}, "messages"),
        ("/api/generate", {"images": ["AAAA"]}, "images"),
        ("/api/generate", {"context": [1, 2]}, "context"),
        ("/api/generate", {"suffix": "end"}, "suffix"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template"),
        ("/api/generate", {"raw": True, "system": "Be brief."}, "system"),
    ],
    ids=str,
)
def test_unsupported_parameters_are_refused_by_name(
    server: ScriptedServer, path: str, parameters: dict[str, Any], named: str
) -> None:
    response = server.post(path, {"model": "fake", "messages": QUESTION, "prompt": "hi", **parameters})
    assert response.status_code == 400
    assert response.json().keys() == {"error"}
    assert f"'{named}'" in response.json()["error"]
    assert not server.engine.requests


def test_a_raw_prompt_has_no_chat_template(server: ScriptedServer) -> None:
    server.says("<", "b", finish="length")
    answer = generate(server, raw=True, prompt="a<|end|>", options={"num_predict": 4}, stream=False).json()
    assert (answer["response"], answer["done_reason"]) == ("<b", "length")
    assert asked(server).prompt_token_ids == server.tokenizer.encode("a<|end|>")
    assert generate(server, raw=True, format={"type": "integer"}).status_code == 200
    assert asked(server).sampling.grammar is not None
    assert asked(server).sampling.max_tokens == MAX_MODEL_LEN - 2


@pytest.mark.parametrize("failure", [EngineDied("it is gone"), EngineOverloaded("too many")])
def test_a_failure_before_and_after_the_first_record(server: ScriptedServer, failure: Any) -> None:
    server.engine.script = lambda request: [failure]
    for stream in (True, False):
        response = chat(server, stream=stream)
        assert response.status_code == 503
        assert response.json().keys() == {"error"}
        assert int(response.headers["retry-after"]) >= 1
    t = server.tokenizer
    begun = [t.channel, *t.encode("final"), t.message, *t.encode("So")]
    server.engine.script = lambda request: [GenerationOutput(request.request_id, begun), failure]
    *parts, last = records(chat(server))
    assert "".join(part["message"]["content"] for part in parts) == "So"
    assert last.keys() == {"error"}


def test_keys_bodies_and_paths_have_errors_in_ollamas_form(model_folder: Path) -> None:
    with ScriptedServer(model_folder, api_keys=("secret",), max_body_bytes=200) as server:
        assert server.get("/api/version").json() == {"version": "0.32.15"}
        for path in ("/api/tags", "/api/ps"):
            refused = server.get(path)
            assert (refused.status_code, refused.json().keys()) == (401, {"error"})
            assert server.get(path, {"Authorization": "Bearer secret"}).status_code == 200
        key = {"Authorization": "Bearer secret"}
        large = server.request("POST", "/api/chat", {"model": "fake", "messages": QUESTION * 20}, key)
        assert (large.status_code, large.json().keys()) == (413, {"error"})
        missing = server.request("POST", "/api/chat", {}, {**key, "Content-Type": "text/plain"})
        assert (missing.status_code, missing.json().keys()) == (400, {"error"})
        unknown = server.get("/api/blobs/sha256:0", key)
        assert (unknown.status_code, unknown.json().keys()) == (404, {"error"})


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_sequence(server: ScriptedServer, stream: bool) -> None:
    server.engine.script = lambda request: [GenerationOutput(request.request_id, [server.tokenizer.channel])]
    body = json.dumps({"model": "fake", "messages": QUESTION, "stream": stream}).encode()
    parts = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if (part := next(parts, None)) is not None:
            return part
        while not server.engine.requests:
            await asyncio.sleep(0.001)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        assert message.get("status", 200) == 200

    scope = {"type": "http", "method": "POST", "path": "/api/chat", "query_string": b""}
    server.run(
        create_app(server.service)({**scope, "headers": [(b"content-type", b"application/json")]}, receive, send)
    )
    assert server.engine.cancelled == [asked(server).request_id]


def test_a_model_that_has_not_started_is_listed_and_not_loaded(model_folder: Path) -> None:
    server = ScriptedServer(model_folder, served_model_names=("fake",))
    try:
        (listed,) = server.get("/api/tags").json()["models"]
        assert listed["name"] == "fake:latest"
        assert server.get("/api/ps").json() == {"models": []}
        assert chat(server).status_code == 503
    finally:
        server.__exit__(None, None, None)


def test_a_published_model_is_described_as_ollama_describes_it(model_folder: Path) -> None:
    with ScriptedServer(model_folder, served_model_names=("openai/gpt-oss-20b",)) as server:
        assert server.engine.info is not None
        size = ModelSize(20_914_757_184, 13_761_264_768, on_gpu=True)
        server.engine.info = replace(server.engine.info, size=size)
        (listed,) = server.get("/api/tags").json()["models"]
        assert (listed["name"], listed["details"]["parameter_size"]) == ("gpt-oss:20b", "20.9B")
        assert len(listed["digest"]) == 64
        (loaded,) = server.get("/api/ps").json()["models"]
        assert loaded["size_vram"] == loaded["size"] == listed["size"] == 13_761_264_768
        for asked_as in ({"model": "gpt-oss:20b"}, {"name": "gpt-oss"}):
            info = server.post("/api/show", asked_as).json()["model_info"]
            assert info["general.architecture"] == "gptoss"
            assert info["general.parameter_count"] == size.num_parameters
            assert info["gptoss.context_length"] == MAX_MODEL_LEN


@pytest.mark.parametrize("rest", [0, 0.0, 0.9])
def test_whole_numbers_of_options_may_be_floats(server: ScriptedServer, rest: float) -> None:
    """What is behind the point is cut, as a conversion in Go does."""
    for ask in (chat, generate):
        options = {"num_predict": 9 + rest, "top_k": 4 + rest, "seed": 7 + rest, "num_ctx": 4096.5, "temperature": 1}
        assert ask(server, options=options).status_code == 200
        sampling = asked(server).sampling
        assert (sampling.max_tokens, sampling.top_k, sampling.seed) == (9, 4, 7)
        assert {type(value) for value in (sampling.max_tokens, sampling.top_k, sampling.seed)} == {int}
        for name in ("num_predict", "top_k", "seed"):
            for wrong in (1e30, "5", True):
                refused = ask(server, options={name: wrong})
                assert refused.status_code == 400
                assert f"'options.{name}'" in refused.json()["error"]


@pytest.mark.parametrize(
    ("option", "given", "meant"),
    [
        ("temperature", 9.5, 9.5),
        ("temperature", -1, 0.0),
        ("top_p", 1.5, 1.0),
        ("min_p", 2, 1.0),
        ("min_p", -0.5, 0.0),
        ("top_k", -5, 0),
        ("repeat_penalty", 0, 1.0),
        ("repeat_penalty", 1e-320, 1.0),
        ("repeat_penalty", 200.0, 200.0),
        ("presence_penalty", 5.0, 5.0),
        ("frequency_penalty", -3.0, -3.0),
        ("num_predict", -0.5, MAX_MODEL_LEN),
    ],
)
def test_bounds_of_options_are_those_of_ollama(server: ScriptedServer, option: str, given: float, meant: float) -> None:
    field = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}.get(option, option)
    for ask in (chat, generate):
        assert ask(server, options={option: given}).status_code == 200
        found = getattr(asked(server).sampling, field)
        assert found == (meant - len(asked(server).prompt_token_ids) if field == "max_tokens" else meant)
        for wrong in (1e30, "hot"):
            refused = ask(server, options={option: wrong})
            assert (refused.status_code, f"'options.{option}'" in refused.json()["error"]) == (400, True)


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/show", "/api/pull"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", ""])
def test_a_body_need_not_be_declared_as_json(server: ScriptedServer, path: str, kind: str) -> None:
    """What curl sends with -d. A page of another origin could send the same, and says where it is from."""
    body = {"model": "fake", "messages": QUESTION, "prompt": "hi", "stream": False}
    assert server.request("POST", path, body, {"Content-Type": kind}).status_code == 200
    own = {"Content-Type": kind, "Origin": "http://localhost"}
    assert server.request("POST", path, body, own).status_code == 200
    foreign = server.request("POST", path, body, {"Content-Type": kind, "Origin": "https://evil.example"})
    assert (foreign.status_code, foreign.json().keys()) == (403, {"error"})
    assert server.request("POST", "/v1/chat/completions", body, {"Content-Type": kind}).status_code == 415


@pytest.mark.parametrize("origin", ["https://behind.proxy.example", "app://notes", "chrome-extension://abc", "null"])
def test_a_body_declared_as_json_may_come_from_any_origin(server: ScriptedServer, origin: str) -> None:
    """A proxy may rename the host, and programs have origins of their own. A browser asks before it sends JSON."""
    headers = {"Content-Type": "application/json", "Origin": origin}
    for path in ("/api/chat", "/api/show", "/v1/chat/completions"):
        body = {"model": "fake", "messages": QUESTION, "stream": False}
        assert server.request("POST", path, body, headers).status_code == 200


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        *((zero, "unload") for zero in (0, 0.0, 0.5, "0", "0s", "0h0m", "-0.0ms", "+0")),
        *((some, "load") for some in (-1, 300, 1.5, "5m", "1h30m", "1.5h", "-1m", ".5s", "100\u00b5s", None)),
    ],
)
def test_a_duration_says_whether_a_model_is_unloaded(server: ScriptedServer, keep_alive: Any, reason: str) -> None:
    for ask in (partial(chat, messages=[]), partial(generate, prompt="")):
        assert ask(server, keep_alive=keep_alive).json()["done_reason"] == reason
    assert chat(server, keep_alive=keep_alive).status_code == 200


@pytest.mark.parametrize(
    "keep_alive", ["abc", "", "5", "5 m", "m", "1h30", "5x", "1" * 100_000, "\u0665m"], ids=lambda text: text[:9]
)
def test_what_is_no_duration_is_refused_in_ollamas_words(server: ScriptedServer, keep_alive: str) -> None:
    for ask in (chat, generate, partial(chat, messages=[])):
        refused = ask(server, keep_alive=keep_alive)
        assert refused.status_code == 400
        assert refused.json()["error"].startswith('time: invalid duration "')
    assert chat(server, keep_alive="abc").json() == {"error": 'time: invalid duration "abc"'}
    assert not server.engine.requests
