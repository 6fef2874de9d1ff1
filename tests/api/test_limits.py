"""Keys, body sizes and the queue, on a server with tight limits."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from starlette.requests import Request
from starlette.types import Message

from oscine.api.common import memory as limits
from oscine.api.common.errors import APIError
from oscine.api.common.memory import Bodies, Held, memory_of
from oscine.api.http.body import read_body
from oscine.api.openai import tokenization
from oscine.api.serving import sampling, schemas
from oscine.api.serving.schemas import ChatCompletionRequest, decode
from oscine.api.turns import conversation
from tests.api.raw_client import LONG_ANSWER, RawClient, chat_body
from tests.api.scripted_server import ScriptedServer
from tests.server import ServerProcess
from tests.waiting import wait_until

KEYS = ("sesame", "s3same-two")
MAX_BODY = 4096
MAX_TOKENS = 2000


@pytest.fixture(scope="module")
def limited(model_folder: Path) -> Iterator[ServerProcess]:
    options = ["--executor", "fake", "--fake-step-s", "0.002", "--log-level", "warning"]
    options += [f"--api-key={key}" for key in KEYS]
    options += ["--max-body-bytes", str(MAX_BODY), "--max-num-seqs", "2", "--max-waiting", "2"]
    options += ["--max-queued-tokens", str(MAX_TOKENS)]
    with ServerProcess(str(model_folder), *options, "--served-model-name", "a-name", "another") as server:
        yield server


def authorized(key: str = KEYS[0]) -> str:
    return f"Authorization: Bearer {key}"


def test_keys(limited: ServerProcess) -> None:
    for key in KEYS:
        with openai.OpenAI(base_url=f"{limited.url}/v1", api_key=key, max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["a-name", "another"]
            answer = client.chat.completions.create(
                model="another", messages=[{"role": "user", "content": "hi"}], max_tokens=1
            )
            assert answer.model == "another"
    for key in ("none", "sesam", "sesamee"):
        with (
            openai.OpenAI(base_url=f"{limited.url}/v1", api_key="x", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError) as caught,
        ):
            client.models.list(extra_headers={"Authorization": f"Bearer {key}"})
        assert caught.value.code == "invalid_api_key"
        assert "The API key is wrong" in caught.value.message


@pytest.mark.parametrize("path", ["/health", "/v1/health/live", "/v1/health/ready", "/version", "/metrics"])
def test_monitoring_needs_no_key(limited: ServerProcess, path: str) -> None:
    assert limited.get(path)


@pytest.mark.parametrize(
    ("header", "said"),
    [
        ("X: y", b"The API key is missing"),
        ("Authorization: sesame", b"The API key is wrong"),
        ("Authorization: Basic sesame", b"The API key is wrong"),
        ("Authorization:", b"The API key is missing"),
        ("Authorization: Bearer s\u00e9same", b"The API key is wrong"),
    ],
)
def test_a_missing_key_is_noticed_before_the_body_is_read(limited: ServerProcess, header: str, said: bytes) -> None:
    with RawClient(limited) as client:
        client.head("Content-Length: 100", header)
        assert client.read_until(said).split()[1] == b"401"


def test_a_key_in_a_trailer_is_none(limited: ServerProcess) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n"
    with RawClient(limited) as client:
        client.socket.sendall(head + b"2\r\n{}\r\n0\r\n" + authorized().encode() + b"\r\n\r\n")
        assert client.status() == 401


def test_a_large_body_is_refused_by_its_announced_length(limited: ServerProcess) -> None:
    with RawClient(limited) as client:
        client.head(f"Content-Length: {MAX_BODY + 1}", authorized())
        assert client.status() == 413


def test_a_large_body_is_refused_in_chunks_too(limited: ServerProcess) -> None:
    with RawClient(limited) as client:
        client.head("Transfer-Encoding: chunked", authorized())
        client.chunk(b" " * MAX_BODY)
        client.chunk(b" ")
        assert client.status() == 413


def test_the_largest_body_is_taken(limited: ServerProcess) -> None:
    with RawClient(limited) as client:
        client.head("Transfer-Encoding: chunked", authorized())
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        client.chunk(body + b" " * (MAX_BODY - len(body)))
        client.socket.sendall(b"0\r\n\r\n")
        assert client.status() == 200


def test_an_integer_of_many_digits_is_refused(limited: ServerProcess) -> None:
    schema = '{"type": "json_schema", "json_schema": {"name": "n", "schema": {"maximum": %s}}}' % ("9" * 641)
    body = '{"messages": [{"role": "user", "content": "hi"}], "response_format": ' + schema + "}"
    headers = {"Authorization": f"Bearer {KEYS[0]}", "Content-Type": "application/json"}
    answer = httpx.post(f"{limited.url}/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema[...]"


def test_a_full_queue_is_a_503_that_says_when_to_come_back(limited: ServerProcess) -> None:
    with RawClient(limited) as first, RawClient(limited) as second, RawClient(limited) as third:
        first.post(LONG_ANSWER | {"n": 2}, authorized())
        limited.wait_running(2)
        second.post(LONG_ANSWER | {"n": 2}, authorized())
        wait_until(lambda: limited.metric("oscine:num_requests_waiting") == 2, "two waiting requests")
        third.post(chat_body(), authorized())
        answer = third.read_until(b"overloaded")
        assert answer.split()[1] == b"503"
        assert b"retry-after: 1\r\n" in answer
    limited.wait_idle()
    with RawClient(limited) as client:
        client.post(chat_body(n=2), authorized())
        assert client.status() == 200


def test_more_sequences_than_could_ever_run_are_a_400(limited: ServerProcess) -> None:
    with RawClient(limited) as client:
        client.post(chat_body(n=5), authorized())
        assert client.status() == 400


def test_the_queue_counts_the_tokens_of_every_sequence(limited: ServerProcess) -> None:
    def text(tokens: int, **parameters: Any) -> dict[str, Any]:
        return {"prompt": [65] * tokens, "max_tokens": 1, **parameters}

    def post(client: RawClient, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        client.head(f"Content-Length: {len(data)}", authorized(), path="/v1/completions")
        client.socket.sendall(data)

    with RawClient(limited) as first, RawClient(limited) as second, RawClient(limited) as third:
        post(first, text(1001, n=2))
        assert b"2002 prompt tokens in its 2 sequences; this server takes 2000 at once" in first.read_until(b"}}")
        post(second, text(1000, max_tokens=20_000, ignore_eos=True))
        limited.wait_running(1)
        post(third, text(1001))
        assert b'"code":"overloaded"' in third.read_until(b"}}")
        post(third, text(1000))
        assert third.status() == 200
    limited.wait_idle()


def test_a_body_that_never_ends_is_a_408() -> None:
    async def receive() -> Message:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def read() -> None:
        request = Request({"type": "http", "method": "POST", "headers": []}, receive)
        await read_body(request, 100, timeout_s=0.01)

    with pytest.raises(APIError) as caught:
        asyncio.run(read())
    assert caught.value.status == 408


def test_bodies_have_a_bound_together(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 2000)
    small, large = b'{"tokens": []}', b'{"tokens": []}' + b" " * 2000
    assert scripted.post("/detokenize", large).status_code == 503
    assert scripted.post("/detokenize", small + b" " * 600).status_code == 200
    assert scripted.post("/detokenize", small + b" " * 600).status_code == 200, "the first was not given back"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/responses", "/api/chat"]
)
def test_a_byte_order_mark_before_a_body_is_skipped(scripted: ScriptedServer, path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 1}
    wanted = {"/v1/responses": {"model", "input"}, "/v1/completions": {"prompt"}}.get(
        path, {"model", "messages", "max_tokens"}
    )
    body = {"model": scripted.model.names[0], **asked}
    mark = b"\xef\xbb\xbf"
    text = json.dumps({name: value for name, value in body.items() if name in wanted}).encode()
    assert scripted.post(path, mark + text).status_code == 200
    assert scripted.post(path, mark + mark + text).status_code == 400, "only one is a mark"


def test_a_text_full_of_marks_takes_no_more_room_than_can_be_decoded(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_VALUES", 100)
    monkeypatch.setattr(limits, "MAX_BODIES_BYTES", 40_000)
    assert scripted.post("/tokenize", {"prompt": "," * 20_000}).status_code == 200


def chat_with(**parameters: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], **parameters}


MANY = {
    "messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 60_000}),
    "tools": ("/v1/chat/completions", chat_with(tools=[{"type": "x"}] * 1025)),
    "stop_token_ids": ("/v1/chat/completions", chat_with(stop_token_ids=[1] * 1025)),
    "guided_choice": ("/v1/chat/completions", chat_with(guided_choice=[str(i) for i in range(8193)])),
    "guided_json": ("/v1/chat/completions", chat_with(guided_json="[" + "[]," * 300_000 + "[]]")),
    "guided_regex": ("/v1/chat/completions", chat_with(guided_regex="a" * 300_000)),
    "guided_grammar": ("/v1/chat/completions", chat_with(guided_grammar="a" * 300_000)),
    "response_format.json_schema.schema": (
        "/v1/chat/completions",
        chat_with(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"b": "c" * 300_000}}}
        ),
    ),
    "unknown": ("/v1/chat/completions", chat_with(unknown=[[]] * 200_000)),
    "prompt": ("/v1/completions", {"prompt": [65] * 300_000}),
    "tokens": ("/detokenize", {"tokens": [65] * 300_000}),
    "input": ("/v1/responses", {"input": [{"role": "user", "content": ""}] * 60_000}),
    "tool_choice.allowed_tools.tools": (
        "/v1/chat/completions",
        chat_with(
            tool_choice={
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"function": {"name": "f"}}] * 1025},
            }
        ),
    ),
    "input of references": ("/v1/responses", {"input": [{"id": str(i)} for i in range(8193)]}),
    "tools[0].tools of a namespace": (
        "/v1/responses",
        {"input": "hi", "tools": [{"type": "namespace", "name": "n", "tools": [{}] * 1025}]},
    ),
    "tools of namespaces": (
        "/v1/responses",
        {
            "input": "hi",
            "tools": [
                {
                    "type": "namespace",
                    "name": name,
                    "tools": [{"type": "function", "name": f"f{i}"} for i in range(600)],
                }
                for name in "ab"
            ],
        },
    ),
    "tool_choice.tools of a response": (
        "/v1/responses",
        {"input": "hi", "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}] * 1025}},
    ),
    "guided_json as text": ("/v1/chat/completions", chat_with(guided_json="{" + " " * (1 << 20) + "}")),
    "tools of a response": ("/v1/responses", {"input": "hi", "tools": [{"type": "x"}] * 1025}),
}


@pytest.mark.needs("apis")
@pytest.mark.long
@pytest.mark.parametrize("name", MANY)
def test_a_request_of_too_many_things_is_refused_by_its_parameter(scripted: ScriptedServer, name: str) -> None:
    answer = scripted.post(*MANY[name])
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == name.partition(" ")[0]
    assert len(answer.text) < 500


@pytest.mark.parametrize("text", ["[{,:" * 100_000, '\\"' * 200_000, '\\",' * 200_000 + "\\\\"])
def test_marks_within_a_text_are_no_values(text: str) -> None:
    memory_of(json.dumps({"prompt": text}).encode())
    memory_of(b'{"prompt": "%s"}' % text.encode())


@pytest.mark.parametrize("text", [b"[" + b'"\\\\",' * 262_144, b'{"":{}}' * 200_000, b'"' * 600_000 + b"," * 300_000])
def test_values_are_counted_behind_texts(text: bytes) -> None:
    with pytest.raises(ValueError, match="more than 262144 JSON values"):
        memory_of(text)


def test_values_of_many_parameters_are_refused_without_looking_at_each() -> None:
    """Only parameters that are long in usual requests are looked for: of unknown ones there may be any number."""
    body = b"{" + b",".join(b'"%d":0' % i for i in range(200_000)) + b"}"
    scope: dict[str, Any] = {"type": "http"}
    with Held(Bodies(), scope), pytest.raises(APIError) as caught:
        asyncio.run(decode(body, ChatCompletionRequest, scope))
    assert (caught.value.status, caught.value.param) == (400, None)


@pytest.mark.needs("apis")
@pytest.mark.long
def test_no_depth_of_nesting_is_a_failure_of_the_server(scripted: ScriptedServer) -> None:
    """Just below the depth that is refused at once, what is made of the body may be deeper still."""
    for opening, closing in (('{"type":"namespace","name":"n","tools":[', "]}"), ('{"a":[', "]}")):
        tools = [
            f'{{"type":"function","name":"f","parameters":{opening * n}{closing * n}}}' for n in range(470, 500, 5)
        ]
        tools += [opening * n + closing * n for n in range(470, 500, 5)]
        statuses = {
            scripted.post("/v1/responses", f'{{"input":"hi","tools":[{tool}]}}'.encode()).status_code for tool in tools
        }
        assert statuses <= {200, 400}


@pytest.mark.long
def test_the_long_conversation_of_an_agent_is_no_flood(scripted: ScriptedServer) -> None:
    text = '{"rows": [1, 2], "code": "if a[0] == {}: return b[1:2, 3]"}\\n' * 12
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": [{"type": "text", "text": text}]} for i in range(2000)
    ]
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "lines": {"type": "array"}}}
    tools = [{"type": "function", "function": {"name": f"f{i}", "parameters": schema}} for i in range(500)]
    answer = scripted.post("/v1/chat/completions", {"messages": messages, "tools": tools, "max_tokens": 1})
    assert answer.json()["error"]["code"] == "context_length_exceeded", "it is read, and only then found too long"


def test_a_prompt_of_a_whole_context_in_token_ids_is_no_flood() -> None:
    memory_of(json.dumps({"prompt": list(range(131_072))}).encode())


@pytest.mark.needs("apis")
@pytest.mark.long
def test_large_requests_are_worked_on_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processed message by message in Python, they would block the loop for seconds."""
    loop_thread, seen = threading.get_ident(), set()
    whole = conversation.chat_messages

    def noted(*given: Any) -> Any:
        seen.add(threading.get_ident() == loop_thread)
        return whole(*given)

    monkeypatch.setattr(conversation, "chat_messages", noted)
    for path in ("/v1/chat/completions", "/tokenize", "/v1/messages", "/v1/messages/count_tokens"):
        body = {
            "messages": [{"role": "user", "content": "hi"}] * 20_000,
            "max_tokens": 1,
            "model": scripted.model.names[0],
        }
        counts = path.endswith("count_tokens")  # of any length; the others do not fit the context
        assert scripted.post(path, body).status_code == (200 if counts else 400)
    assert seen == {False}


