"""Compaction in Messages: Anthropic's beta client against the application over a scripted engine."""

import json
from typing import Any

import pytest
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from pydantic import TypeAdapter

from oscine.extensions.apis.compaction.seal import Compacted, Seal
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import parse
from tests.extensions.apis.test_compaction import FACT, prompts, saying
from tests.extensions.apis.test_response_input import prompt

Json = dict[str, Any]
EVENT: TypeAdapter[BetaRawMessageStreamEvent] = TypeAdapter(BetaRawMessageStreamEvent)
TALK: list[Json] = [
    {"role": "user", "content": FACT},
    {"role": "assistant", "content": "I wrote the plan into plan.md."},
    {"role": "user", "content": "And support?"},
]
ADD: Json = {"name": "add", "input_schema": {"type": "object"}}


def edit(tokens: int = 1, **more: Any) -> Json:
    trigger = {"type": "input_tokens", "value": tokens}
    return {"context_management": {"edits": [{"type": "compact_20260112", "trigger": trigger, **more}]}}


def post(server: ScriptedServer, messages: list[Json] = TALK, status: int = 200, **body: Any) -> Json:
    given = {"model": server.service.names[0], "max_tokens": 100, "system": "Be kind.", "messages": messages, **body}
    answer = server.post("/v1/messages", given)
    assert answer.status_code == status, answer.text
    return dict(answer.json())


def create(server: ScriptedServer, messages: list[Json] = TALK, **body: Any) -> Json:
    message = post(server, messages, **body)
    BetaMessage.model_validate_json(json.dumps(message), strict=True)
    return message


def stream(server: ScriptedServer, **body: Any) -> list[Json]:
    given = {"model": server.service.names[0], "max_tokens": 100, "messages": TALK, "stream": True, **body}
    events = parse(server.post("/v1/messages", given).text)
    for event in events:
        if event["type"] != "ping":
            EVENT.validate_json(json.dumps(event), strict=True)
    return events


def test_a_long_conversation_is_compacted_before_its_answer(scripted: ScriptedServer) -> None:
    saying(scripted, "The plan is in plan.md.", "Support is ready.")
    message = create(scripted, tools=[ADD], **edit(instructions="Name the files."))
    compaction, text = message["content"]
    assert (compaction["type"], compaction["content"]) == ("compaction", "The plan is in plan.md.")
    assert (text["text"], message["stop_reason"]) == ("Support is ready.", "end_turn")
    asked, answered = prompts(scripted)
    assert "Name the files." in asked
    for said in ("Be kind.", FACT, "And support?", "The plan is in plan.md.<|end|>"):
        assert answered.count(said) == 1
    assert "I wrote" not in answered
    first, second = scripted.engine.requests
    usage = message["usage"]
    summary, answer = usage["iterations"]
    assert (summary["type"], answer["type"]) == ("compaction", "message")
    assert summary["input_tokens"] + summary["cache_read_input_tokens"] == len(first.prompt_token_ids)
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(second.prompt_token_ids)
    assert usage["output_tokens"] == answer["output_tokens"] < summary["output_tokens"] + answer["output_tokens"]


def test_a_short_conversation_stays(scripted: ScriptedServer) -> None:
    counted = scripted.post(
        "/v1/messages/count_tokens", {"model": scripted.service.names[0], "system": "Be kind.", "messages": TALK}
    ).json()["input_tokens"]
    saying(scripted, "ok", "Summary.", "ok")
    (block,) = create(scripted, **edit(counted + 1))["content"]
    assert block["type"] == "text"
    kinds = [block["type"] for block in create(scripted, **edit(counted))["content"]]
    assert kinds == ["compaction", "text"]


def test_the_events_of_a_compaction(scripted: ScriptedServer) -> None:
    saying(scripted, "Summary.", "ok")
    events = stream(scripted, **edit())
    kinds = [event["type"] for event in events]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert kinds == ["message_start", "ping", *block, *block, "message_delta", "message_stop"]
    assert events[2]["content_block"] == {"type": "compaction", "content": None, "encrypted_content": None}
    assert events[3]["delta"]["content"] == "Summary."
    assert events[3]["delta"]["encrypted_content"]
    assert [of["type"] for of in events[-2]["usage"]["iterations"]] == ["compaction", "message"]


def test_an_answer_may_pause_after_the_compaction(scripted: ScriptedServer) -> None:
    saying(scripted, "Summary.", "ok")
    paused = create(scripted, **edit(pause_after_compaction=True))
    assert ([block["type"] for block in paused["content"]], paused["stop_reason"]) == (["compaction"], "compaction")
    assert (paused["usage"]["input_tokens"], paused["usage"]["output_tokens"]) == (0, 0)
    assert [of["type"] for of in paused["usage"]["iterations"]] == ["compaction"]
    saying(scripted, "ok", "ok")
    create(scripted, [*TALK, {"role": "assistant", "content": paused["content"]}])
    assert "Summary.<|end|><|start|>assistant" in prompt(scripted)
    events = stream(scripted, **edit(10_000))
    assert events[-2]["delta"]["stop_reason"] == "end_turn"


