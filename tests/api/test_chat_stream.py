"""Chat completions are assembled from tokens, whole and streamed, over a scripted engine."""

import json
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest

from oscine.engine.wire.stream import EngineDied, EngineError, EngineOverloaded
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs
from tests.api.scripted_server import ScriptedServer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def say_thought_and_answer(server: ScriptedServer, answer: str = "It is 4.", **options: Any) -> None:
    t = server.tokenizer
    server.says(
        *(t.channel, "analysis", t.message, "2 + 2", t.end, t.start, "assistant"),
        *(t.channel, "final", t.message, answer, t.return_),
        **options,
    )


def deltas(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [choice["delta"] for event in events for choice in event["choices"]]


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_streams_reasoning_then_content(scripted: ScriptedServer, size: int) -> None:
    say_thought_and_answer(scripted, size=size)
    events = scripted.chat_events()
    first, *middle, last = deltas(events)
    assert first == {"role": "assistant", "content": ""}
    assert last == {}
    kinds = [key for key, _ in groupby(key for delta in middle for key in delta)]
    assert kinds == ["reasoning", "content"]
    assert "".join(d.get("reasoning", "") for d in middle) == "2 + 2"
    assert "".join(d.get("content", "") for d in middle) == "It is 4."
    assert [c["finish_reason"] for e in events for c in e["choices"]] == [None] * (len(events) - 1) + ["stop"]
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1


def test_whole_answer(scripted: ScriptedServer) -> None:
    say_thought_and_answer(scripted)
    answer = scripted.chat()
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "It is 4.", "refusal": None, "reasoning": "2 + 2"}
    assert choice["finish_reason"] == "stop"
    (request,) = scripted.engine.requests
    # A vocabulary of bytes: 8 + 5 bytes of header, 5 of reasoning, and the markers around them.
    tokens = len("analysis" + "2 + 2" + "assistant" + "final" + "It is 4.") + 7
    assert answer["usage"] == {
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": tokens,
        "total_tokens": len(request.prompt_token_ids) + tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"reasoning_tokens": len("2 + 2")},
    }


def test_usage_comes_in_a_chunk_of_its_own(scripted: ScriptedServer) -> None:
    say_thought_and_answer(scripted)
    *events, last = scripted.chat_events(stream_options={"include_usage": True})
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == scripted.chat()["usage"]
    assert "usage" not in scripted.chat_events()[0]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_tool_calls(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message)
    arguments = ['{"a": "\u00e9"}', "{}"]
    scripted.says(
        *(*call, arguments[0], t.end, t.start, "assistant"), *(*call, arguments[1], t.call), size=size, finish="stop"
    )
    (choice,) = scripted.chat(tools=[TOOL])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert [c["function"] for c in choice["message"]["tool_calls"]] == [
        {"name": "add", "arguments": text} for text in arguments
    ]
    events = scripted.chat_events(tools=[TOOL])
    parts = [call for delta in deltas(events) for call in delta.get("tool_calls", [])]
    for index, text in enumerate(arguments):
        begin, *rest = [part for part in parts if part["index"] == index]
        assert begin["type"] == "function"
        assert begin["id"]
        assert begin["function"]["name"] == "add"
        assert all(part.keys() == {"index", "function"} and part["function"].keys() == {"arguments"} for part in rest)
        assert begin["function"]["arguments"] + "".join(part["function"]["arguments"] for part in rest) == text
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_stop_strings_end_the_answer_and_cancel_the_rest(scripted: ScriptedServer, size: int) -> None:
    say_thought_and_answer(scripted, "one 2 + 2 STOP three", size=size)
    answer = scripted.chat(stop=["STOP", "2 + 2 is"])  # the reasoning holds no stop string that counts
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "one 2 + 2 "
    assert choice["message"]["reasoning"] == "2 + 2"
    assert choice["finish_reason"] == "stop"
    text = "analysis" + "2 + 2" + "assistant" + "final" + "one 2 + 2 STOP"
    assert answer["usage"]["completion_tokens"] == len(text) + 6
    events = scripted.chat_events(stop="STOP")
    assert "".join(d.get("content", "") for d in deltas(events)) == "one 2 + 2 "
    assert len(scripted.engine.cancelled) == (2 if size < 1000 else 0)


@pytest.mark.parametrize(("reason", "expected"), [("length", "length"), ("stop", "stop")])
def test_an_answer_cut_in_its_reasoning(scripted: ScriptedServer, reason: str, expected: str) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "analysis", t.message, "thinking", finish=reason)
    (choice,) = scripted.chat()["choices"]
    assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("", "thinking")
    assert choice["finish_reason"] == expected


def test_ignore_eos_counts_what_comes_after_the_end_and_shows_none_of_it(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "final", t.message, "yes", t.return_, "no", size=1, finish="length")
    answer = scripted.chat(ignore_eos=True)
    assert answer["choices"][0]["message"]["content"] == "yes"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == len("final" + "yes" + "no") + 3
    assert scripted.engine.requests[-1].sampling.stop_token_ids == ()


