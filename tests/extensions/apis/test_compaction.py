"""Compaction within a response, and the items that stand for a compacted conversation."""

import json
from collections.abc import Iterable
from typing import Any, cast

import openai
import pytest

from oscine.extensions.apis.compaction.seal import Compacted, Seal
from oscine.types import GenerationOutput, GenerationRequest
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response, check_stream, parse
from tests.extensions.apis.test_response_input import ADD, prompt
from tests.server import ServerProcess

Json = dict[str, Any]
FACT = "We launch on Tuesday."
TALK: list[Json] = [
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": FACT},
    {"role": "assistant", "content": "I wrote the plan into plan.md."},
    {"role": "user", "content": "And support?"},
]
AT_ONCE: list[Json] = [{"type": "compaction", "compact_threshold": 1}]
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}},
    "required": ["name"],
    "additionalProperties": False,
}
NONE: Json = {"compact_threshold": 0}
TRIGGER: Json = {"type": "compaction_trigger"}


def saying(server: ScriptedServer, *texts: str) -> None:
    """One text for each request to the engine, in turn."""
    t, left = server.tokenizer, list(texts)

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        ids = [t.channel, *t.encode("final"), t.message, *t.encode(left.pop(0)), t.return_]
        yield GenerationOutput(request.request_id, ids[:5])
        yield GenerationOutput(request.request_id, ids[5:], finish_reason="stop")

    server.engine.script = script


def create(server: ScriptedServer, **body: Any) -> Json:
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    return check_response(answer.json())


def streamed(server: ScriptedServer, **body: Any) -> tuple[list[Json], Json]:
    answer = server.post("/v1/responses", {**body, "stream": True})
    assert answer.status_code == 200, answer.text
    events = parse(answer.text)
    response = check_stream(events)
    assert response is not None
    return events, response


def prompts(server: ScriptedServer) -> list[str]:
    return [server.tokenizer.decode(request.prompt_token_ids) for request in server.engine.requests]


def test_a_long_conversation_is_compacted_before_its_answer(scripted: ScriptedServer) -> None:
    saying(scripted, "The plan is in plan.md.", "Support is ready.")
    events, response = streamed(scripted, input=TALK, tools=[ADD], context_management=AT_ONCE)
    assert [item["type"] for item in response["output"]] == ["compaction", "message"]
    assert response["output"][1]["content"][0]["text"] == "Support is ready."
    kinds = [event["type"] for event in events]
    assert kinds[2:4] == ["response.output_item.added", "response.compaction.compacting"]
    asked, answered = prompts(scripted)
    assert "plan.md" in asked
    for said in ("Be kind.", FACT, "And support?", "The plan is in plan.md.<|end|>"):
        assert said in answered
    assert "I wrote" not in answered
    assert answered.index("And support?") < answered.index("The plan is")
    read = sum(len(request.prompt_token_ids) for request in scripted.engine.requests)
    assert response["usage"]["input_tokens"] == read


def test_the_summary_continues_the_prompt_of_the_conversation(scripted: ScriptedServer) -> None:
    saying(scripted, "ok", "Summary.", "ok")
    create(scripted, input=TALK, tools=[ADD])
    create(scripted, input=TALK, tools=[ADD], context_management=AT_ONCE)
    whole, asked, _ = (request.prompt_token_ids for request in scripted.engine.requests)
    ending = scripted.tokenizer.encode("assistant")
    shared = whole[: -len(ending) - 1]
    assert asked[: len(shared)] == shared


def test_a_short_conversation_stays(scripted: ScriptedServer) -> None:
    saying(scripted, "ok")
    counted = scripted.post("/v1/responses/input_tokens", {"input": TALK}).json()["input_tokens"]
    beyond = [{"type": "compaction", "compact_threshold": counted + 1}]
    assert [item["type"] for item in create(scripted, input=TALK, context_management=beyond)["output"]] == ["message"]
    saying(scripted, "Summary.", "ok")
    at = [{"type": "compaction", "compact_threshold": counted}]
    output = create(scripted, input=TALK, context_management=at)["output"]
    assert [item["type"] for item in output] == ["compaction", "message"]


