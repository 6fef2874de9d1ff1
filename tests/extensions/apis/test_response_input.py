"""The input of a response: items, stored responses, references, and refusals. Over a scripted engine."""

from typing import Any

import pytest
from openai.types.responses import ResponseItemList
from pydantic import TypeAdapter

from oscine.types import GenerationRequest
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import check_response

ADD = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def create(server: ScriptedServer, **body: Any) -> dict[str, Any]:
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    return check_response(answer.json())


def prompt(server: ScriptedServer) -> str:
    """The conversation of the last prompt, without what comes before the first turn."""
    text = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    return text.partition("Channel must be included for every message.")[2].partition("<|end|>")[2]


def say_call(server: ScriptedServer) -> None:
    t = server.tokenizer
    server.says(
        *(t.channel, "analysis", t.message, "Let me add.", t.end, t.start, "assistant"),
        *(t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, '{"a": 1}', t.call),
    )


def say(server: ScriptedServer, text: str) -> None:
    t = server.tokenizer
    server.says(t.channel, "final", t.message, text, t.return_)


CALLED = (
    "<|start|>user<|message|>1 + 1?<|end|>"
    "<|start|>assistant<|channel|>analysis<|message|>Let me add.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>'
    "<|start|>functions.add to=assistant<|channel|>commentary<|message|>2<|end|>"
    "<|start|>assistant"
)


def test_a_conversation_goes_on_from_what_is_stored(scripted: ScriptedServer) -> None:
    say_call(scripted)
    called = create(scripted, input="1 + 1?", tools=[ADD], instructions="Add.")
    assert "# Instructions\n\nAdd." in prompt(scripted)
    (call,) = (item for item in called["output"] if item["type"] == "function_call")
    say(scripted, "2")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
    answered = create(scripted, input=[result], tools=[ADD], previous_response_id=called["id"])
    assert prompt(scripted).endswith(CALLED)
    assert "# Instructions" not in prompt(scripted)  # those of an earlier response are not carried along
    create(scripted, input="And 2 + 2?", previous_response_id=answered["id"])
    assert "Let me add." not in prompt(scripted)  # an answer lets go of the reasoning before it
    assert prompt(scripted).endswith(
        "<|start|>assistant<|channel|>final<|message|>2<|end|>"
        "<|start|>user<|message|>And 2 + 2?<|end|><|start|>assistant"
    )


def test_a_client_may_keep_the_conversation_itself(scripted: ScriptedServer) -> None:
    say_call(scripted)
    question = {"role": "user", "content": [{"type": "input_text", "text": "1 + 1?"}]}
    called = create(scripted, input=[question], tools=[ADD], store=False)
    result = {"type": "function_call_output", "call_id": called["output"][-1]["call_id"], "output": "2"}
    say(scripted, "2")
    create(scripted, input=[question, *called["output"], result], tools=[ADD], store=False)
    assert prompt(scripted).endswith(CALLED)
    without_reasoning = [item for item in called["output"] if item["type"] != "reasoning"]
    create(scripted, input=[question, *without_reasoning, result], tools=[ADD], store=False)
    assert prompt(scripted).endswith(CALLED)  # the server remembers what led to a call
    assert scripted.get(f"/v1/responses/{called['id']}").status_code == 404


def test_reasoning_travels_in_encrypted_content_too(scripted: ScriptedServer) -> None:
    t = scripted.tokenizer
    scripted.says(t.channel, "analysis", t.message, "Thought.", t.end, finish="length")
    made = create(scripted, input="hi", include=["reasoning.encrypted_content"])
    item = {**made["output"][0], "content": None}
    assert item["encrypted_content"]
    assert "encrypted_content" not in scripted.get(f"/v1/responses/{made['id']}").json()["output"][0]
    create(scripted, input=[{"role": "user", "content": "hi"}, item])
    assert "<|channel|>analysis<|message|>Thought.<|end|>" in prompt(scripted)
    foreign = {**item, "encrypted_content": "gAAAAAB"}
    create(scripted, input=[{"role": "user", "content": "hi"}, foreign])
    assert "analysis" not in prompt(scripted)


