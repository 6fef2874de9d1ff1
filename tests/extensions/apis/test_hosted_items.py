"""Items of OpenAI's hosted tools, which this server does not run, over a scripted engine."""

import base64
from typing import Any, get_args

import pytest
from openai.types.responses import ResponseInputItem, ResponseItemList
from pydantic import TypeAdapter

from oscine.api.common.errors import APIError
from oscine.api.serving.parameters import MAX_TOOLS
from oscine.extensions.apis.responses.tools import ClientTools
from tests.api.scripted_server import ScriptedServer

Item = dict[str, Any]

USER = {"role": "user", "content": "Go on."}
PNG = base64.b64encode(b"\x89PNG" + bytes(66)).decode()
NOT_SHOWN = "not shown, as this model reads text only]"
LOOK_UP = {"type": "function", "name": "look_up", "description": "Looks up.", "strict": False, "parameters": {}}
CRM = {"type": "namespace", "name": "crm", "description": "Customers.", "tools": [LOOK_UP]}
PATCH = {"type": "update_file", "path": "a.py", "diff": "@@\n-a\n+b"}
SHELL = {"stdout": "a.py", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}

# By the names of their types: a call with its result, and what the model reads of both.
CALLS: dict[str, tuple[list[Item], str, str, str]] = {
    "local_shell_call local_shell_call_output": (
        [
            {"type": "local_shell_call", "id": "lsh_1", "call_id": "c", "status": "completed",
             "action": {"type": "exec", "command": ["ls"], "env": {}}},
            {"type": "local_shell_call_output", "id": "c", "output": "a.py"},
        ],
        "local_shell", '{"type":"exec","command":["ls"],"env":{}}', "a.py",
    ),
    "shell_call shell_call_output": (
        [
            {"type": "shell_call", "id": "sh_1", "call_id": "c", "status": "completed", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "id": "sho_1", "call_id": "c", "output": [SHELL]},
        ],
        "shell", '{"commands":["ls"]}', '[{"stdout":"a.py","stderr":"","outcome":{"type":"exit","exit_code":0}}]',
    ),
    "apply_patch_call apply_patch_call_output": (
        [
            {"type": "apply_patch_call", "id": "ap_1", "call_id": "c", "status": "completed", "operation": PATCH},
            {"type": "apply_patch_call_output", "id": "apo_1", "call_id": "c", "status": "failed", "output": "None."},
        ],
        "apply_patch", '{"type":"update_file","path":"a.py","diff":"@@\\n-a\\n+b"}', "failed\nNone.",
    ),
    "computer_call computer_call_output": (
        [
            {"type": "computer_call", "id": "cu_1", "call_id": "c", "status": "completed", "pending_safety_checks": [],
             "action": {"type": "type", "text": "hello"}},
            {"type": "computer_call_output", "id": "cuo_1", "call_id": "c", "status": "completed",
             "output": {"type": "computer_screenshot", "image_url": f"data:image/png;base64,{PNG}"}},
        ],
        "computer", '{"type":"type","text":"hello"}', f"[computer_screenshot: image/png, 70 bytes; {NOT_SHOWN}\n",
    ),
    "program program_output": (
        [
            {"type": "program", "id": "p_1", "call_id": "c", "code": "f()", "fingerprint": "opaque"},
            {"type": "program_output", "id": "po_1", "call_id": "c", "result": "5", "status": "completed"},
        ],
        "program", '{"code":"f()"}', "5",
    ),
    "tool_search_call tool_search_output": (
        [
            {"type": "tool_search_call", "id": "ts_1", "arguments": {"goal": "find"}, "execution": "client",
             "status": "completed"},
            {"type": "tool_search_output", "id": "tso_1", "tools": [LOOK_UP, CRM], "execution": "client",
             "status": "completed"},
        ],
        "tool_search", '{"goal":"find"}', '["look_up","crm"]',
    ),
    "file_search_call": (
        [
            {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["oscine"],
             "results": [{"filename": "a.md", "text": "A bird."}, {"text": "It sings."}]},
        ],
        "file_search", '{"queries":["oscine"]}', "a.md\nA bird.\n\nIt sings.",
    ),
    "image_generation_call": (
        [
            {"type": "image_generation_call", "id": "ig_1", "status": "completed", "result": PNG,
             "output_format": "png", "revised_prompt": "A bird"},
        ],
        "image_generation", '{"revised_prompt":"A bird"}', f"[image: image/png, 70 bytes; {NOT_SHOWN}\n",
    ),
}  # fmt: skip
# Their tests are in test_response_input, test_response_context, test_compaction and below.
OTHERS = """
    message reasoning function_call function_call_output custom_tool_call custom_tool_call_output
    code_interpreter_call web_search_call mcp_call mcp_list_tools compaction compaction_trigger item_reference
    mcp_approval_request mcp_approval_response additional_tools configuration_update
"""


