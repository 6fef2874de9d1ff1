"""Tools as agents declare them in the Responses API, over a scripted engine: prompts, items, grammars, prefixes."""

import json
import logging
import re
from typing import Any

import openai
import pytest
from llguidance import LLMatcher, LLTokenizer
from openai.types.responses import ResponseCustomToolCall, ResponseInputItem
from pydantic import TypeAdapter

from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer
from tests.chat.test_grammar import ll_tokenizer
from tests.extensions.apis.response_stream import check_response, check_stream, parse
from tests.server import ServerProcess

Item = dict[str, Any]

USER = {"role": "user", "content": "Change a.txt"}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
RUN = {"type": "function", "name": "run", "description": "Runs.", "strict": False, "parameters": CITY}
LATER = {**RUN, "name": "weather", "description": "The weather.", "defer_loading": True}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": CITY}
PATCH = 'start: "BEGIN" NL line+ "END" NL\nline: /[+-][^\\n]*/ NL -> kept\nNL: "\\n"\n'


def custom(syntax: str, definition: str) -> Item:
    grammar = {"type": "grammar", "syntax": syntax, "definition": definition}
    return {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar}


def respond(server: ScriptedServer, given: list[Item], **body: Any) -> Item:
    """The response, the same whether it is streamed or whole."""
    asked = {"input": given, "store": False, **body}
    answer = server.post("/v1/responses", asked)
    assert answer.status_code == 200, answer.text
    whole = check_response(answer.json())
    streamed = check_stream(parse(server.post("/v1/responses", {**asked, "stream": True}).text))
    assert streamed is not None
    assert [_plain(item) for item in whole["output"]] == [_plain(item) for item in streamed["output"]]
    return whole


def _plain(item: Item) -> Item:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def last_prompt(server: ScriptedServer) -> str:
    return server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)


def head(prompt: str) -> str:
    """What comes before the conversation."""
    return prompt.partition("<|start|>user")[0]


def calls(server: ScriptedServer, name: str, arguments: str) -> None:
    t = server.tokenizer
    server.says(t.channel, f"commentary to=functions.{name} ", t.constrain, "json", t.message, arguments, t.call)


def matcher(server: ScriptedServer) -> LLMatcher:
    tokenizer: LLTokenizer = ll_tokenizer(server.tokenizer.path, server.tokenizer.endoftext)
    return LLMatcher(tokenizer, server.engine.requests[-1].sampling.grammar, log_level=0)


def admits(server: ScriptedServer, header: str, text: str) -> bool:
    """Whether the grammar of the last request admits a call with this text."""
    t = server.tokenizer
    ids = [t.channel, *t.encode(header), t.message, *t.encode(text), t.call]
    found = matcher(server)
    return found.consume_tokens(ids) and found.is_stopped()


CODE = "commentary to=functions.apply_patch code"


@pytest.mark.parametrize(
    ("syntax", "definition", "declared", "valid", "wrong"),
    [
        (
            "lark",
            PATCH,
            "grammar in Lark's syntax",
            ["BEGIN\n+a\nEND\n", "BEGIN\n-\n+<|call|>\nEND\n"],
            ["BEGIN\nEND\n"],
        ),
        ("lark", "start: A\nA.3: /[ab]+/", "grammar in Lark's syntax", ["ab"], ["c", ""]),
        ("regex", r"^[ab]{2}-\d$", "regular expression", ["ab-1"], ["ab-1\n", "^ab-1$", "ab-"]),
        ("regex", "x|yz", "regular expression", ["x", "yz"], ["xz", "xx"]),
    ],
)
def test_the_input_of_a_custom_tool_satisfies_its_grammar_as_plain_text(
    scripted: ScriptedServer, syntax: str, definition: str, declared: str, valid: list[str], wrong: list[str]
) -> None:
    t, tools = scripted.tokenizer, [custom(syntax, definition), RUN]
    scripted.says(t.channel, CODE, t.message, valid[0], t.call, size=1)
    (call,) = respond(scripted, [USER], tools=tools)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "apply_patch", valid[0])
    said = f"The input is plain text, not JSON. It matches this {declared}:\n{definition}".rstrip().split("\n")
    comment = "".join(f"// {line}\n" for line in ("Edits files.", *said))
    assert f"{comment}type apply_patch = (_: string) => any;\n" in head(last_prompt(scripted))
    assert all(admits(scripted, CODE, text) for text in valid)
    assert not any(admits(scripted, CODE, text) for text in wrong)
    assert not admits(scripted, "commentary to=functions.apply_patch json", valid[0])
    before = scripted.engine.requests[-1].prompt_token_ids
    output = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Done."}
    respond(scripted, [USER, call, output], tools=tools)
    generated = [t.channel, *t.encode(CODE), t.message, *t.encode(valid[0]), t.call]
    whole = [*before, *generated]
    assert scripted.engine.requests[-1].prompt_token_ids[: len(whole)] == whole, "the prefix is found again"