def test_without_a_threshold_most_of_the_context_is_used(scripted: ScriptedServer) -> None:
    saying(scripted, "Summary.", "ok")
    long = [{"role": "user", "content": "x" * 1000}, {"role": "assistant", "content": "y" * 350}]
    output = create(scripted, input=[*long, TALK[1]], context_management=[{"type": "compaction"}])["output"]
    assert [item["type"] for item in output] == ["compaction", "message"]


def test_a_trigger_is_answered_with_the_compacted_conversation_alone(scripted: ScriptedServer) -> None:
    saying(scripted, "The plan is in plan.md.")
    events, response = streamed(scripted, input=[*TALK, TRIGGER], tools=[ADD])
    (item,) = response["output"]
    assert item["type"] == "compaction"
    assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.completed"]
    assert "plan.md" not in json.dumps(events)  # the item is opaque
    listed = scripted.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    assert {of["type"] for of in listed} == {"message"}


@pytest.mark.parametrize("way", ["chain", "all items", "newest items"])
def test_a_conversation_goes_on_from_its_compaction(scripted: ScriptedServer, way: str) -> None:
    saying(scripted, "The plan is in plan.md.", "It is in plan.md.")
    first = create(scripted, input=[*TALK, TRIGGER])
    asked = {"role": "user", "content": "Where is the plan?"}
    before = TALK if way == "all items" else []
    body: Json = {"input": [*before, *first["output"], asked]}
    if way == "chain":
        body = {"input": [asked], "previous_response_id": first["id"]}
    create(scripted, **body)
    behind = prompt(scripted)
    assert behind.count(FACT) == 1
    assert "I wrote" not in behind
    assert behind.index("And support?") < behind.index("The plan is in plan.md.") < behind.index("Where is the plan?")


def test_a_conversation_of_the_store_is_compacted(scripted: ScriptedServer) -> None:
    conversation = scripted.post("/v1/conversations", {"items": TALK[:3]}).json()["id"]
    saying(scripted, "The plan is in plan.md.", "Ready.", "Fine.")
    first = create(scripted, input="And support?", conversation=conversation, context_management=AT_ONCE)
    assert [item["type"] for item in first["output"]] == ["compaction", "message"]
    create(scripted, input="More?", conversation=conversation)
    behind = prompt(scripted)
    assert "I wrote" not in behind
    assert behind.index("plan.md") < behind.index("Ready.") < behind.index("More?")
    items = scripted.get(f"/v1/conversations/{conversation}/items?order=asc").json()["data"]
    assert [item["type"] for item in items] == [*["message"] * 4, "compaction", *["message"] * 3]


def test_a_second_compaction_replaces_the_first(scripted: ScriptedServer) -> None:
    saying(scripted, "First summary.", "One.", "Second summary.", "Two.")
    first = create(scripted, input=TALK, context_management=AT_ONCE)
    more = {"role": "user", "content": "More."}
    create(scripted, input=[*TALK, *first["output"], more], context_management=AT_ONCE)
    behind = prompt(scripted)
    assert "First summary." not in behind
    assert "First summary." in prompts(scripted)[-2]
    assert "Second summary.<|end|>" in behind
    assert behind.count(FACT) == 1


def test_tools_that_were_found_stay_declared(scripted: ScriptedServer) -> None:
    search = {"type": "tool_search", "execution": "client", "parameters": {"type": "object"}}
    found = [
        {"type": "tool_search_call", "call_id": "c", "execution": "client", "arguments": {}, "status": "completed"},
        {"type": "tool_search_output", "call_id": "c", "execution": "client", "tools": [ADD], "status": "completed"},
    ]
    saying(scripted, "Summary.", "ok", "ok")
    first = create(scripted, input=[*TALK, *found], tools=[search], context_management=AT_ONCE)
    assert prompt(scripted).count("type add = ") == 1
    create(scripted, input="And?", tools=[search], previous_response_id=first["id"])
    assert prompt(scripted).count("type add = ") == 1


