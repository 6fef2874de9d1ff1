"""Counting the tokens of an input, and compacting a conversation so that it continues within the context."""

from typing import Any

import pytest
from openai.types.responses import CompactedResponse, ResponseItemList
from pydantic import TypeAdapter

from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response
from tests.extensions.apis.test_response_input import ADD, prompt, say, say_call

MODEL: dict[str, Any] = {"model": "fake"}
TALK = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "We launch on Tuesday."},
    {"role": "assistant", "content": "Noted."},
    {"role": "user", "content": [{"type": "input_text", "text": "And support"}, {"type": "input_text", "text": "?"}]},
]


@pytest.fixture
def server(scripted: ScriptedServer) -> ScriptedServer:
    MODEL["model"] = scripted.service.names[0]
    return scripted


def post(server: ScriptedServer, what: str, body: dict[str, Any], status: int = 200) -> dict[str, Any]:
    answer = server.post(f"/v1/responses/{what}", body)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def compact(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    compacted = post(server, "compact", {**MODEL, **body})
    *kept, compaction = compacted["output"]
    page = {"object": "list", "data": kept, "first_id": "", "last_id": "", "has_more": False}
    TypeAdapter(ResponseItemList).validate_python(page, strict=True)
    TypeAdapter(CompactedResponse).validate_python({**compacted, "output": [compaction]}, strict=True)
    return compacted


@pytest.mark.parametrize(
    "body",
    [
        {"input": "hi"},
        {"input": TALK, "instructions": "Be brief.", "tools": [ADD], "reasoning": {"effort": "high"}},
        {"input": TALK, "tools": [ADD], "tool_choice": "none", "parallel_tool_calls": False},
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}}},
    ],
)
def test_as_many_tokens_are_counted_as_a_response_reads(server: ScriptedServer, body: dict[str, Any]) -> None:
    counted = post(server, "input_tokens", body)
    say(server, "ok")
    made = server.post("/v1/responses", body).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": made["usage"]["input_tokens"]}
    more = {"previous_response_id": made["id"]}
    without = post(server, "input_tokens", {**more, "input": None})["input_tokens"]
    assert post(server, "input_tokens", {**more, "input": "And?"})["input_tokens"] > without > 0