@pytest.mark.parametrize(
    "hidden", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}], ids=["include_reasoning", "exclude"]
)
def test_hidden_reasoning(scripted: ScriptedServer, hidden: dict[str, Any]) -> None:
    say_thought_and_answer(scripted)
    assert "reasoning" not in scripted.chat(**hidden)["choices"][0]["message"]
    assert not any("reasoning" in delta for delta in deltas(scripted.chat_events(**hidden)))
    assert scripted.chat(**hidden)["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("2 + 2")


def test_reasoning_under_both_names(model_folder: Any) -> None:
    with ScriptedServer(model_folder, reasoning_field="both") as server:
        say_thought_and_answer(server)
        message = server.chat()["choices"][0]["message"]
        assert message["reasoning"] == message["reasoning_content"] == "2 + 2"
        said = [d for d in deltas(server.chat_events()) if "reasoning" in d]
        assert said
        assert all(d["reasoning"] == d["reasoning_content"] for d in said)


def with_logprobs(ids: list[int], cut: int) -> list[tuple[list[int], list[TokenLogprobs]]]:
    positions = [TokenLogprobs(i, -0.5, ((i, -0.5), (0x41, float("-inf")))) for i in ids]
    return [(ids[:cut], positions[:cut]), (ids[cut:], positions[cut:])]


def test_logprobs_of_content_tokens_with_their_bytes(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    thought = [t.channel, *b"analysis", t.message, *b"hm", t.end, t.start, *b"assistant"]
    ids = [*thought, t.channel, *b"final", t.message, *"\u00e9!".encode(), t.return_]

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        (first, first_logprobs), (rest, rest_logprobs) = with_logprobs(ids, len(ids) - 3)  # inside of the e acute
        yield GenerationOutput(request.request_id, first, first_logprobs)
        yield GenerationOutput(request.request_id, rest, rest_logprobs, finish_reason="stop")

    scripted.engine.script = script
    (choice,) = scripted.chat(logprobs=True, top_logprobs=2)["choices"]
    entries = choice["logprobs"]["content"]
    assert [entry["bytes"] for entry in entries] == [[0xC3], [0xA9], [0x21]]
    assert entries[2]["top_logprobs"] == [
        {"token": "!", "logprob": -0.5, "bytes": [0x21]},
        {"token": "A", "logprob": -9999.0, "bytes": [0x41]},
    ]
    streamed = scripted.chat_events(logprobs=True, top_logprobs=2)
    found = [c["logprobs"]["content"] for e in streamed for c in e["choices"] if c["logprobs"]]
    assert [entry for entries in found for entry in entries] == entries
    assert scripted.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_n_choices_are_n_requests_with_seeds_in_a_row(scripted: ScriptedServer) -> None:
    say_thought_and_answer(scripted)
    answer = scripted.chat(n=3, seed=11)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [request.sampling.seed for request in scripted.engine.requests] == [11, 12, 13]
    assert answer["usage"]["prompt_tokens"] == len(scripted.engine.requests[0].prompt_token_ids)
    assert answer["usage"]["completion_tokens"] == 3 * scripted.chat()["usage"]["completion_tokens"]
    events = scripted.chat_events(n=3)
    for index in range(3):
        own = [choice for event in events for choice in event["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in own) == "It is 4."
        assert own[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("error", "code"), [(EngineDied("it crashed"), "engine_died"), (EngineOverloaded("too many"), "overloaded")]
)
def test_a_failure_before_the_first_token_is_a_plain_503(
    scripted: ScriptedServer, error: EngineError, code: str
) -> None:
    scripted.engine.script = lambda request: [error]
    for stream in (False, True):
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": stream}
        response = scripted.post("/v1/chat/completions", body)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"]["code"] == code


def test_a_failure_midway_is_an_error_event_and_then_done(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    ids = [t.channel, *b"final", t.message, *b"Hel"]
    scripted.engine.script = lambda r: [GenerationOutput(r.request_id, ids), EngineDied("it crashed")]
    *events, last = scripted.chat_events()
    assert "".join(d.get("content", "") for d in deltas(events)) == "Hel"
    assert last["error"]["code"] == "engine_died"
    assert "it crashed" in last["error"]["message"]


def test_one_failing_choice_ends_the_answer_and_cancels_the_others(scripted: ScriptedServer) -> None:
    def script(request: GenerationRequest) -> list[GenerationOutput | EngineError]:
        first = len(scripted.engine.requests) == 1
        return [EngineDied("it crashed") if first else GenerationOutput(request.request_id, [65])]

    scripted.engine.script = script
    body = {"messages": [{"role": "user", "content": "hi"}], "n": 2}
    assert scripted.post("/v1/chat/completions", body).status_code == 503
    assert scripted.engine.cancelled == [scripted.engine.requests[1].request_id]
    assert scripted.model.admission.sequences == 0


def test_the_conversation_reaches_the_model(scripted: ScriptedServer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Please."}]},
        {"role": "user", "content": "add"},
        {"role": "assistant", "content": None, "reasoning_content": "I must add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "7"},
    ]
    parameters = {"tools": [TOOL, {"type": "web_search"}], "reasoning_effort": "high", "user": "me", "store": False}
    response = scripted.post("/v1/chat/completions", {"messages": messages, **parameters})
    assert response.status_code == 200, response.text
    prompt = scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)
    in_order = [
        *("Current date: 2025-08-05", "Reasoning: high", "Be brief.Please.", "namespace functions", "type add = "),
        *(
            "<|start|>user<|message|>add<|end|>",
            "I must add.",
            "to=functions.add",
            '{"a":1}',
            "functions.add to=assistant",
        ),
        "7<|end|><|start|>assistant",
    ]
    places = [prompt.find(text) for text in in_order]
    assert -1 not in places, prompt
    assert places == sorted(places)
    without = {"messages": messages, **parameters, "tool_choice": "none"}
    scripted.post("/v1/chat/completions", without)
    prompt = scripted.tokenizer.decode(scripted.engine.requests[1].prompt_token_ids)
    assert "namespace functions" not in prompt


def test_a_schema_is_shown_when_no_promise_is_asked_for(scripted: ScriptedServer) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    shown = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    scripted.chat(response_format={**shown, "enforce": False})
    prompt = scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)
    assert "# Response Formats\n\n## count" in prompt
    assert json.dumps(schema, separators=(",", ":")) in prompt