def test_an_empty_summary_fails_the_response(scripted: ScriptedServer) -> None:
    scripted.says(scripted.tokenizer.return_)
    failed = scripted.post("/v1/responses", {"input": [*TALK, TRIGGER]})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "compaction_failed")
    answer = scripted.post("/v1/responses", {"input": [*TALK, TRIGGER], "stream": True})
    events = parse(answer.text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "The model wrote no summary."
    assert events[-1]["response"]["output"] == []


def sealed(server: ScriptedServer) -> str:
    saying(server, "Summary.")
    (item,) = create(server, input=[*TALK, TRIGGER], store=False)["output"]
    return str(item["encrypted_content"])


def changed(text: str) -> Iterable[str]:
    """Other texts: each part damaged, cut, and what other servers write."""
    yield from ("", "gAAAAAB", text[:-4], text + "AAAA", text.swapcase(), text.replace(":", ":AAAA"))
    middle = len(text) // 2
    yield text[:middle] + ("B" if text[middle] == "A" else "A") + text[middle + 1 :]
    yield Seal(b"of another server").close(Compacted("Summary."))


def test_a_changed_item_is_refused(scripted: ScriptedServer) -> None:
    content = sealed(scripted)
    for other in changed(content):
        item = {"type": "compaction", "encrypted_content": other}
        refused = scripted.post("/v1/responses", {"input": [TALK[1], item]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[1].encrypted_content")
        assert "changed, or written by another server" in refused.json()["error"]["message"]
    saying(scripted, "ok")
    create(scripted, input=[{"type": "compaction", "encrypted_content": content}, TALK[1]])


def test_the_embedded_model_goes_on_from_its_own_summary(nano_server: ServerProcess) -> None:
    talk = [{"role": "user", "content": "My name is Alice."}, {"role": "assistant", "content": "Hello."}, TALK[3]]
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        first = client.responses.create(
            model="oscine-nano", input=cast(Any, talk), context_management=cast(Any, AT_ONCE), temperature=0
        )
        assert first.output[0].type == "compaction"
        form: Any = {"type": "json_schema", "name": "person", "schema": PERSON, "strict": True}
        asked = client.responses.create(
            model="oscine-nano",
            input=[*cast(Any, first.output), {"role": "user", "content": "Extract my name as JSON."}],
            text={"format": form},
            temperature=0,
        )
    assert json.loads(asked.output_text) == {"name": "Alice"}


def test_an_item_outlives_its_server(model_folder: Any, tmp_path: Any) -> None:
    options: Json = {"responses_db": str(tmp_path / "responses.db")}
    with ScriptedServer(model_folder, **options) as first:
        content = sealed(first)
    item = {"type": "compaction", "encrypted_content": content}
    with ScriptedServer(model_folder, **options) as second:
        saying(second, "ok")
        create(second, input=[item, TALK[1]])
    with ScriptedServer(model_folder) as other:
        assert other.post("/v1/responses", {"input": [item, TALK[1]]}).status_code == 400


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input[0].type", {"input": [TRIGGER, TALK[1]]}),
        ("input", {"input": [{"role": "user", "content": "x" * 3000}, TRIGGER]}),
        ("context_management[0].type", {"input": TALK, "context_management": [{"type": "clear"}]}),
        (
            "context_management[0].compact_threshold",
            {"input": TALK, "context_management": [{**AT_ONCE[0], "compact_threshold": 0}]},
        ),
    ],
)
def test_what_cannot_be_compacted_is_refused(scripted: ScriptedServer, param: str, body: Json) -> None:
    refused = scripted.post("/v1/responses", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert scripted.engine.requests == []


def test_a_conversation_is_no_parameter_of_compact(scripted: ScriptedServer) -> None:
    body = {"model": scripted.service.names[0], "input": TALK, "conversation": "conv_1"}
    refused = scripted.post("/v1/responses/compact", body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "conversation")
    assert "previous_response_id" in refused.json()["error"]["message"]