@pytest.mark.parametrize("definition", ["start: a{", "start: /a(?=b)/", 'start: "a" <|call|>', "begin: /a/"])
def test_a_grammar_that_cannot_be_enforced_is_refused_with_the_tool(scripted: ScriptedServer, definition: str) -> None:
    refused = scripted.post("/v1/responses", {"input": "hi", "tools": [custom("lark", definition)]})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "tools")
    assert "the grammar of tool 'apply_patch' cannot be enforced" in error["message"]


def test_a_call_of_a_tool_that_is_gone_is_read_as_json(scripted: ScriptedServer) -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "a"}
    respond(scripted, [call, {"type": "custom_tool_call_output", "call_id": "c", "output": "Done."}])
    assert 'functions.apply_patch <|constrain|>json<|message|>{"input":"a"}<|call|>' in last_prompt(scripted)


def test_a_search_for_tools_is_the_clients_and_its_finds_leave_the_prefix(scripted: ScriptedServer) -> None:
    tools = [RUN, SEARCH, LATER]
    calls(scripted, "tool_search", '{"city":"Lisbon"}')
    (call,) = respond(scripted, [USER], tools=tools)["output"]
    assert {k: call[k] for k in ("type", "execution", "status", "arguments")} == {
        "type": "tool_search_call", "execution": "client", "status": "completed", "arguments": {"city": "Lisbon"},
    }  # fmt: skip
    first = last_prompt(scripted)
    assert "// Finds tools.\ntype tool_search = (_: {" in first
    assert "weather" not in first
    assert "functions.weather" not in str(scripted.engine.requests[-1].sampling.headers)
    space = {"type": "namespace", "name": "crm", "description": "", "tools": [LATER]}
    done = {"call_id": call["call_id"], "status": "completed", "execution": "client"}
    found = {"type": "tool_search_output", "id": "tso_1", **done, "tools": [LATER, space]}
    for item in (call, found):
        TypeAdapter(ResponseInputItem).validate_python(item)
    calls(scripted, "crm__weather", '{"city":"Lisbon"}')
    (second,) = respond(scripted, [USER, call, found], tools=tools)["output"]
    assert (second["type"], second["name"], second["namespace"]) == ("function_call", "weather", "crm")
    prompt = last_prompt(scripted)
    generated = '<|channel|>commentary to=functions.tool_search <|constrain|>json<|message|>{"city":"Lisbon"}<|call|>'
    assert prompt.startswith(first + generated)
    declared = prompt.removeprefix(first + generated)
    assert declared.startswith(
        '<|start|>functions.tool_search to=assistant<|channel|>commentary<|message|>["weather","crm"]'
    )
    assert (
        "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {\n\n// The weather.\n" in declared
    )
    assert "type weather = (_: {" in declared
    assert "type crm__weather = (_: {" in declared
    again = {**found, "id": "tso_2"}
    respond(scripted, [USER, call, found, again], tools=tools)
    assert last_prompt(scripted).startswith(prompt.removesuffix("<|start|>assistant"))
    assert last_prompt(scripted).count("type weather") == 1
    hidden = respond(scripted, [USER, call, found], tools=tools, tool_choice="none")
    assert "type weather" not in last_prompt(scripted)
    assert hidden["tool_choice"] == "none"


def test_deferred_tools_that_nothing_finds_are_declared_at_once(scripted: ScriptedServer) -> None:
    for more in ([], [{"type": "tool_search"}]):  # the second is run by OpenAI's servers
        respond(scripted, [USER], tools=[RUN, LATER, *more])
        assert "type weather = (_: {" in head(last_prompt(scripted))


def test_tools_of_an_item_before_the_conversation_are_declared_at_its_begin(scripted: ScriptedServer) -> None:
    item = {"type": "additional_tools", "role": "developer", "tools": [LATER]}
    respond(scripted, [item, USER], tools=[RUN])
    begin = head(last_prompt(scripted))
    assert (begin.count("# Tools"), begin.count("type run"), begin.count("type weather")) == (1, 1, 1)
    respond(scripted, [USER, item], tools=[RUN])
    assert "type weather" not in head(last_prompt(scripted))
    assert last_prompt(scripted).count("<|start|>developer<|message|># Tools") == 2


