"""Every API joins the text parts of one message to one text, as openai-harmony does."""

from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer

PARTS = ("What is 3", " + 4?")


def chat(role: str, content: Any) -> tuple[str, dict[str, Any]]:
    named = {"tool_call_id": "c"} if role == "tool" else {}
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": role, "content": content, **named}]
    return "/v1/chat/completions", {"messages": messages if role == "tool" else messages[1:]}


def responses(role: str, content: Any) -> tuple[str, dict[str, Any]]:
    if role != "tool":
        return "/v1/responses", {"input": [{"role": role, "content": content}]}
    call = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    return "/v1/responses", {"input": [call, {"type": "function_call_output", "call_id": "c", "output": content}]}


def anthropic(role: str, content: Any) -> tuple[str, dict[str, Any]]:
    ask = {"role": "user", "content": "Go on."}
    said = {"role": role, "content": content}
    if role == "tool":
        use = {"type": "tool_use", "id": "c", "name": "add", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "c", "content": content}
        said = {"role": "user", "content": [result]}
        ask = {"role": "assistant", "content": [use]}
    messages = {"system": [ask], "assistant": [ask, said, ask], "user": [said], "tool": [ask, said]}[role]
    system = {"system": content} if role == "system" else {}
    return "/v1/messages", {"model": "fake", "max_tokens": 50, "messages": messages, **system}


INTERFACES = {
    chat: ("text", ("system", "developer", "user", "assistant", "tool")),
    responses: ("input_text", ("system", "developer", "user", "assistant", "tool")),
    anthropic: ("text", ("system", "user", "assistant", "tool")),
}


@pytest.mark.needs("apis")
@pytest.mark.long
@pytest.mark.parametrize(
    ("interface", "kind", "role"),
    [(interface, kind, role) for interface, (kind, roles) in INTERFACES.items() for role in roles],
)
def test_several_parts_are_one_text(scripted: ScriptedServer, interface: Any, kind: str, role: str) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "final", t.message, "7", t.return_)
    in_parts = [{"type": kind, "text": text} for text in PARTS]
    for content in (in_parts, "".join(PARTS)):
        path, body = interface(role, content)
        answer = scripted.post(path, {**body, "model": scripted.service.names[0]})
        assert answer.status_code == 200, answer.text
    several, one = (t.decode(request.prompt_token_ids) for request in scripted.engine.requests)
    assert several == one
