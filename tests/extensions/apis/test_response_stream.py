"""Responses are assembled from tokens, whole and streamed, over a scripted engine."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.chat.tokenizer import Tokenizer
from oscine.engine.wire.stream import EngineDied, EngineError
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs
from tests.api.scripted_engine import in_pieces
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response, check_stream, parse

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
NOTE = {"type": "custom", "name": "note", "description": "Takes a note."}
CRM = {"type": "namespace", "name": "crm", "description": "Customers", "tools": [{**ADD, "name": "find"}]}
TOOLS = [ADD, NOTE, CRM, {"type": "no_such_type"}]
SIZES = (1, 4, 20)


def ids_of(t: Tokenizer, *parts: str | int) -> list[int]:
    return [token for part in parts for token in ([part] if isinstance(part, int) else t.encode(part))]


def turns(t: Tokenizer) -> dict[str, list[int]]:
    analysis = (t.channel, "analysis", t.message, "2 + 2", t.end, t.start, "assistant")
    final = (t.channel, "final", t.message)
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, '{"a": 1}')
    next_one = (t.end, t.start, "assistant")
    return {
        "an answer": ids_of(t, *analysis, *final, "It is 4.", t.return_),
        "a call": ids_of(t, *analysis, *call, t.call),
        "a preamble and a call": ids_of(
            t, *analysis, t.channel, "commentary", t.message, "I add.", *next_one, *call, t.call
        ),
        "two calls": ids_of(t, *call, *next_one, *call, t.call),
        "two answers": ids_of(t, *final, "One.", *next_one, *final, "Two.", t.return_),
        "a custom call": ids_of(
            t, t.channel, "commentary to=functions.note ", t.constrain, "json", t.message, '{"input": "a\\nb"}', t.call
        ),
        "a custom call without JSON": ids_of(t, t.channel, "commentary to=functions.note", t.message, "a b", t.call),
        "a namespaced call": ids_of(t, t.channel, "commentary to=functions.crm__find", t.message, "{}", t.call),
        "a call without arguments": ids_of(t, t.channel, "commentary to=functions.add", t.message, t.call),
        "a call of nobody's": ids_of(t, t.channel, "commentary to=functions.nothing", t.message, "{}", t.call),
        "tokens behind the end": ids_of(t, *final, "Yes.", t.return_, "No.", t.start, t.call, "x"),
        "doubled markers": ids_of(t, t.channel, t.channel, "final", t.message, t.message, "Yes.", t.end, t.end),
        "bare text": ids_of(t, "Just text.", t.return_),
        "markers as text": ids_of(t, *final, "<|end|><|start|>", t.return_),
        "half a character": [*ids_of(t, *final, "a"), 0xE2, 0x82, t.return_],
        "nothing": [t.return_],
    }


def stream(server: ScriptedServer, **parameters: Any) -> dict[str, Any]:
    """The response at the end of a stream that keeps every rule."""
    response = check_stream(parse(server.post("/v1/responses", {"input": "hi", "stream": True, **parameters}).text))
    assert response is not None
    return response


def whole(server: ScriptedServer, **parameters: Any) -> dict[str, Any]:
    answer = server.post("/v1/responses", {"input": "hi", **parameters})
    assert answer.status_code == 200, answer.text
    return check_response(answer.json())


def without_ids(response: dict[str, Any]) -> list[dict[str, Any]]:
    return [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
def test_streamed_is_whole_for_every_kind_of_turn(scripted: ScriptedServer, size: int) -> None:
    for name, ids in turns(scripted.tokenizer).items():
        scripted.engine.script = in_pieces(ids, size)
        streamed = stream(scripted, tools=TOOLS)
        scripted.engine.script = in_pieces(ids, len(ids))
        sent = whole(scripted, tools=TOOLS)
        assert without_ids(streamed) == without_ids(sent), name
        assert streamed["usage"] == sent["usage"], name
        assert streamed["status"] == sent["status"] == "completed"


def output(server: ScriptedServer, name: str) -> list[dict[str, Any]]:
    server.engine.script = in_pieces(turns(server.tokenizer)[name], 4)
    return without_ids(stream(server, tools=TOOLS))


def test_items_are_what_was_said(scripted: ScriptedServer) -> None:
    reasoning, message = output(scripted, "an answer")
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "2 + 2"}]
    assert reasoning["summary"] == []
    assert message["content"] == [{"type": "output_text", "text": "It is 4.", "annotations": [], "logprobs": []}]
    assert message["phase"] == "final_answer"
    _, preamble, call = output(scripted, "a preamble and a call")
    assert preamble["content"][0]["text"] == "I add."
    assert preamble["phase"] == "commentary"
    assert call == {"type": "function_call", "status": "completed", "name": "add", "arguments": '{"a": 1}'}
    assert [item["content"][0]["text"] for item in output(scripted, "two answers")] == ["One.", "Two."]
    assert [item["type"] for item in output(scripted, "two calls")] == ["function_call"] * 2
    assert output(scripted, "a call without arguments")[0]["arguments"] == ""
    assert output(scripted, "markers as text")[0]["content"][0]["text"] == "<|end|><|start|>"
    assert output(scripted, "half a character")[0]["content"][0]["text"] == "a\ufffd"
    assert output(scripted, "tokens behind the end")[0]["content"][0]["text"] == "Yes."
    assert output(scripted, "nothing") == []


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("asked", [{"summary": "auto"}, {"summary": "detailed"}, {"generate_summary": "concise"}])
def test_reasoning_is_its_own_summary_where_one_is_asked_for(
    scripted: ScriptedServer, size: int, asked: dict[str, str]
) -> None:
    scripted.engine.script = in_pieces(turns(scripted.tokenizer)["an answer"], size)
    streamed = stream(scripted, reasoning=asked)
    assert streamed["output"][0]["summary"] == [{"type": "summary_text", "text": "2 + 2"}]
    assert streamed["output"][0]["content"] == [{"type": "reasoning_text", "text": "2 + 2"}]
    assert without_ids(whole(scripted, reasoning=asked)) == without_ids(streamed)
    assert scripted.get(f"/v1/responses/{streamed['id']}").json() == streamed


def test_a_summary_that_is_cut_is_whole_in_its_events(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "analysis", t.message, "So far", finish="length")
    response = stream(scripted, reasoning={"summary": "auto"})
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["summary"] == [{"type": "summary_text", "text": "So far"}]


def test_tools_of_other_kinds_are_called_by_their_own_names(scripted: ScriptedServer) -> None:
    (custom,) = output(scripted, "a custom call")
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "note", "a\nb")
    assert output(scripted, "a custom call without JSON")[0]["input"] == "a b"
    (found,) = output(scripted, "a namespaced call")
    assert (found["type"], found["namespace"], found["name"]) == ("function_call", "crm", "find")
    assert [item["type"] for item in output(scripted, "a call of nobody's")] == ["reasoning"]
    prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert all(f"type {name} = " in prompt for name in ("add", "note", "crm__find"))
    assert "no_such_type" not in prompt
    assert [tool["type"] for tool in whole(scripted, tools=TOOLS)["tools"]] == ["function", "custom", "namespace"]


@pytest.mark.long
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("name", "kind"), [("an answer", "reasoning"), ("a call", "function_call")])
def test_a_turn_that_is_cut_is_incomplete(scripted: ScriptedServer, size: int, name: str, kind: str) -> None:
    ids = turns(scripted.tokenizer)[name]
    for length in range(1, len(ids)):
        scripted.engine.script = in_pieces(ids[:length], size, "length")
        response = stream(scripted, tools=TOOLS, max_output_tokens=length)
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == length
        assert all(item["status"] == "completed" for item in response["output"][:-1])
    assert response["output"][-1]["status"] == "incomplete"
    assert kind in [item["type"] for item in response["output"]]


SPECIAL = ("start", "end", "message", "channel", "constrain", "return_", "call", "endoftext")
WORDS = (
    "assistant",
    "user",
    "analysis",
    "commentary",
    "final",
    " to=functions.add",
    " to=python",
    "json",
    '{"a":',
    "é ",
)


@pytest.mark.long
@settings(max_examples=60)
@given(
    parts=st.lists(st.sampled_from([*SPECIAL, *WORDS]), min_size=1, max_size=14),
    size=st.sampled_from(SIZES),
    finish=st.sampled_from(["stop", "length"]),
)
def test_every_token_stream_is_a_response(scripted: ScriptedServer, parts: list[str], size: int, finish: str) -> None:
    t = scripted.tokenizer
    ids = ids_of(t, *(getattr(t, part) if part in SPECIAL else part for part in parts))
    scripted.engine.script = in_pieces(ids, size, finish)
    streamed = stream(scripted, tools=TOOLS)
    texts = [part["text"] for item in streamed["output"] for part in item.get("content", ())]
    assert not any("<|" in text for text in texts)
    scripted.engine.script = in_pieces(ids, 1000, finish)
    assert without_ids(whole(scripted, tools=TOOLS)) == without_ids(streamed)


@pytest.mark.parametrize("length", [11, 38], ids=["reasoning", "answer"])
def test_a_failure_in_mid_stream_is_a_failed_response(scripted: ScriptedServer, length: int) -> None:
    ids = turns(scripted.tokenizer)["an answer"]

    def dies(request: GenerationRequest) -> Iterable[GenerationOutput | EngineError]:
        yield GenerationOutput(request.request_id, ids[:length])
        yield EngineDied("gone")

    scripted.engine.script = dies
    response = stream(scripted)
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert "gone" in response["error"]["message"]
    assert [item["status"] for item in response["output"]][-1] == "incomplete"
    stored = scripted.get(f"/v1/responses/{response['id']}").json()
    assert stored == response


def test_a_failure_before_the_first_token_is_a_plain_error(scripted: ScriptedServer) -> None:
    scripted.engine.script = lambda request: [EngineDied("gone")]
    for streamed in (True, False):
        answer = scripted.post("/v1/responses", {"input": "hi", "stream": streamed})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_died"


def test_log_probabilities_are_those_of_the_text(scripted: ScriptedServer) -> None:
    ids = turns(scripted.tokenizer)["an answer"]

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        assert request.sampling.logprobs == 1
        for i, token in enumerate(ids):
            logprobs = [TokenLogprobs(token, -0.5 * i, ((token, -0.5 * i),))]
            finish = "stop" if i == len(ids) - 1 else None
            yield GenerationOutput(request.request_id, [token], logprobs, finish_reason=finish)

    scripted.engine.script = script
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    for response in (stream(scripted, **asked), whole(scripted, **asked)):
        (part,) = response["output"][-1]["content"]
        assert b"".join(bytes(token["bytes"]) for token in part["logprobs"]) == b"It is 4."
        first = ids.index(ord("I"))
        assert part["logprobs"][0]["logprob"] == -0.5 * first
        assert len(part["logprobs"][0]["top_logprobs"]) == 1
    assert response["top_logprobs"] == 1


def test_what_was_asked_is_repeated(scripted: ScriptedServer) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "frequency_penalty": -0.5,
        "max_output_tokens": 99,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "presence_penalty": 1.5,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "store": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "tool_choice": "none",
        "truncation": "auto",
        "user": "u",
    }
    response = whole(scripted, **asked, reasoning={"effort": "low", "summary": "auto"}, service_tier="flex")
    assert {name: response[name] for name in asked} == asked
    assert response["text"]["verbosity"] == "medium"
    assert response["reasoning"] == {"effort": "low", "summary": "auto"}
    assert whole(scripted, reasoning={"generate_summary": "concise"})["reasoning"]["summary"] == "concise"
    assert response["service_tier"] == "default"
    usual = whole(scripted)
    assert usual["presence_penalty"] == usual["frequency_penalty"] == 0.0
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    format = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    assert whole(scripted, text={"format": format})["text"]["format"] == {**format, "description": None}
    request = scripted.engine.requests[-1]
    assert request.sampling.grammar is not None
    assert '{"type":"object","properties":{"x"' in scripted.tokenizer.decode(request.prompt_token_ids)


@pytest.mark.parametrize(
    ("effort", "told"), [("none", "low"), ("minimal", "low"), ("medium", "medium"), ("xhigh", "high"), ("max", "high")]
)
def test_an_effort_is_repeated_as_it_came_and_told_as_the_model_knows_it(
    scripted: ScriptedServer, effort: str, told: str
) -> None:
    response = whole(scripted, reasoning={"effort": effort}, text={"verbosity": "low"})
    assert (response["reasoning"]["effort"], response["text"]["verbosity"]) == (effort, "low")
    assert f"Reasoning: {told}\n" in scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