def test_a_count_of_what_cannot_be_is_refused(server: ScriptedServer) -> None:
    for param, body in (
        ("previous_response_id", {"previous_response_id": "resp_none"}),
        ("conversation", {"conversation": "c"}),
        ("input[0].type", {"input": [{"type": "hologram_call"}]}),
    ):
        answer = server.post("/v1/responses/input_tokens", body)
        assert (answer.status_code // 100, answer.json()["error"]["param"]) == (4, param)


def test_a_conversation_goes_on_from_its_summary(server: ScriptedServer) -> None:
    say(server, "Launch: Tuesday.")
    compacted = compact(server, input=TALK, instructions="Be brief.", tools=[ADD])
    asked = prompt(server)
    for said in ("Be brief.", "Be kind.", "We launch on Tuesday.", "Noted.", "And support?"):
        assert said in asked
    assert server.engine.requests[-1].sampling.max_tokens < 2048
    *kept, compaction = compacted["output"]
    assert [(item["role"], item["content"]) for item in kept] == [
        ("developer", [{"type": "input_text", "text": "Be kind."}]),
        ("user", [{"type": "input_text", "text": "We launch on Tuesday."}]),
        ("user", [{"type": "input_text", "text": "And support?"}]),
    ]
    assert compaction["type"] == "compaction"
    assert compacted["object"] == "response.compaction"
    assert compacted["usage"]["output_tokens"] > 0
    say(server, "ok")
    items = [*compacted["output"], {"role": "user", "content": "Go on."}]
    made = check_response(server.post("/v1/responses", {"input": items}).json())
    behind = prompt(server)
    assert "Launch: Tuesday.<|end|>" in behind
    assert behind.index("And support?") < behind.index("Launch: Tuesday.") < behind.index("Go on.")
    assert "Noted." not in behind
    listed = server.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()
    TypeAdapter(ResponseItemList).validate_python(listed)
    assert listed["data"][:4] == compacted["output"]


def test_what_was_compacted_is_compacted_again(server: ScriptedServer) -> None:
    say(server, "First summary.")
    first = compact(server, input=TALK)
    say(server, "Second summary.")
    second = compact(server, input=[*first["output"], {"role": "user", "content": "More."}])
    assert "First summary." in prompt(server)
    texts = [item["content"][0]["text"] for item in second["output"][:-1]]
    assert texts == ["Be kind.", "We launch on Tuesday.", "And support?", "More."]
    say(server, "ok")
    check_response(server.post("/v1/responses", {"input": second["output"]}).json())
    assert "First summary." not in prompt(server)
    assert "Second summary.<|end|>" in prompt(server)


def test_a_stored_conversation_is_compacted(server: ScriptedServer) -> None:
    say_call(server)
    called = server.post("/v1/responses", {"input": "1 + 1?", "tools": [ADD]}).json()
    result = {"type": "function_call_output", "call_id": called["output"][-1]["call_id"], "output": "two"}
    say(server, "It was added.")
    compacted = compact(server, input=[result], previous_response_id=called["id"])
    assert "<|message|>two<|end|>" in prompt(server)
    kept, _ = compacted["output"]
    assert kept["content"][0]["text"] == "1 + 1?"
    assert server.get(f"/v1/responses/{compacted['id']}").status_code == 404


def test_what_is_kept_of_the_user_is_bounded(server: ScriptedServer) -> None:
    say(server, "Summary.")
    said = [{"role": "user", "content": letter * 250} for letter in "abcd"]
    kept = [item["content"][0]["text"] for item in compact(server, input=said)["output"][:-1]]
    assert kept[1:] == ["b" * 250, "c" * 250, "d" * 250] or len(kept) == 4
    say(server, "Summary.")
    said = [{"role": "user", "content": letter * 450} for letter in "abc"]
    kept = [item["content"][0]["text"] for item in compact(server, input=said)["output"][:-1]]
    assert kept[-2:] == ["b" * 450, "c" * 450]
    assert sum(map(len, kept)) <= 1024 + 60


def test_reasoning_leaves_room_for_the_summary(server: ScriptedServer) -> None:
    t = server.tokenizer
    server.says(t.channel, "analysis", t.message, "x" * 3000, size=50)
    server.post("/v1/responses/compact", {**MODEL, "input": "hi"})
    forced = server.engine.requests[-1]
    assert t.decode(forced.prompt_token_ids).endswith("<|start|>assistant<|channel|>final<|message|>")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("model", {"model": None, "input": "hi"}),
        ("input", {}),
        ("input", {"instructions": "Be brief."}),
        ("input[1].encrypted_content", {"input": [TALK[0], {"type": "compaction", "encrypted_content": "gAAAAAB"}]}),
    ],
)
def test_what_cannot_be_compacted_is_refused(server: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    body = {name: value for name, value in {**MODEL, **body}.items() if value is not None}
    refused = post(server, "compact", body, 400)["error"]
    assert refused["param"] == param
    assert server.engine.requests == []


def test_a_conversation_that_fills_the_context_is_refused(server: ScriptedServer) -> None:
    refused = post(server, "compact", {**MODEL, "input": "x" * 3000}, 400)["error"]
    assert (refused["code"], refused["param"]) == ("context_length_exceeded", "input")


def test_a_model_that_says_nothing_is_an_error(server: ScriptedServer) -> None:
    server.says(server.tokenizer.return_)
    failed = post(server, "compact", {**MODEL, "input": "hi"}, 500)["error"]
    assert failed["code"] == "compaction_failed"
