"""Conventions of chat completions, and known failures of other servers: each by name, at several stream intervals."""

import datetime
import json
import re
from collections.abc import Iterable
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.api.serving import service
from oscine.chat.tokenizer import SPECIAL_TOKENS
from oscine.types import GenerationOutput, GenerationRequest, TokenLogprobs
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer
from tests.api.test_chat_stream import deltas

SIZES = [1, 4, 20, 1000]  # tokens at a time
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def joined(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of choice 0 make, as a client would put it together."""
    message: dict[str, Any] = {"role": None, "content": "", "reasoning": "", "tool_calls": []}
    for delta in deltas(events):
        message["role"] = message["role"] or delta.get("role")
        message["content"] += delta.get("content", "")
        message["reasoning"] += delta.get("reasoning", "")
        for call in delta.get("tool_calls", ()):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"]
                assert call["type"] == "function"
                message["tool_calls"].append([call["function"]["name"], call["function"]["arguments"]])
            else:
                assert call["index"] == len(message["tool_calls"]) - 1
                assert call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"}
                message["tool_calls"][-1][1] += call["function"]["arguments"]
    return message


def whole(answer: dict[str, Any]) -> dict[str, Any]:
    """The same of an answer that came whole."""
    message = answer["choices"][0]["message"]
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())]
    fields = {"content": message["content"] or "", "reasoning": message["reasoning"] or "", "tool_calls": calls}
    return {"role": message["role"], **fields}


def both_ways(server: ScriptedServer, **parameters: Any) -> tuple[dict[str, Any], str]:
    """The message and its finish_reason, which must be the same streamed and whole."""
    answer = server.chat(**parameters)
    events = server.chat_events(**parameters)
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
    assert reasons[:-1] == [None] * (len(reasons) - 1)
    assert joined(events) == whole(answer)
    assert reasons[-1] == answer["choices"][0]["finish_reason"]
    return whole(answer), reasons[-1]


@pytest.mark.parametrize("size", SIZES)
def test_1_malformed_output_becomes_reasoning_content_or_calls(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, "{}", t.call)
    analysis = (t.channel, "analysis", t.message, "hm", t.end, t.start, "assistant")
    final = (t.channel, "final", t.message)
    cases: list[tuple[tuple[str | int, ...], tuple[str, str, list[list[str]]]]] = [
        ((*analysis, *call, "and so on", t.start, "assistant", *call), ("", "hm", [["add", "{}"]])),  # past the call
        ((*analysis, *final, t.message, "yes", t.end, t.end, t.return_), ("yes", "hm", [])),  # doubled markers
        ((t.channel, "analysis", t.message, "hm", t.end, *final, "yes", t.return_), ("yes", "hm", [])),  # no start
        (("just text", t.return_), ("just text", "", [])),
        ((*analysis, t.channel, "fin"), ("", "hm", [])),  # a header that was cut
        ((t.start, "assistant", *final, "yes"), ("yes", "", [])),
        ((*final, "a", t.constrain, "b", t.channel, "final", t.message, "c", t.return_), ("ab\n\nc", "", [])),
    ]
    for said, (content, reasoning, calls) in cases:
        scripted.says(*said, size=size)
        message, _ = both_ways(scripted, tools=[TOOL])
        assert (message["content"], message["reasoning"], message["tool_calls"]) == (content, reasoning, calls)


@pytest.mark.long
@settings(max_examples=60)
@given(st.data())
def test_1_no_output_raises_and_no_special_token_leaks(scripted: ScriptedServer, data: st.DataObject) -> None:
    t = scripted.tokenizer
    markers = [getattr(t, name) for name in SPECIAL_TOKENS]
    words = ("analysis", "final", "assistant", " to=functions.add", "json", "{}", "user", "\u00e9", "x")
    piece = st.sampled_from(markers).map(lambda i: [i]) | st.sampled_from(words).map(t.encode)
    pieces = data.draw(st.lists(piece | st.integers(0, 319).map(lambda i: [i]), max_size=30))
    size = data.draw(st.sampled_from(SIZES))
    scripted.says(*[i for ids in pieces for i in ids], t.return_, size=size)
    message, _ = both_ways(scripted, tools=[TOOL])
    text = json.dumps(message, ensure_ascii=False)
    assert not re.search(r"<\|(start|end|message|channel|constrain|return|call|endoftext)\|>", text)


@pytest.mark.parametrize("size", SIZES)
def test_2_with_ignore_eos_the_first_terminator_ends_what_is_shown(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "final", t.message, "yes", t.return_, "no", t.call, "no", size=size, finish="length")
    message, reason = both_ways(scripted, ignore_eos=True)
    assert (message["content"], reason) == ("yes", "length")


@pytest.mark.parametrize("size", [*SIZES, 7, 33])
def test_3_several_tokens_at_once_are_told_apart(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message)
    scripted.says(
        *(t.channel, "analysis", t.message, "think", t.end, t.start, "assistant"),
        *(t.channel, "commentary", t.message, "I will add.", t.end, t.start, "assistant"),
        *(*call, '{"a": "<|call|>"}', t.end, t.start, "assistant"),
        *(t.channel, "analysis", t.message, "more", t.end, t.start, "assistant"),
        *(*call, '{"b":2}', t.call),
        size=size,
    )
    message, reason = both_ways(scripted, tools=[TOOL])
    assert message == {
        "role": "assistant",
        "content": "I will add.",
        "reasoning": "think\n\nmore",
        "tool_calls": [["add", '{"a": "<|call|>"}'], ["add", '{"b":2}']],
    }
    assert reason == "tool_calls"


def test_6_schemas_are_rendered_without_loss(scripted: ScriptedServer) -> None:
    parameters = {
        "type": "object",
        "$defs": {"unit": {"type": "string", "enum": ["m", "ft"]}},
        "properties": {
            "unit": {"$ref": "#/$defs/unit"},
            "size": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "kind": {"const": "length"},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["unit"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    scripted.chat(tools=[tool])
    prompt = scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)
    declared = prompt[prompt.index("namespace functions") : prompt.index("// namespace functions")]
    for text in ('"m" | "ft"', "size?: ", "null", '"length"', "[key: string]: number"):
        assert text in declared, declared


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_7_reasoning_is_carried_between_calls_though_the_client_drops_it(
    scripted: ScriptedServer, stream: bool, hidden: bool
) -> None:
    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, "{}")
    thought = (t.channel, "analysis", t.message, "I must add.", t.end, t.start, "assistant")
    scripted.says(*thought, *call, t.end, t.start, "assistant", *call, t.call)
    asked = {"tools": [TOOL], "include_reasoning": not hidden}
    if stream:
        parts = [part for delta in deltas(scripted.chat_events(**asked)) for part in delta.get("tool_calls", ())]
        ids = [part["id"] for part in parts if "id" in part]
    else:
        ids = [part["id"] for part in scripted.chat(**asked)["choices"][0]["message"]["tool_calls"]]
    first, second = ids
    function = {"name": "add", "arguments": "{}"}

    def prompt(*call_ids: str, **fields: Any) -> str:
        calls = [{"id": call_id, "type": "function", "function": function} for call_id in call_ids]
        results = [{"role": "tool", "tool_call_id": call_id, "content": "2"} for call_id in call_ids]
        turns = [user("hi"), {"role": "assistant", "tool_calls": calls, **fields}, *results]
        response = scripted.post("/v1/chat/completions", {"messages": turns, "tools": [TOOL]})
        assert response.status_code == 200, response.text
        counted = scripted.post("/tokenize", {"messages": turns, "tools": [TOOL]}).json()["tokens"]
        assert counted == scripted.engine.requests[-1].prompt_token_ids
        return scripted.tokenizer.decode(counted)

    assert prompt(first, second).count("I must add.") == 1
    assert "I must add." in prompt(second)
    assert "I must add." not in prompt("call_of_another_server")
    assert "I must add." not in prompt(first, second, reasoning="My own.")
    assert prompt(first, second, reasoning="My own.").count("My own.") == 1


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_7_past_reasoning_is_read_under_both_names_and_dropped_behind_an_answer(
    scripted: ScriptedServer, field: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [user("hi"), {"role": "assistant", field: "Because.", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c", "content": "2"}]
    for behind, kept in (([], True), ([{"role": "assistant", "content": "It is 2."}, user("And now?")], False)):
        scripted.post("/v1/chat/completions", {"messages": [*turns, *behind], "tools": [TOOL]})
        prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
        assert ("Because." in prompt) == kept


@pytest.mark.parametrize("size", SIZES)
def test_8_stop_strings_match_what_is_seen_alone(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message)
    scripted.says(
        t.channel, "analysis", t.message, "END", t.end, t.start, "assistant", *call, '"END"', t.call, size=size
    )
    message, reason = both_ways(scripted, tools=[TOOL], stop=["END"])
    assert (message["reasoning"], message["tool_calls"], reason) == ("END", [["add", '"END"']], "tool_calls")
    scripted.says(t.channel, "final", t.message, "the EN", "D of it", t.return_, size=size)
    message, reason = both_ways(scripted, stop=["END"])
    assert (message["content"], reason) == ("the ", "stop")


@pytest.mark.parametrize("size", SIZES)
def test_8_invalid_utf_8_never_stalls_and_logprobs_carry_its_bytes(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    said = [0xC3, 0x28, 0xFF, *"\u20ac".encode(), 0xE2, 0x82]
    ids = [t.channel, *b"final", t.message, *said, t.return_]

    def script(request: GenerationRequest) -> Iterable[GenerationOutput]:
        for start in range(0, len(ids), size):
            piece = ids[start : start + size]
            reason: Any = "stop" if start + size >= len(ids) else None
            found = [TokenLogprobs(i, -1.0, ()) for i in piece]
            yield GenerationOutput(request.request_id, piece, found, finish_reason=reason)

    scripted.engine.script = script
    message, _ = both_ways(scripted, logprobs=True)
    assert message["content"] == bytes(said).decode(errors="replace")
    (choice,) = scripted.chat(logprobs=True)["choices"]
    assert [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]] == said
    streamed = [
        c["logprobs"]["content"] for e in scripted.chat_events(logprobs=True) for c in e["choices"] if c["logprobs"]
    ]
    assert [entry for entries in streamed for entry in entries] == choice["logprobs"]["content"]


@pytest.mark.parametrize("size", SIZES)
def test_9_a_budget_that_ends_in_analysis_is_length_with_the_reasoning(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "analysis", t.message, "so far", size=size, finish="length")
    message, reason = both_ways(scripted)
    assert (message["content"], message["reasoning"], reason) == ("", "so far", "length")


def test_10_a_context_that_overflows_is_refused(scripted: ScriptedServer) -> None:
    for parameters in (
        {"messages": [user("x" * MAX_MODEL_LEN)]},
        {"messages": [user("x")], "max_tokens": MAX_MODEL_LEN},
    ):
        response = scripted.post("/v1/chat/completions", parameters)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert not scripted.engine.requests


def test_11_the_date_is_the_same_all_day_and_can_be_set(
    scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch, model_folder: Any
) -> None:
    class Clock(datetime.datetime):
        moment = datetime.datetime(2031, 2, 3, 0, 0, 1, tzinfo=datetime.UTC)

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:  # type: ignore[override]
            return cls.moment

    def prompt(server: ScriptedServer) -> str:
        server.chat()
        return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)

    monkeypatch.setattr(service.datetime, "datetime", Clock)
    assert "Current date: 2025-08-05" in prompt(scripted)
    with ScriptedServer(model_folder, date=None) as server:
        morning = prompt(server)
        Clock.moment += datetime.timedelta(hours=23, minutes=59)
        assert prompt(server) == morning
        assert "Current date: 2031-02-03" in morning
        Clock.moment += datetime.timedelta(minutes=1)
        assert "Current date: 2031-02-04" in prompt(server)


def test_14_unknown_tools_are_left_out(scripted: ScriptedServer) -> None:
    strange = [
        {"type": "web_search"},
        {"type": "local_shell", "name": "x"},
        {"type": "image_generation", "name": "y"},
    ]
    scripted.chat(tools=[*strange, TOOL])
    prompt = scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)
    assert "type add = " in prompt
    assert not any(name in prompt for name in ("web_search", "local_shell", "type y"))
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": strange}
    for choice, param in (("auto", "tools[0].type"), ("required", "tool_choice")):
        refused = scripted.post("/v1/chat/completions", {**body, "tool_choice": choice})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert "no tool of type 'web_search'" in refused.text


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_has_the_shape_that_clients_know(scripted: ScriptedServer, size: int) -> None:
    t = scripted.tokenizer
    scripted.says(
        *(t.channel, "analysis", t.message, "2 + 2", t.end, t.start, "assistant"),
        *(t.channel, "final", t.message, "It is 4.", t.return_),
        size=size,
    )
    *events, last = scripted.chat_events(stream_options={"include_usage": True})
    assert {(e["id"], e["created"], e["model"], e["object"]) for e in [*events, last]} == {
        (events[0]["id"], events[0]["created"], events[0]["model"], "chat.completion.chunk")
    }
    found = deltas(events)
    assert found[0] == {"role": "assistant", "content": ""}
    assert found[-1] == {}
    assert not any("role" in delta for delta in found[1:])
    assert [kind for kind, _ in groupby(key for delta in found[1:-1] for key in delta)] == ["reasoning", "content"]
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == len("2 + 2")
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("reasoning", ["reasoning"]),
        ("reasoning_content", ["reasoning_content"]),
        ("both", ["reasoning", "reasoning_content"]),
    ],
)
def test_the_names_of_reasoning(model_folder: Any, name: str, fields: list[str]) -> None:
    with ScriptedServer(model_folder, reasoning_field=name) as server:
        t = server.tokenizer
        server.says(
            t.channel, "analysis", t.message, "hm", t.end, t.start, "assistant", t.channel, "final", t.message, "a"
        )
        message = server.chat()["choices"][0]["message"]
        assert {key: text for key, text in message.items() if "reasoning" in key} == dict.fromkeys(fields, "hm")
        said = [delta for delta in deltas(server.chat_events()) if any("reasoning" in key for key in delta)]
        assert all([*delta] == fields for delta in said)
        hidden = server.chat(reasoning={"exclude": True})["choices"][0]["message"]
        assert not any("reasoning" in key for key in hidden)


def test_allowed_tools_are_those_that_may_be_called_and_all_are_shown(scripted: ScriptedServer) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("add", "sub", "mul")]

    def asked(choice: Any, tools: Any = tools) -> GenerationRequest:
        scripted.chat(tools=tools, tool_choice=choice)
        return scripted.engine.requests[-1]

    def allowed(mode: str) -> dict[str, Any]:
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools[:2]}}

    required = asked(allowed("required"))
    assert required.sampling.grammar == asked("required", tools[:2]).sampling.grammar
    assert required.prompt_token_ids == asked("required").prompt_token_ids
    assert asked(allowed("auto")).sampling.grammar == asked("auto", tools[:2]).sampling.grammar


@pytest.mark.parametrize("temperature", [{}, {"temperature": 1.5}], ids=str)
def test_top_p_of_zero_is_greedy(scripted: ScriptedServer, temperature: Any) -> None:
    scripted.chat(top_p=0, **temperature)
    sampling = scripted.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("parameters", "effort"),
    [
        ({}, "medium"),
        ({"reasoning_effort": "low"}, "low"),
        ({"reasoning_effort": "high"}, "high"),
        ({"reasoning": {"effort": "high"}}, "high"),
        ({"reasoning_effort": "low", "reasoning": {"effort": "high"}}, "low"),
        ({"reasoning_effort": "none"}, "low"),
        ({"reasoning_effort": "minimal"}, "low"),
        ({"reasoning": {"effort": "xhigh"}}, "high"),
        ({"reasoning_effort": "max"}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "high"}}, "high"),
        ({"chat_template_kwargs": {"reasoning_effort": "minimal"}}, "low"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "low"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "low"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "medium"),
        ({"chat_template_kwargs": {"thinking": False}}, "low"),
        ({"verbosity": "low"}, "medium"),
        ({"verbosity": "high"}, "medium"),
    ],
    ids=str,
)
def test_effort(scripted: ScriptedServer, parameters: Any, effort: str) -> None:
    scripted.chat(**parameters)
    assert f"Reasoning: {effort}\n" in scripted.tokenizer.decode(scripted.engine.requests[0].prompt_token_ids)
