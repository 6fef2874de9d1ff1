"""Tools of a vendor's servers that this one lacks: alone they are refused by name, beside others they are left out."""

from typing import Any

import pytest

from tests.api.scripted_server import ScriptedServer

USER = {"role": "user", "content": "hi"}
FUNCTION = {"name": "add", "parameters": {"type": "object"}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
}
OWN: dict[str, dict[str, Any]] = {
    "/v1/messages": {"name": "add", "input_schema": {"type": "object"}},
    "/v1/responses": {"type": "function", **FUNCTION},
}
LACKED = [
    *(("/v1/messages", kind) for kind in ("web_search_20250305", "web_fetch_20250910", "code_execution_20250825")),
    ("/v1/messages/count_tokens", "web_search_20250305"),
    *(("/v1/responses", kind) for kind in ("web_search", "web_search_preview_2025_03_11", "tool_search")),
    *(("/v1/responses", kind) for kind in ("computer_use_preview", "code_interpreter", "image_generation")),
    ("/v1/responses/input_tokens", "web_search"),
]


@pytest.mark.parametrize(("path", "kind"), LACKED)
def test_a_tool_that_is_lacking_is_refused_by_name_where_there_is_no_other(
    scripted: ScriptedServer, path: str, kind: str
) -> None:
    lacked = {"type": kind, "name": kind}
    body = {"model": scripted.service.names[0], **BODIES[path]}
    refused = scripted.post(path, {**body, "tools": [lacked, lacked]})
    assert refused.status_code == 400
    assert f"'tools[0].type': this server has no tool of type '{kind}'" in refused.json()["error"]["message"]
    assert not scripted.engine.requests
    none: Any = {"type": "none"} if path.startswith("/v1/messages") else "none"
    assert scripted.post(path, {**body, "tools": [lacked], "tool_choice": none}).status_code == 200
    assert scripted.post(path, {**body, "tools": []}).status_code == 200
    if path in OWN:
        nameless = {"type": "toolset"}
        assert scripted.post(path, {**body, "tools": [lacked, nameless, OWN[path]]}).status_code == 200
        assert kind not in scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)


@pytest.mark.needs("apis")
def test_a_function_without_a_name_is_refused(scripted: ScriptedServer) -> None:
    body = {"model": scripted.service.names[0], **BODIES["/v1/messages"], "tools": [{"input_schema": {}}]}
    refused = scripted.post("/v1/messages", body)
    assert (refused.status_code, "function name ''" in refused.text) == (400, True)


def test_a_search_of_the_web_in_a_chat_completion_is_refused(scripted: ScriptedServer) -> None:
    refused = scripted.post("/v1/chat/completions", {"messages": [USER], "web_search_options": {}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "web_search_options")
