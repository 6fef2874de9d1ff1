"""Data kept for the requests of one API key does not exist for another key."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer

KEYS = ("mine", "yours")
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}


@pytest.fixture
def server(model_folder: Path) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, api_keys=KEYS) as server:
        yield server


def ask(server: ScriptedServer, key: str, path: str, body: Any = None, method: str = "") -> httpx.Response:
    how = method or ("GET" if body is None else "POST")
    return server.request(how, path, body, {"Authorization": f"Bearer {key}"})


def make(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    made = ask(server, "mine", "/v1/responses", body)
    assert made.status_code == 200, made.text
    return dict(made.json())


def say(server: ScriptedServer, *parts: str | int) -> None:
    t = server.tokenizer
    server.says(*(parts or (t.channel, "final", t.message, "my answer", t.return_)))


def test_another_key_finds_no_response(server: ScriptedServer) -> None:
    say(server)
    made = make(server, input="my secret")
    path = f"/v1/responses/{made['id']}"
    for method, at in (
        *(("GET", path), ("GET", f"{path}?stream=true"), ("GET", f"{path}/input_items")),
        *(("POST", f"{path}/cancel"), ("DELETE", path)),
    ):
        refused = ask(server, "yours", at, method=method)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "response_not_found"), at
    gone_on = ask(server, "yours", "/v1/responses", {"input": "What was it?", "previous_response_id": made["id"]})
    assert (gone_on.status_code, gone_on.json()["error"]["code"]) == (404, "previous_response_not_found")
    assert ask(server, "mine", path).json() == made
    assert make(server, input="And?", previous_response_id=made["id"])["status"] == "completed"
    assert ask(server, "mine", path, method="DELETE").json()["deleted"]


def test_another_key_finds_no_item(server: ScriptedServer) -> None:
    say(server)
    chosen = {"type": "message", "id": "msg_1", "role": "user", "content": "my secret"}
    made = make(server, input=[chosen])
    for item_id in ("msg_1", made["output"][0]["id"]):
        reference = {"type": "item_reference", "id": item_id}
        refused = ask(server, "yours", "/v1/responses", {"input": [reference]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].id")
        assert make(server, input=[reference])["status"] == "completed"
    theirs = ask(server, "yours", "/v1/responses", {"input": [{**chosen, "content": "your own"}]})
    assert theirs.status_code == 200
    make(server, input=[{"type": "item_reference", "id": "msg_1"}])
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "my secret" in prompt
    assert "your own" not in prompt


def test_another_key_does_not_reach_the_background(server: ScriptedServer) -> None:
    server.engine.script = lambda request: ()  # never ends
    made = make(server, input="hi", background=True)
    path = f"/v1/responses/{made['id']}"
    for method, at in (("GET", path), ("GET", f"{path}?stream=true"), ("POST", f"{path}/cancel"), ("DELETE", path)):
        assert ask(server, "yours", at, method=method).status_code == 404
    assert ask(server, "mine", path).json()["status"] == "in_progress"
    assert ask(server, "mine", f"{path}/cancel", method="POST").json()["status"] == "cancelled"


def call(server: ScriptedServer) -> None:
    t = server.tokenizer
    thought = (t.channel, "analysis", t.message, "my thought", t.end, t.start, "assistant")
    say(server, *thought, t.channel, "commentary to=functions.add", t.message, "{}", t.call)


def test_reasoning_comes_back_to_the_key_that_it_was_made_for(server: ScriptedServer) -> None:
    call(server)
    called = make(server, input="hi", tools=[ADD])["output"][-1]
    result = {"type": "function_call_output", "call_id": called["call_id"], "output": "2"}
    asked = {"input": [{"role": "user", "content": "hi"}, called, result], "tools": [ADD], "store": False}
    chat_tool = {"type": "function", "function": {"name": "add"}}
    chat_call = {"id": called["call_id"], "type": "function", "function": {"name": "add", "arguments": "{}"}}
    chat_result = {"role": "tool", "tool_call_id": called["call_id"], "content": "2"}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [chat_call]}, chat_result]
    chat = {"messages": messages, "tools": [chat_tool]}
    for path, body in (("/v1/responses", asked), ("/v1/chat/completions", chat)):
        for key in KEYS:
            assert ask(server, key, path, body).status_code == 200
            prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
            assert ("my thought" in prompt) is (key == "mine")
    counts = [ask(server, key, "/tokenize", chat).json()["count"] for key in KEYS]
    assert counts[0] > counts[1]


def test_what_was_stored_without_a_key_is_nobodys_with_keys(model_folder: Path, tmp_path: Path) -> None:
    database = str(tmp_path / "responses.db")
    with ScriptedServer(model_folder, responses_db=database) as open_to_all:
        say(open_to_all)
        made = open_to_all.post("/v1/responses", {"input": "hi"}).json()
        path = f"/v1/responses/{made['id']}"
        assert open_to_all.get(path).status_code == 200
    with ScriptedServer(model_folder, responses_db=database, api_keys=KEYS) as server:
        assert [ask(server, key, path).status_code for key in KEYS] == [404, 404]
        server.engine.script = in_pieces([server.tokenizer.return_], 1)
        kept = make(server, input="hi")
    with ScriptedServer(model_folder, responses_db=database) as open_to_all:
        assert open_to_all.get(path).status_code == 200
        assert open_to_all.get(f"/v1/responses/{kept['id']}").status_code == 404