def test_a_summary_is_read_where_nothing_else_of_reasoning_comes_back(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    parts = [{"type": "summary_text", "text": text} for text in ("One.", "Two.")]
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c1", "output": "2"}
    for item, expected in (
        ({"summary": parts}, "One.\n\nTwo."),
        ({"summary": parts, "encrypted_content": "gAAAAAB"}, "One.\n\nTwo."),
        ({"summary": parts, "content": [{"type": "reasoning_text", "text": "All."}]}, "All."),
    ):
        create(scripted, input=[{"role": "user", "content": "hi"}, {"type": "reasoning", **item}, call, result])
        assert f"<|channel|>analysis<|message|>{expected}<|end|>" in prompt(scripted)


def test_all_kinds_of_items_are_read(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    items = [
        {"role": "system", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text} for text in "ab"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Wait."}], "phase": "commentary"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "note", "input": 'x "y"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "noted"}]},
        {"type": "function_call", "call_id": "c2", "name": "find", "namespace": "crm", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "found"},
        {"type": "code_interpreter_call", "id": "ci_1", "code": "1+1", "container_id": "x", "status": "completed",
         "outputs": [{"type": "logs", "logs": "2"}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []},
        {"type": "mcp_call", "id": "mcp_1", "server_label": "s", "name": "f", "arguments": "{}", "output": "done"},
    ]  # fmt: skip
    response = create(scripted, input=items)
    text = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert "# Instructions\n\nBe kind." in text
    assert prompt(scripted).partition("<|start|>user")[2] == (
        "<|message|>ab<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Wait.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.note <|constrain|>json"
        '<|message|>{"input":"x \\"y\\""}<|call|>'
        "<|start|>functions.note to=assistant<|channel|>commentary<|message|>noted<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.crm__find <|constrain|>json<|message|>{}<|call|>"
        "<|start|>functions.crm__find to=assistant<|channel|>commentary<|message|>found<|end|>"
        "<|start|>assistant<|channel|>analysis to=python code<|message|>1+1<|call|>"
        "<|start|>python to=assistant<|channel|>analysis<|message|>2<|end|>"
        "<|start|>assistant<|channel|>commentary to=s.f <|constrain|>json<|message|>{}<|call|>"
        "<|start|>s.f to=assistant<|channel|>commentary<|message|>done<|end|>"
        "<|start|>assistant"
    )
    listed = scripted.get(f"/v1/responses/{response['id']}/input_items?order=asc&limit=100").json()
    TypeAdapter(ResponseItemList).validate_python(listed)
    assert [item["type"] for item in listed["data"]] == [item.get("type", "message") for item in items]


def test_what_the_assistant_said_is_listed_as_output(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    parts = [{"type": "output_text", "text": "b"}, {"type": "refusal", "refusal": "c"}]
    said = [{"role": "assistant", "content": content} for content in ("a", parts)]
    made = create(scripted, input=[*said, {"role": "user", "content": "hi"}])
    listed = scripted.get(f"/v1/responses/{made['id']}/input_items?order=asc").json()["data"]
    text = {"type": "output_text", "annotations": [], "logprobs": []}
    assert listed[0]["content"] == [{**text, "text": "a"}]
    assert listed[1]["content"] == [{**text, "text": "b"}, parts[1]]


def test_functions_are_repeated_with_what_was_not_given(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    bare, full = {"type": "function", "name": "a"}, {**ADD, "description": "Adds.", "strict": True}
    nulls = {**bare, "name": "b", "description": None, "parameters": None, "strict": None}
    shown = create(scripted, input="hi", tools=[bare, full, nulls])["tools"]
    none = {"description": None, "parameters": None, "strict": False}
    assert shown == [{**bare, **none}, full, {**nulls, **none}]


def test_items_can_be_referred_to(scripted: ScriptedServer) -> None:
    say(scripted, "four")
    first = create(scripted, input="2 + 2?")
    (asked,) = scripted.get(f"/v1/responses/{first['id']}/input_items").json()["data"]
    references = [{"type": "item_reference", "id": asked["id"]}, {"id": first["output"][0]["id"]}]
    second = create(scripted, input=[*references, {"role": "user", "content": "Sure?"}])
    assert prompt(scripted) == (
        "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>four<|end|>"
        "<|start|>user<|message|>Sure?<|end|><|start|>assistant"
    )
    listed = scripted.get(f"/v1/responses/{second['id']}/input_items?order=asc").json()
    assert [item["id"] for item in listed["data"][:2]] == [asked["id"], first["output"][0]["id"]]


def test_pages_of_input_items(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    response = create(scripted, input=[{"role": "user", "content": str(i)} for i in range(5)])
    url = f"/v1/responses/{response['id']}/input_items"
    seen: list[str] = []
    after = ""
    for has_more in (True, True, False):
        page = scripted.get(f"{url}?limit=2&order=asc{after}").json()
        assert page["has_more"] is has_more
        assert (page["first_id"], page["last_id"]) == (page["data"][0]["id"], page["data"][-1]["id"])
        seen += [item["content"][0]["text"] for item in page["data"]]
        after = f"&after={page['last_id']}"
    assert seen == [*"01234"]
    assert [item["content"][0]["text"] for item in scripted.get(url).json()["data"]] == [*"43210"]
    assert scripted.get(f"{url}?order=asc{after}").json()["data"] == []
    wrong = {
        "limit=0": "limit",
        "limit=101": "limit",
        "order=up": "order",
        "after=x": "after",
        "include=x": "include[0]",
    }
    for query, param in wrong.items():
        refused = scripted.get(f"{url}?{query}")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


IMAGE = {"type": "input_image", "image_url": "data:"}
OUTPUT = {"type": "function_call_output", "call_id": "unknown", "output": "1"}
CALL = {"type": "function_call", "call_id": "unknown", "name": "n", "arguments": "{}"}
GBNF = {"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "gbnf", "definition": "root: a"}}


@pytest.mark.long
@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("input", {"input": 5}),
        ("input[0].type", {"input": [{"type": "hologram_call"}]}),
        ("input[0].type", {"input": [{"type": []}]}),
        ("input[0].id", {"input": [{"role": "user", "content": "x", "id": 5}]}),
        ("input[0].role", {"input": [{"role": "robot", "content": "x"}]}),
        ("input[0].content", {"input": [{"role": "user"}]}),
        ("input[0].content[0].type", {"input": [{"role": "user", "content": [IMAGE]}]}),
        ("input[0].call_id", {"input": [OUTPUT]}),
        ("input[1].output[0].text", {"input": [CALL, OUTPUT | {"output": [{"type": "input_text"}]}]}),
        ("input[0].arguments", {"input": [{"type": "function_call", "call_id": "c", "name": "n"}]}),
        ("input[0].id", {"input": [{"type": "item_reference", "id": "msg_1"}]}),
        ("prompt", {"prompt": {"id": "p"}}),
        ("n", {"n": 2}),
        ("stop", {"stop": "x"}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("max_tool_calls", {"max_tool_calls": 0}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("temperature", {"temperature": 3}),
        ("include[0]", {"include": ["everything"]}),
        ("metadata", {"metadata": {"k" * 65: "v"}}),
        ("metadata[...]", {"metadata": {"k": 1}}),
        ("background", {"background": True, "store": False}),
        ("truncation", {"truncation": "some"}),
        ("reasoning.effort", {"reasoning": {"effort": "huge"}}),
        ("text.verbosity", {"text": {"verbosity": "endless"}}),
        ("text.format.type", {"text": {"format": {"type": "xml"}}}),
        ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
        ("text.format", {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "nothing"}}}}),
        ("text.format.name", {"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}),
        (
            "guided_choice",
            {
                "guided_choice": ["a"],
                "tools": [{"type": "function", "name": "f", "parameters": {}}],
                "tool_choice": {"type": "function", "name": "f"},
            },
        ),
        ("tools", {"tools": [ADD, ADD]}),
        ("tools[0].name", {"tools": [{"type": "function"}]}),
        ("tools[0].tools[0].name", {"tools": [{"type": "namespace", "name": "s", "tools": [{"type": "function"}]}]}),
        ("tools[0].format", {"tools": [GBNF]}),
        ("tools", {"tools": [{"type": "mcp", "server_label": "wiki", "server_url": "https://wiki.test/mcp"}]}),
        ("tool_choice", {"tools": [{"type": "code_interpreter"}], "tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "required"}),
        ("tool_choice", {"tool_choice": "maybe"}),
        ("tool_choice", {"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}),
        ("tool_choice.type", {"tools": [ADD], "tool_choice": {"name": "add"}}),
        ("stream_options", {"stream_options": {}}),
        ("reasoning.summary", {"reasoning": {"summary": "long"}}),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(scripted: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    answer = scripted.post("/v1/responses", {"input": "hi", **body})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert f"'{param}'" in error["message"]
    assert scripted.engine.requests == []


def test_items_that_lack_something_are_listed_as_they_came(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    odd = [
        {"type": "web_search_call", "id": "ws_1"},
        {"type": "web_search_call", "id": "ws_2", "action": "none"},
        {"type": "reasoning", "id": "rs_1", "content": None, "encrypted_content": "of another server"},
        {"type": "reasoning", "id": "rs_2", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    made = create(scripted, input=[*odd, {"role": "user", "content": "hi"}])
    path = f"/v1/responses/{made['id']}/input_items?order=asc"
    for query in ("", "&include[]=reasoning.encrypted_content"):
        listed = scripted.get(path + query)
        assert listed.status_code == 200, listed.text
        items = listed.json()["data"][:4]
        assert [item["id"] for item in items] == ["ws_1", "ws_2", "rs_1", "rs_2"]
        assert items[2]["encrypted_content"] == "of another server"


def test_what_is_not_there_is_not_found(scripted: ScriptedServer) -> None:
    answer = scripted.post("/v1/responses", {"input": "hi", "previous_response_id": "resp_1"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items", "/v1/responses/resp_1?stream=true"):
        assert scripted.get(path).status_code == 404
    assert scripted.post("/v1/responses/resp_1/cancel", b"").status_code == 404


def test_a_prompt_that_does_not_fit_is_refused_however_it_should_be_cut(scripted: ScriptedServer) -> None:
    for truncation in ("auto", "disabled"):
        answer = scripted.post("/v1/responses", {"input": "x" * 3000, "truncation": truncation})
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("context_length_exceeded", "input")
        assert ("truncation" in error["message"]) is (truncation == "auto")


def test_a_conversation_that_lost_its_begin_says_so(scripted: ScriptedServer) -> None:
    say(scripted, "ok")
    first = create(scripted, input="a")
    second = create(scripted, input="b", previous_response_id=first["id"])
    assert scripted.delete(f"/v1/responses/{first['id']}").json()["deleted"] is True
    answer = scripted.post("/v1/responses", {"input": "c", "previous_response_id": second["id"]})
    assert answer.status_code == 404
    assert "no longer" in answer.json()["error"]["message"]


def grammar(server: ScriptedServer, **parameters: Any) -> str | None:
    say(server, "ok")
    create(server, input="hi", **parameters)
    request: GenerationRequest = server.engine.requests[-1]
    return request.sampling.grammar


def test_tools_are_chosen_by_grammar(scripted: ScriptedServer) -> None:
    sub = {**ADD, "name": "sub"}
    tools = [ADD, sub]
    assert grammar(scripted, tools=tools) is None
    required = grammar(scripted, tools=tools, tool_choice="required")
    assert required is not None
    assert "functions.add" in required
    assert "functions.sub" in required
    named = grammar(scripted, tools=tools, tool_choice={"type": "function", "name": "sub"})
    assert named is not None
    assert "functions.add" not in named
    some = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    allowed = grammar(scripted, tools=tools, tool_choice=some)
    assert allowed is not None
    assert "functions.sub" not in allowed
    assert "functions.sub" not in prompt(scripted)
    assert "type sub" in scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    assert grammar(scripted, tools=tools, tool_choice="none") is None
    assert "type sub" not in scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
    strict = grammar(scripted, tools=[{**ADD, "strict": True}])
    assert strict is not None
    regex = {"type": "custom", "name": "n", "format": {"type": "grammar", "syntax": "regex", "definition": "[ab]+"}}
    custom = grammar(scripted, tools=[regex])
    assert custom is not None
    assert "[ab]+" in custom
    assert grammar(scripted, text={"format": {"type": "json_object"}}) is not None


def test_other_forms_are_enforced_as_in_chat_completions(scripted: ScriptedServer) -> None:
    for form in ({"guided_regex": "[ab]{3}"}, {"structured_outputs": {"regex": "[ab]{3}"}}):
        asked = grammar(scripted, **form)
        assert asked is not None
        assert "[ab]{3}" in asked
    two = {"input": "hi", "guided_choice": ["a"], "text": {"format": {"type": "json_object"}}}
    refused = scripted.post("/v1/responses", two)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_choice")
    refused = scripted.post("/v1/responses", {"input": "hi", "guided_regex": "("})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "guided_regex")