def test_many_token_ids_are_checked_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop_thread, seen = threading.get_ident(), []
    whole = sampling.check_ids

    def noted(param: str, ids: Iterable[int], vocab_size: int) -> None:
        seen.append((param, threading.get_ident() == loop_thread))
        whole(param, ids, vocab_size)

    monkeypatch.setattr(sampling, "check_ids", noted)
    monkeypatch.setattr(tokenization, "check_ids", noted)
    for path, param in (("/v1/completions", "prompt"), ("/detokenize", "tokens")):
        answer = scripted.post(path, {param: [-1] * 20_000})
        assert f"'{param}'" in answer.json()["error"]["message"]
    assert seen == [("prompt", False), ("tokens", False)]


def test_large_bodies_are_decoded_one_at_a_time_beside_the_event_loop(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call into C holds the interpreter. Of two at once the loop could wait for both."""
    seen = set()
    whole = schemas.memory_of

    def noted(body: bytes) -> int:
        seen.add(threading.current_thread().name)
        return whole(body)

    monkeypatch.setattr(schemas, "memory_of", noted)
    for path in ("/v1/chat/completions", "/tokenize", "/detokenize", "/v1/responses", "/v1/messages", "/api/chat"):
        scripted.post(path, b"{" + b" " * 20_000 + b"}")
    assert seen == {"bodies_0"}


@pytest.mark.needs("apis")
@pytest.mark.long
def test_the_loop_goes_round_while_a_large_conversation_is_read(scripted: ScriptedServer) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def ask() -> int:
        counting = asyncio.create_task(count())
        body = json.dumps({"input": [{"role": "user", "content": "hi"}] * 20_000})
        answer = await scripted._request("POST", "/v1/responses", body)
        counting.cancel()
        return answer.status_code

    assert scripted.run(ask()) == 400
    assert turns > 20


def test_many_sequences_of_one_request_start_by_and_by(scripted: ScriptedServer) -> None:
    scripted.says("A")
    assert len(scripted.chat(n=100, max_tokens=1)["choices"]) == 100
    answer = scripted.post("/v1/completions", {"prompt": ["a"] * 300, "max_tokens": 1})
    assert [choice["index"] for choice in answer.json()["choices"]] == [*range(300)]


def request(server: ScriptedServer, path: str, **headers: str) -> httpx.Response:
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1})
    method = "GET" if path.startswith(("/v1/h", "/v1/mod", "/metrics")) else "POST"
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.run(server._request(method, path, "" if method == "GET" else body, names))


CHAT = "/v1/chat/completions"


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages", "/v1/completions", "/tokenize", "/detokenize"])
def test_a_body_that_any_web_page_could_send_is_refused(scripted: ScriptedServer, path: str, kind: str) -> None:
    answer = request(scripted, path, Content_Type=kind)
    assert answer.status_code == 415
    assert "application/json" in answer.json()["error"]["message"]
    assert not scripted.engine.requests


@pytest.mark.parametrize(
    "kind", ["application/json", "application/json; charset=utf-8", "Application/JSON ;charset=UTF-8"]
)
def test_json_is_json_whatever_its_parameters(scripted: ScriptedServer, kind: str) -> None:
    assert request(scripted, CHAT, Content_Type=kind).status_code == 200


@pytest.mark.needs("apis")
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"]
)
def test_without_keys_a_name_that_is_not_the_servers_is_refused(scripted: ScriptedServer, host: str) -> None:
    for path in (CHAT, "/v1/models", "/v1/responses"):
        answer = request(scripted, path, Host=host)
        assert answer.status_code == 403
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    for path in ("/v1/health/live", "/metrics"):
        assert request(scripted, path, Host=host).status_code == 200
    assert not scripted.engine.requests


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "app.localhost", "127.0.0.1:1", "192.0.2.1", "[::1]:8000", "[fe80::1]"),
        *(socket.gethostname(), f"{socket.gethostname()}:8000"),
    ],
)
def test_without_keys_addresses_and_own_names_are_served(scripted: ScriptedServer, host: str) -> None:
    assert request(scripted, CHAT, Host=host).status_code == 200


def test_other_names_are_served_where_they_are_allowed_or_a_key_is_asked_for(model_folder: Path) -> None:
    with ScriptedServer(model_folder, allowed_hosts=("api.example", "with.port:8000")) as server:
        assert request(server, CHAT, Host="API.example:8000").status_code == 200
        assert request(server, CHAT, Host="with.port:8000").status_code == 200
        assert request(server, CHAT, Host="evil.example").status_code == 403
    with ScriptedServer(model_folder, allowed_hosts=("*",)) as server:
        assert request(server, CHAT, Host="any.example").status_code == 200
    with ScriptedServer(model_folder, api_keys=("key",)) as server:
        assert request(server, CHAT, Host="any.example", Authorization="Bearer key").status_code == 200