def respond(server: ScriptedServer, *items: Item, **body: Any) -> str:
    """The prompt of a response to these items. They are listed as they came."""
    for item in items:
        TypeAdapter(ResponseInputItem).validate_python(item)
    t = server.tokenizer
    server.says(t.channel, "final", t.message, "ok", t.return_)
    answer = server.post("/v1/responses", {"input": [*items, USER], **body})
    assert answer.status_code == 200, answer.text
    listed = server.get(f"/v1/responses/{answer.json()['id']}/input_items?order=asc").json()
    TypeAdapter(ResponseItemList).validate_python(listed)
    assert [item.get("type") for item in listed["data"][:-1]] == [item["type"] for item in items]
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def called(name: str, arguments: str, result: str) -> str:
    return (
        f"<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{result}<|end|>"
    )


def test_every_type_of_item_that_openai_lists_has_a_rule() -> None:
    (union, _) = get_args(ResponseInputItem)
    kinds = {kind for item in get_args(union) for kind in _literals(item.model_fields["type"].annotation)}
    assert kinds == {*" ".join(CALLS).split(), *OTHERS.split()}


def _literals(annotation: Any) -> list[str]:
    if isinstance(annotation, str):
        return [annotation]
    return [kind for inner in get_args(annotation) for kind in _literals(inner)]


@pytest.mark.parametrize("kinds", CALLS)
def test_a_hosted_call_is_read_as_a_call_of_a_function(scripted: ScriptedServer, kinds: str) -> None:
    items, name, arguments, result = CALLS[kinds]
    assert " ".join(item["type"] for item in items) == kinds
    assert called(name, arguments, result) in respond(scripted, *items)


