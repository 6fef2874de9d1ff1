"""Names of functions: each API has its own limit, wherever a name can stand, and Ollama's clients have none."""

from typing import Any

import pytest

from oscine.chat.tools import LONGEST_NAME, ModelNames
from tests.api.scripted_server import ScriptedServer

USER = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}


def chat(name: str) -> tuple[str, dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": name, "arguments": "{}"}}
    named = {"type": "function", "function": {"name": name}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [named]}}
    messages = [USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": ""}]
    return "/v1/chat/completions", {"messages": messages, "tools": [named], "tool_choice": allowed}


def messages(name: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "tool_use", "id": "1", "name": name, "input": {}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    turns = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    tools = [{"name": name, "input_schema": SCHEMA}]
    return "/v1/messages", {
        **{"messages": turns, "tools": tools, "max_tokens": 9},
        "tool_choice": {"type": "tool", "name": name},
    }


def responses(name: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "1", "name": name, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": name}]}
    tools = [{"type": "function", "name": name, "parameters": SCHEMA}]
    return "/v1/responses", {"input": [USER, call, result], "tools": tools, "tool_choice": choice}


def custom(name: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "custom_tool_call", "call_id": "1", "name": name, "input": "a"}
    result = {"type": "custom_tool_call_output", "call_id": "1", "output": "x"}
    tools, choice = [{"type": "custom", "name": name}], {"type": "custom", "name": name}
    return "/v1/responses", {"input": [USER, call, result], "tools": tools, "tool_choice": choice}


def namespace(name: str) -> tuple[str, dict[str, Any]]:
    call = {"type": "function_call", "call_id": "1", "name": name, "namespace": name, "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": "x"}
    inner = {"type": "function", "name": name, "parameters": SCHEMA}
    tools = [{"type": "namespace", "name": name, "tools": [inner]}]
    choice = {"type": "function", "name": name, "namespace": name}
    return "/v1/responses", {"input": [USER, call, result], "tools": tools, "tool_choice": choice}


def ollama(name: str) -> tuple[str, dict[str, Any]]:
    function = {"name": name, "parameters": SCHEMA}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": {}}}]},
        {"role": "tool", "tool_name": name, "content": "x"},
    ]
    return "/api/chat", {"messages": turns, "tools": [{"function": function}], "stream": False}


@pytest.mark.needs("apis")
@pytest.mark.parametrize(
    ("make", "longest"), [(chat, 64), (messages, 128), (responses, 128), (custom, 128), (namespace, 128)]
)
def test_each_api_has_a_limit_of_its_own(scripted: ScriptedServer, make: Any, longest: int) -> None:
    model = {"model": scripted.service.names[0]}
    path, body = make("n" * longest)
    answer = scripted.post(path, model | body)
    assert answer.status_code == 200, answer.text
    for wrong in ("n" * (longest + 1), "two words", "a.b", "caf\u00e9", ""):
        path, body = make(wrong)
        refused = scripted.post(path, model | body)
        assert refused.status_code == 400
        assert f"1 to {longest} letters" in refused.text


@pytest.mark.needs("apis")
@pytest.mark.parametrize("name", ["n" * 1000, "two words", "github.search", "caf\u00e9 au lait", "\n", "", "<|end|>"])
def test_ollamas_clients_name_functions_as_they_like(scripted: ScriptedServer, name: str) -> None:
    path, body = ollama(name)
    t, seen = scripted.tokenizer, ModelNames([(name,)]).seen(name)
    assert len(seen) <= LONGEST_NAME
    scripted.says(t.channel, f"commentary to=functions.{seen} ", t.constrain, "json", t.message, "{}", t.call)
    answer = scripted.post(path, {"model": scripted.service.names[0], **body})
    assert answer.status_code == 200, answer.text
    (call,) = answer.json()["message"]["tool_calls"]
    assert call["function"]["name"] == name
    prompt = t.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert f"type {seen} = " in prompt
    assert f"to=functions.{seen} <|constrain|>" in prompt
    assert f"<|start|>functions.{seen} to=assistant" in prompt


def test_names_that_would_be_the_same_are_distinct() -> None:
    names = ModelNames([("a b",), ("a.b",), ("a_b",), ("a_b_2",), ("n" * 500,), ("n" * 501,)])
    seen = [names.seen(name) for name in ("a_b", "a_b_2", "a b", "a.b", "n" * 500, "n" * 501)]
    assert seen == ["a_b", "a_b_2", "a_b_3", "a_b_4", "n" * 128, "n" * 126 + "_2"]
    assert names.seen("a/b") == "a_b_5"  # only in the history
    assert names.seen("a b") == "a_b_3"


@pytest.mark.needs("apis")
def test_a_namespace_and_a_function_may_spell_the_same_name(scripted: ScriptedServer) -> None:
    inner = {"type": "function", "name": "b", "parameters": SCHEMA}
    tools = [{"type": "namespace", "name": "a", "tools": [inner]}, {**inner, "name": "a__b"}]
    t, called = scripted.tokenizer, []
    for seen in ("a__b", "a__b_2"):
        scripted.says(t.channel, f"commentary to=functions.{seen} ", t.constrain, "json", t.message, "{}", t.call)
        (call,) = scripted.post("/v1/responses", {"input": "hi", "tools": tools}).json()["output"]
        called.append((call.get("namespace"), call["name"]))
    assert called == [("a", "b"), (None, "a__b")]
    refused = scripted.post("/v1/responses", {"input": "hi", "tools": [*tools, tools[0]]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")


@pytest.mark.parametrize("name", ["all", "user", "assistant", "functions", "final", "json", "python"])
def test_a_function_may_have_the_name_of_something_in_headers(scripted: ScriptedServer, name: str) -> None:
    t = scripted.tokenizer
    tools = [{"type": "function", "function": {"name": name}}]
    scripted.says(t.channel, f"commentary to=functions.{name} ", t.constrain, "json", t.message, "{}", t.call)
    (call,) = scripted.chat(tools=tools)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": name, "arguments": "{}"}
