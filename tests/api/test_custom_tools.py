"""Custom tools in chat completions: inputs of plain text, with and without grammars. Read with the types of openai."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher
from openai.types.chat import ChatCompletion, ChatCompletionMessageCustomToolCall, ChatCompletionMessageParam
from pydantic import TypeAdapter

from tests.api.scripted_server import ScriptedServer
from tests.chat.test_grammar import ll_tokenizer

Json = dict[str, Any]
USER = {"role": "user", "content": "Change a.txt"}
PATCH = 'start: "BEGIN" NL line+ "END" NL\nline: /[+-][^\\n]*/ NL\nNL: "\\n"\n'
VALID = "BEGIN\n+a\n-<|call|>\nEND\n"
RUN = {"type": "function", "function": {"name": "run", "parameters": {"type": "object"}}}


def custom(name: str, syntax: str = "", definition: str = "") -> Json:
    grammar = {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}
    form = {"format": grammar} if syntax else {}
    return {"type": "custom", "custom": {"name": name, "description": "Edits.", **form}}


def patches(server: ScriptedServer, text: str, size: int = 3) -> list[int]:
    t = server.tokenizer
    ids = [t.channel, *t.encode("commentary to=functions.patch code"), t.message, *t.encode(text), t.call]
    server.says(*ids, size=size)
    return ids


def called(answer: Json) -> ChatCompletionMessageCustomToolCall:
    (choice,) = ChatCompletion.model_validate_json(json.dumps(answer), strict=True).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or ()
    assert isinstance(call, ChatCompletionMessageCustomToolCall)
    return call


def streamed(events: list[Json]) -> Json:
    """The only call of a stream, put together as the client does."""
    deltas = [d for event in events for choice in event["choices"] for d in choice["delta"].get("tool_calls", ())]
    head, *rest = deltas
    assert {d["index"] for d in deltas} == {0}
    assert all(set(d) == {"index", "custom"} and set(d["custom"]) == {"input"} for d in rest)
    text = "".join(d["custom"]["input"] for d in deltas)
    return {"type": head["type"], "name": head["custom"]["name"], "input": text}


def prompt_of(server: ScriptedServer) -> str:
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def admits(server: ScriptedServer, ids: list[int]) -> bool:
    tokenizer = ll_tokenizer(server.tokenizer.path, server.tokenizer.endoftext)
    found = LLMatcher(tokenizer, server.engine.requests[-1].sampling.grammar, log_level=0)
    return found.consume_tokens(ids) and found.is_stopped()


def test_an_input_with_a_grammar_is_plain_text_in_both_directions(scripted: ScriptedServer) -> None:
    tools = [custom("patch", "lark", PATCH), RUN]
    ids = patches(scripted, VALID)
    call = called(scripted.chat(messages=[USER], tools=tools))
    assert (call.custom.name, call.custom.input) == ("patch", VALID)
    assert streamed(scripted.chat_events(messages=[USER], tools=tools)) == {
        "type": "custom", "name": "patch", "input": VALID,
    }  # fmt: skip
    assert "// Edits.\n// The input is plain text, not JSON. It matches this grammar in Lark's syntax:" in prompt_of(
        scripted
    )
    assert "type patch = (_: string) => any;\n" in prompt_of(scripted)
    assert admits(scripted, ids)
    assert not admits(scripted, patches(scripted, "BEGIN\nEND\n"))
    before = scripted.engine.requests[-1].prompt_token_ids
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Done."},
    ]
    TypeAdapter(list[ChatCompletionMessageParam]).validate_python(turns)
    scripted.chat(messages=turns, tools=tools)
    whole = [*before, *ids]
    assert scripted.engine.requests[-1].prompt_token_ids[: len(whole)] == whole, "the prefix is found again"


@pytest.mark.parametrize(
    ("written", "expected"), [('{"input":"a\\nb"}', "a\nb"), ('{"input": 1}', '{"input": 1}'), ('{"input":""}', "")]
)
def test_an_input_without_a_grammar_is_a_field_of_json(scripted: ScriptedServer, written: str, expected: str) -> None:
    t, tools = scripted.tokenizer, [custom("note")]
    scripted.says(t.channel, "commentary to=functions.note ", t.constrain, "json", t.message, written, t.call)
    call = called(scripted.chat(messages=[USER], tools=tools))
    assert call.custom.input == expected
    assert streamed(scripted.chat_events(messages=[USER], tools=tools))["input"] == expected
    result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
    scripted.chat(messages=[USER, {"role": "assistant", "tool_calls": [call.model_dump()]}, result], tools=tools)
    assert f"json<|message|>{json.dumps({'input': expected}, separators=(',', ':'))}<|call|>" in prompt_of(scripted)


def test_calls_of_both_kinds_in_one_turn(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    note = (t.channel, "commentary to=functions.note ", t.constrain, "json", t.message, '{"input":"x"}', t.call)
    run = (
        t.start,
        "assistant",
        t.channel,
        "commentary to=functions.run ",
        t.constrain,
        "json",
        t.message,
        "{}",
        t.call,
    )
    scripted.says(*note[:-1], t.end, *run)
    tools = [custom("note"), RUN]
    message = scripted.chat(messages=[USER], tools=tools)["choices"][0]["message"]
    kinds = [(call["type"], call[call["type"]]) for call in message["tool_calls"]]
    assert kinds == [("custom", {"name": "note", "input": "x"}), ("function", {"name": "run", "arguments": "{}"})]
    events = scripted.chat_events(messages=[USER], tools=tools)
    deltas = [d for event in events for choice in event["choices"] for d in choice["delta"].get("tool_calls", ())]
    assert [d["index"] for d in deltas] == sorted(d["index"] for d in deltas)
    assert {d["index"]: d["type"] for d in deltas if "type" in d} == {0: "custom", 1: "function"}


def test_a_choice_names_a_custom_tool(scripted: ScriptedServer) -> None:
    tools = [custom("patch", "regex", "[ab]+"), RUN]
    named = {"custom": {"name": "patch"}, "type": "custom"}
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    ids = patches(scripted, "ab")
    for choice in (named, only):
        scripted.chat(messages=[USER], tools=tools, tool_choice=choice)
        assert admits(scripted, ids)
        assert not admits(scripted, patches(scripted, "c"))
        headers = str(scripted.engine.requests[-1].sampling.headers)
        assert ("functions.patch" in headers, "functions.run" in headers) == (True, False)


def custom_format(format: Json) -> Json:
    return {"tools": [{"type": "custom", "custom": {"name": "a", "format": format}}]}


def calling(**call: Any) -> Json:
    return {"messages": [{"role": "assistant", "tool_calls": [{"id": "1", **call}]}]}


NAMELESS = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "custom"}]}}
EMPTY = {"type": "grammar", "grammar": {"syntax": "lark", "definition": ""}}
WRONG: list[tuple[str, Json]] = [
    ("tools[0].custom", {"tools": [{"type": "custom"}]}),
    ("tools[0].custom.name", {"tools": [{"type": "custom", "custom": {}}]}),
    ("tools", {"tools": [custom("no spaces please")]}),
    ("tools", {"tools": [custom("run"), RUN]}),
    ("tools", {"tools": [custom("patch", "lark", "start: a{")]}),
    ("tools[0].custom.format.grammar", custom_format({"type": "grammar"})),
    ("tools[0].custom.format.grammar.definition", custom_format(EMPTY)),
    ("tools[0].custom.format.grammar.syntax", {"tools": [custom("a", "ebnf", "x")]}),
    ("tool_choice", {"tools": [RUN], "tool_choice": {"type": "custom", "custom": {"name": "run"}}}),
    ("tool_choice", {"tools": [custom("a")], "tool_choice": {"type": "function", "function": {"name": "a"}}}),
    ("tool_choice.allowed_tools.tools[0].custom", {"tools": [RUN], "tool_choice": NAMELESS}),
    ("messages[0].tool_calls[0].custom", calling(type="custom")),
    ("messages[0].tool_calls[0].function", calling()),
]


@pytest.mark.parametrize(("param", "body"), WRONG)
def test_what_is_wrong_is_named(scripted: ScriptedServer, param: str, body: Json) -> None:
    refused = scripted.post("/v1/chat/completions", {"messages": [USER], **body})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