def test_a_hosted_call_without_its_content_is_refused(scripted: ScriptedServer) -> None:
    for kind, param in (
        ("local_shell_call", "action"),
        ("computer_call", ""),
        ("program", "code"),
        ("file_search_call", "queries"),
    ):
        refused = scripted.post("/v1/responses", {"input": [{"type": kind, "call_id": "c"}, USER]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"input[0].{param}".rstrip("."))
    for given, param in (
        ({"type": "shell_call_output", "call_id": "c", "output": []}, "call_id"),
        ({"type": "program_output", "result": 5}, "result"),
        ({"type": "tool_search_output", "tools": "all"}, "tools"),
        ({"type": "additional_tools", "role": "developer", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"type": "file_search_call", "queries": ["a"], "results": [5]}, "results[0]"),
    ):
        refused = scripted.post("/v1/responses", {"input": [given, USER]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"input[0].{param}"), refused.text


def test_a_hosted_call_may_lack_a_result(scripted: ScriptedServer) -> None:
    failed = {"type": "image_generation_call", "id": "ig_1", "status": "failed", "result": None}
    assert called("image_generation", "{}", "failed") in respond(scripted, failed)
    error = {"type": "moderation_blocked", "message": "No."}
    assert called("image_generation", "{}", "failed: No.") in respond(scripted, {**failed, "error": error})
    searched = {"type": "file_search_call", "id": "fs_1", "status": "completed", "queries": ["a"], "results": None}
    expected = called("file_search", '{"queries":["a"]}', "completed; the results are not shown")
    assert expected in respond(scripted, searched)


def test_a_function_answers_a_hosted_call(scripted: ScriptedServer) -> None:
    """Clients that run the shell themselves do so."""
    call, _ = CALLS["local_shell_call local_shell_call_output"][0]
    output = {"type": "function_call_output", "call_id": "c", "output": "a.py"}
    assert called("local_shell", '{"type":"exec","command":["ls"],"env":{}}', "a.py") in respond(scripted, call, output)


def test_an_output_may_name_its_function_in_place_of_its_call(scripted: ScriptedServer) -> None:
    output = {"type": "function_call_output", "name": "look_up", "namespace": "crm", "output": "Ann"}
    expected = "<|start|>functions.crm__look_up to=assistant<|channel|>commentary<|message|>Ann<|end|>"
    assert expected in respond(scripted, output)
    refused = scripted.post("/v1/responses", {"input": [{"type": "function_call_output", "output": "Ann"}, USER]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].call_id")


@pytest.mark.parametrize("kind", ["tool_search_output", "additional_tools"])
def test_tools_that_come_with_an_item_can_be_called(scripted: ScriptedServer, kind: str) -> None:
    role = {"role": "developer"} if kind == "additional_tools" else {"execution": "client", "status": "completed"}
    item = {"type": kind, "id": "x_1", "tools": [LOOK_UP, CRM], **role}
    own = {**LOOK_UP, "description": "My own."}
    text = respond(scripted, item, {**item, "id": "x_2"}, tools=[own])
    assert "// My own.\ntype look_up" in text
    assert "// Looks up.\n// (crm: Customers.)\ntype crm__look_up" in text
    t = scripted.tokenizer
    scripted.says(t.channel, "commentary to=functions.crm__look_up ", t.constrain, "json", t.message, "{}", t.call)
    first = scripted.post("/v1/responses", {"input": [item, USER]}).json()
    (call,) = first["output"]
    assert (call["type"], call["namespace"], call["name"]) == ("function_call", "crm", "look_up")
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "Ann"}
    text = respond(scripted, output, previous_response_id=first["id"])
    assert "type crm__look_up" in text


def test_tools_that_come_again_count_once() -> None:
    later = [({**LOOK_UP, "name": f"f_{i}"}, "input") for i in (*range(MAX_TOOLS - 1), *range(MAX_TOOLS))]
    names = [function.name for function in ClientTools((), later).functions]
    assert names == [f"f_{i}" for i in range(MAX_TOOLS)]
    with pytest.raises(APIError, match="more than 1024"):
        ClientTools([LOOK_UP], later)


def test_a_refused_mcp_call_is_read_as_failed(scripted: ScriptedServer) -> None:
    request = {"type": "mcp_approval_request", "id": "m_1", "server_label": "s", "name": "f", "arguments": '{"a":1}'}
    answer = {"type": "mcp_approval_response", "id": "r_1", "approval_request_id": "m_1", "approve": False}
    said = '<|channel|>commentary to=s.f <|constrain|>json<|message|>{"a":1}<|call|>'
    text = respond(scripted, request, {**answer, "reason": "Too dear."})
    assert f"{said}<|start|>s.f to=assistant<|channel|>commentary<|message|>Error: the user refused this call: " in text
    assert "refused this call: Too dear.<|end|>" in text
    assert "refused this call<|end|>" in respond(scripted, request, answer)
    call = {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "f", "arguments": '{"a":1}', "output": "b"}
    text = respond(scripted, request, {**answer, "approve": True}, {**call, "approval_request_id": "m_1"})
    assert text.count(said) == 1  # the call itself follows the consent
    refused = scripted.post("/v1/responses", {"input": [answer, USER]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].approval_request_id")


def test_a_picture_among_the_outputs_of_code_is_named(scripted: ScriptedServer) -> None:
    outputs = [
        {"type": "logs", "logs": "2"},
        {"type": "logs", "logs": ""},
        {"type": "image", "url": "https://x.org/a.png"},
    ]
    code = {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "x", "status": "completed"}
    text = respond(scripted, {**code, "outputs": outputs})
    assert f"<|message|>2[image: image/png, https://x.org/a.png; {NOT_SHOWN}\n<|end|>" in text