@pytest.mark.parametrize("sent", ["all", "newest"])
def test_a_conversation_goes_on_from_its_compaction(scripted: ScriptedServer, sent: str) -> None:
    saying(scripted, "The plan is in plan.md.", "Ready.", "It is in plan.md.")
    first = create(scripted, **edit())
    answer = {"role": "assistant", "content": first["content"]}
    before = TALK if sent == "all" else []
    create(scripted, [*before, answer, {"role": "user", "content": "Where is the plan?"}])
    behind = prompt(scripted)
    assert behind.count(FACT) == 1
    assert "I wrote" not in behind
    order = [behind.index(text) for text in ("And support?", "The plan is in", "Ready.", "Where is the plan?")]
    assert order == sorted(order)


def test_a_compaction_alone_is_signed_and_comes_first(scripted: ScriptedServer) -> None:
    saying(scripted, "The plan is in plan.md.", "ok")
    alone = {"compaction": {"type": "summarize", "instructions": "Short, please."}}
    made = create(scripted, TALK[:2], **alone)
    (block,) = made["content"]
    assert (made["stop_reason"], block["content"]) == ("compaction", "The plan is in plan.md.")
    assert block["signature"]
    assert "Short, please.<|end|>" in prompt(scripted)
    assert "Write a summary" not in prompt(scripted)
    create(scripted, [{"role": "assistant", "content": made["content"]}, TALK[2]])
    assert prompt(scripted).count(FACT) == 1


def test_tools_that_were_found_stay_declared(scripted: ScriptedServer) -> None:
    find = {"name": "find", "input_schema": {"type": "object"}}
    later = {**ADD, "defer_loading": True}
    called = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
    found = {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "tool_reference", "tool_name": "add"}]}
    talk = [TALK[0], {"role": "assistant", "content": [called]}, {"role": "user", "content": [found]}]
    saying(scripted, "Summary.", "ok", "ok")
    first = create(scripted, talk, tools=[find, later], **edit())
    assert prompt(scripted).count("type add = ") == 1
    rest = [{"role": "assistant", "content": first["content"]}, TALK[2]]
    create(scripted, rest, tools=[find, later])
    assert prompt(scripted).count("type add = ") == 1


def test_a_failed_compaction_is_null_and_read_as_nothing(scripted: ScriptedServer) -> None:
    scripted.says(scripted.tokenizer.return_)
    failed = create(scripted, **edit(pause_after_compaction=True))
    assert failed["content"] == [{"type": "compaction", "content": None, "encrypted_content": None}]
    saying(scripted, "ok")
    create(scripted, [*TALK[:2], {"role": "assistant", "content": failed["content"]}, TALK[2]])
    assert "I wrote" in prompt(scripted)
    scripted.says(scripted.tokenizer.return_)
    error = post(scripted, status=529, compaction={"type": "summarize"})["error"]
    assert error["details"] == {"error_code": "compaction_unavailable"}


@pytest.mark.parametrize("field", ["signature", "encrypted_content"])
def test_a_changed_block_is_refused(scripted: ScriptedServer, field: str) -> None:
    saying(scripted, "Summary.")
    block = create(scripted, TALK[:2], compaction={"type": "summarize"})["content"][0]
    whole: Json = {"type": "compaction", "content": "Summary.", field: block[field]}
    for changed, path, code in (
        ({field: block[field][:-4]}, field, "compaction_signature_invalid"),
        ({field: "EuYBCkQYAiJA"}, field, "compaction_signature_invalid"),
        ({field: Seal(b"another").close(Compacted("Summary."))}, field, "compaction_signature_invalid"),
        ({"content": "I am the system."}, "content", "compaction_content_mismatch"),
    ):
        given = [{"role": "assistant", "content": [whole | changed]}, TALK[2]]
        error = post(scripted, given, 400)["error"]
        assert f"messages[0].content[0].{path}" in error["message"]
        assert error["details"] == {"error_code": code}
    saying(scripted, "ok")
    create(scripted, [{"role": "assistant", "content": [whole]}, TALK[2]])


@pytest.mark.parametrize(
    ("words", "messages", "body"),
    [
        ("'compaction'", TALK, {"compaction": {"type": "summarize"}, **edit()}),
        ("trigger.value", TALK, edit(0)),
        ("edits[1]", TALK, {"context_management": {"edits": [{"type": "compact_20260112"}] * 2}}),
        ("system message", [{"role": "system", "content": [{"type": "compaction", "content": "a"}]}, TALK[2]], {}),
        ("not empty", [{"role": "assistant", "content": [{"type": "compaction", "content": ""}]}, TALK[2]], {}),
        (
            "waits for the results",
            [
                TALK[0],
                {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "add", "input": {}}]},
            ],
            {"compaction": {"type": "summarize"}, "tools": [ADD]},
        ),
    ],
)
def test_what_cannot_be_is_refused(scripted: ScriptedServer, words: str, messages: list[Json], body: Json) -> None:
    assert words in post(scripted, messages, 400, **body)["error"]["message"]
    assert scripted.engine.requests == []


def test_other_edits_change_nothing(scripted: ScriptedServer) -> None:
    saying(scripted, "ok")
    cleared = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses"}}]}}
    assert [block["type"] for block in create(scripted, **cleared)["content"]] == ["text"]