DELETE = {"type": "delete_file", "path": "a.txt"}
TYPED: list[tuple[Item, Item, Item, Item]] = [  # tool, what the model writes, item, result
    (
        {"type": "shell"},
        {"commands": ["ls", "pwd"], "timeout_ms": 5},
        {
            "type": "shell_call", "environment": {"type": "local"},
            "action": {"commands": ["ls", "pwd"], "timeout_ms": 5, "max_output_length": None},
        },
        {
            "type": "shell_call_output",
            "output": [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
        },
    ),
    (
        {"type": "local_shell"},
        {"type": "exec", "env": {}, "command": ["ls"]},
        {"type": "local_shell_call", "action": {"type": "exec", "env": {}, "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "lsho_1", "output": "a.txt"},
    ),
    (
        {"type": "apply_patch"}, DELETE, {"type": "apply_patch_call", "operation": DELETE},
        {"type": "apply_patch_call_output", "status": "completed", "output": "Done."},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("tool", "written", "item", "output"), TYPED)
def test_a_tool_that_the_client_runs_has_items_of_its_own(
    scripted: ScriptedServer, tool: Item, written: Item, item: Item, output: Item
) -> None:
    name = tool["type"]
    text = json.dumps(written, separators=(",", ":"))
    calls(scripted, name, text)
    response = respond(scripted, [USER], tools=[tool, tool])
    (call,) = response["output"]
    assert item.items() <= call.items()
    assert call["status"] == "completed"
    assert [one["type"] for one in response["tools"]] == [name, name]
    before = last_prompt(scripted)
    assert f"type {name} = (_:" in before
    assert "functions" in before
    header = f"commentary to=functions.{name} json"
    assert admits(scripted, header, text if name != "local_shell" else '{"command":["ls"]}')
    assert not admits(scripted, header, '{"path":"a.txt"}')
    respond(scripted, [USER, call, {"call_id": call["call_id"], **output}], tools=[tool])
    generated = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{text}<|call|>"
    assert last_prompt(scripted).startswith(before + generated)
    forced = scripted.post("/v1/responses", {"input": [USER], "tools": [tool, RUN], "tool_choice": {"type": name}})
    assert forced.status_code == 200
    assert not admits(scripted, "commentary to=functions.run json", '{"city":""}')


@pytest.mark.parametrize("tool", [one[0] for one in TYPED])
def test_a_call_that_is_cut_keeps_the_shape_of_its_item(scripted: ScriptedServer, tool: Item) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, f"commentary to=functions.{tool['type']}", t.message, '{"com', finish="length")
    response = respond(scripted, [USER], tools=[tool])
    cut = "in_progress" if tool["type"] == "apply_patch" else "incomplete"  # OpenAI's type has no other
    assert [item["status"] for item in response["output"]] == [cut]


def test_a_tool_that_another_server_runs_is_named_when_it_is_left_out(
    scripted: ScriptedServer, caplog: pytest.LogCaptureFixture
) -> None:
    container = {"type": "shell", "environment": {"type": "container_auto"}}
    lacking = [{"type": "web_search"}, container, {"type": "image_generation"}, {"type": "odd\r\nx: y"}]
    body = {"input": [USER], "tools": [RUN, *lacking]}
    with caplog.at_level(logging.INFO, "oscine.requests"):
        answer = scripted.post("/v1/responses", body)
    assert answer.headers["x-tools-left-out"] == "web_search, shell, image_generation, odd??x:?y"
    (line,) = caplog.records
    assert vars(line)["oscine_fields"]["tools_left_out"] == "web_search,shell,image_generation,odd??x:?y"
    assert [tool["type"] for tool in answer.json()["tools"]] == ["function"]
    streamed = scripted.post("/v1/responses", {**body, "stream": True})
    assert streamed.headers["x-tools-left-out"] == answer.headers["x-tools-left-out"]
    assert "x-tools-left-out" not in scripted.post("/v1/responses", {**body, "tools": [RUN]}).headers
    for tool in lacking[:3]:
        forced = scripted.post("/v1/responses", {**body, "tool_choice": {"type": tool["type"]}})
        assert (forced.status_code, forced.json()["error"]["param"]) == (400, "tool_choice")
        assert repr(tool["type"]) in forced.text
        alone = scripted.post("/v1/responses", {**body, "tools": [tool]})
        assert (alone.status_code, alone.json()["error"]["param"]) == (400, "tools[0].type")
    function = {"type": "function", "function": {"name": "run", "parameters": CITY}}
    chat = {"messages": [USER], "tools": [{"type": "web_search"}, function]}
    assert scripted.post("/v1/chat/completions", chat).headers["x-tools-left-out"] == "web_search"


def test_an_update_of_the_configuration_holds_until_the_next(scripted: ScriptedServer) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "found", "schema": schema}
    low: Item = {"type": "configuration_update", "reasoning": {"effort": "low"}, "text": {"format": form}}
    TypeAdapter(ResponseInputItem).validate_python(low)
    response = respond(scripted, [USER, low], store=True, reasoning={"effort": "high"})
    assert (response["reasoning"]["effort"], response["text"]["format"]["name"]) == ("low", "found")
    assert "Reasoning: low" in last_prompt(scripted)
    assert "## found" in last_prompt(scripted)
    listed = scripted.get(f"/v1/responses/{response['id']}/input_items").json()["data"]
    assert [item["type"] for item in listed] == ["configuration_update", "message"]
    high = {"type": "configuration_update", "reasoning": {"effort": "high"}}
    for given, effort in (([USER], "low"), ([high, USER], "high")):
        answer = scripted.post("/v1/responses", {"input": given, "previous_response_id": response["id"]})
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"]["format"]["name"] == "found"
        assert f"Reasoning: {effort}" in last_prompt(scripted)
    refused = scripted.post("/v1/responses", {"input": [{**high, "reasoning": {"effort": 5}}]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[0].reasoning.effort")


def test_a_template_of_openai_is_refused_with_the_reason(scripted: ScriptedServer) -> None:
    refused = scripted.post("/v1/responses", {"input": "hi", "prompt": {"id": "pmpt_1", "version": "2"}})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "prompt")
    assert "a template that OpenAI stores; send its text as 'instructions' and 'input'" in error["message"]


def test_the_phase_of_a_message_is_kept(scripted: ScriptedServer) -> None:
    said = {"type": "message", "role": "assistant", "phase": "commentary", "content": "I look."}
    response = scripted.post("/v1/responses", {"input": [USER, said, USER]}).json()
    listed = scripted.get(f"/v1/responses/{response['id']}/input_items?order=asc").json()["data"]
    assert [item.get("phase") for item in listed] == [None, "commentary", None]


def test_codex_reads_the_end_of_the_context_in_an_event(scripted: ScriptedServer) -> None:
    """It compacts upon this event, and upon a status of 400 its job ends. Other clients read the status."""
    body = {"input": "x" * MAX_MODEL_LEN, "stream": True}
    codex = scripted.request("POST", "/v1/responses", body, {"originator": "codex_cli_rs"})
    created, failed = parse(codex.text)
    assert (codex.status_code, created["type"], failed["type"]) == (200, "response.created", "response.failed")
    error = failed["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    refused = scripted.post("/v1/responses", body)
    assert (refused.status_code, refused.json()["error"]["message"]) == (400, error["message"])
    whole = scripted.request("POST", "/v1/responses", {**body, "stream": False}, {"originator": "codex_cli_rs"})
    assert whole.status_code == 400


BOUNDED = r"""
start: "*** Begin Patch" LF hunk~1..3 "*** End Patch" LF?
hunk: add | delete
add: "*** Add File: " NAME LF added~1..3
delete: "*** Delete File: " NAME LF
added: "+" /[^\n]{0,20}/ LF -> line
NAME: /[a-z]{1,8}\.(txt|py)/
%import common.LF
"""
_HUNK = r"\*\*\* (?:Add File: [a-z]{1,8}\.(?:txt|py)\n(?:\+[^\n]{0,20}\n){1,3}|Delete File: [a-z]{1,8}\.(?:txt|py)\n)"
VALID = re.compile(rf"\*\*\* Begin Patch\n(?:{_HUNK}){{1,3}}\*\*\* End Patch\n?")


def test_the_embedded_model_writes_patches_that_are_valid(nano_server: ServerProcess) -> None:
    """The grammar holds whatever the model would rather say, at every temperature."""
    tools: Any = [custom("lark", BOUNDED), RUN]
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(6):
            made = client.responses.create(
                model="oscine-nano",
                input=f"Add the number {seed} to a.txt",
                tools=tools,
                tool_choice={"type": "custom", "name": "apply_patch"},
                temperature=1.5 if seed % 2 else 1.0,
                reasoning={"effort": "low"},
                extra_body={"seed": seed},
            )
            (call,) = (item for item in made.output if item.type != "reasoning")
            assert isinstance(call, ResponseCustomToolCall)
            assert VALID.fullmatch(call.input), call.input
