"""Bad requests: each is refused by the parameter's name, in OpenAI's form, without an effect on other requests."""

from dataclasses import replace
from typing import Any

import pytest

from tests.api.scripted_engine import MAX_MODEL_LEN, VOCAB_SIZE
from tests.api.scripted_server import ScriptedServer

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f"}}
CONDITIONAL = {"type": "object", "if": {"required": ["a"]}, "then": {"required": ["b"]}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def nested_schema(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def function_tool(schema: dict[str, Any], strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def refused(server: ScriptedServer, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert not server.engine.requests
    return dict(error)


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"nonsense", b'{"messages": [}', b'\xff\xfe{"a": 1}', b'{"x":' + b"[" * 100_000, b'{"messages": NaN}'],
    ids=["empty", "cut", "word", "wrong", "not utf-8", "deep", "nan"],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"])
def test_no_json(scripted: ScriptedServer, path: str, body: bytes) -> None:
    assert refused(scripted, path, body)["code"] == "invalid_json"


@pytest.mark.parametrize("body", [[], "text", 1, None], ids=repr)
def test_json_that_is_no_object(scripted: ScriptedServer, body: Any) -> None:
    assert "object" in refused(scripted, "/v1/chat/completions", body)["message"]


CHAT: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": "ten"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_completion_tokens", {"max_completion_tokens": "ten"}),
    ("max_completion_tokens", {"max_completion_tokens": 0, "max_tokens": 5}),
    ("n", {"n": 0}),
    ("n", {"n": 129}),
    ("n", {"n": "2"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": "hot"}),
    ("top_p", {"top_p": -0.1}),
    ("top_p", {"top_p": 1.1}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": -2.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("repetition_penalty", {"repetition_penalty": 1e-31}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": MAX_MODEL_LEN}),
    ("seed", {"seed": 1 << 63}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": ""}),
    ("stop[1]", {"stop": ["a", ""]}),
    ("stop", {"stop": ["a"] * 17}),
    ("stop[1]", {"stop": ["a" * 1024, "a" * 1025]}),
    ("stop", {"stop": 1}),
    ("stop[0]", {"stop": [1]}),
    ("stop_token_ids", {"stop_token_ids": [VOCAB_SIZE]}),
    ("stop_token_ids[0]", {"stop_token_ids": [-1]}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {str(VOCAB_SIZE): 1}}),
    ("logit_bias", {"logit_bias": {"five": 1}}),
    ("priority", {"priority": 1 << 40}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("stream_options.include_usage", {"stream": True, "stream_options": {"include_usage": 1}}),
    ("logprobs", {"logprobs": 3}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("reasoning_effort", {"reasoning_effort": "extreme"}),
    ("reasoning.effort", {"reasoning": {"effort": "x"}}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": schema_format({"not": {"type": "string"}})}),
    ("response_format.json_schema.schema", {"response_format": schema_format({"$ref": "#/$defs/missing"})}),
    ("response_format.json_schema.schema", {"response_format": schema_format({"type": "integer", "minimum": "3"})}),
    ("response_format.json_schema.schema", {"response_format": schema_format(nested_schema(400))}),
    ("guided_json", {"guided_json": {"type": "nothing"}}),
    ("guided_json", {"guided_json": "{"}),
    ("guided_json", {"guided_json": "[]"}),
    ("guided_json", {"guided_json": 7}),
    ("guided_regex", {"guided_regex": "(a"}),
    ("guided_regex", {"guided_regex": "(?=a)b"}),
    ("guided_regex", {"guided_regex": ""}),
    ("guided_choice", {"guided_choice": []}),
    ("guided_choice", {"guided_choice": ["a", ""]}),
    ("guided_choice", {"guided_choice": "a"}),
    ("guided_grammar", {"guided_grammar": "root: 'a'"}),
    ("guided_grammar", {"guided_grammar": "start: <|end|>"}),
    ("guided_grammar", {"guided_grammar": "start: @other"}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"not": {}}}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "["}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": "start: nobody"}}),
    ("structured_outputs.structural_tag", {"structured_outputs": {"structural_tag": "{}"}}),
    ("structured_outputs.regex", {"structured_outputs": {"json": {}, "regex": "a"}}),
    *(
        (param, {"tools": [TOOL], "tool_choice": choice, **form})
        for choice in ("required", {"type": "function", "function": {"name": "f"}})
        for param, form in (
            ("structured_outputs.json", {"structured_outputs": {"json": {"type": "object"}}}),
            ("guided_choice", {"guided_choice": ["a"]}),
        )
    ),
    *(
        (
            "response_format.json_schema.name",
            {"response_format": {"type": "json_schema", "json_schema": {"name": name}}},
        )
        for name in ("", "a b", "é", "x" * 65, "a\n")
    ),
    ("guided_regex", {"guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tool_choice": "required", "tools": [{"type": "web_search"}]}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}),
    ("tools", {"tools": [function_tool(CONDITIONAL, strict=True)]}),
    ("tools", {"tools": [function_tool({"$ref": "http://elsewhere/"})], "tool_choice": "required"}),
    ("tool_choice", {"tool_choice": allowed("auto", "g"), "tools": [TOOL]}),
    ("tool_choice", {"tool_choice": allowed("required"), "tools": [TOOL]}),
    ("tool_choice.allowed_tools.mode", {"tool_choice": allowed("never", "f"), "tools": [TOOL]}),
    ("tool_choice.type", {"tool_choice": {"type": "grammar", "grammar": {"name": "f"}}, "tools": [TOOL]}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "no spaces please"}}]}),
    ("tools", {"tools": [TOOL, TOOL]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("functions", {"functions": [{"name": "f"}]}),
    ("modalities", {"modalities": ["audio"]}),
    ("bad_words", {"bad_words": ["a"]}),
    ("verbosity", {"verbosity": "endless"}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"a": 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"model_identity": "You are a cat."}}),
    ("chat_template_kwargs.reasoning_effort", {"chat_template_kwargs": {"reasoning_effort": "extreme"}}),
    ("continue_final_message", {"continue_final_message": True}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "hi"}),
    ("messages[0].role", {"messages": [{"role": "wizard", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[0].content[0].type", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages[0].content[0].text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("messages[1].tool_call_id", {"messages": [USER, {"role": "tool", "content": "x"}]}),
    ("messages", {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "unknown"}]}),
    ("messages[0].tool_calls", {"messages": [{**USER, "tool_calls": [CALL]}]}),
    (
        "messages[1].tool_calls[0].function.arguments",
        {
            "messages": [
                USER,
                {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {}}}]},
            ]
        },
    ),
]


@pytest.mark.long
@pytest.mark.parametrize(("param", "body"), CHAT, ids=lambda v: str(v)[:60])
def test_bad_value_in_a_chat_completion(scripted: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    error = refused(scripted, "/v1/chat/completions", {"messages": [USER], **body})
    assert error["param"] == param
    assert param in error["message"]
    assert error["type"] == "invalid_request_error"


TEXT: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": [[1], []]}),
    ("prompt", {"prompt": [[1, "a"]]}),
    ("prompt", {"prompt": [VOCAB_SIZE]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": 5}),
    ("suffix", {"prompt": "a", "suffix": "b"}),
    ("best_of", {"prompt": "a", "best_of": 2}),
    ("guided_json", {"prompt": "a", "guided_json": {"not": {}}}),
    ("guided_regex", {"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}),
    ("structured_outputs.regex", {"prompt": "a", "structured_outputs": {"regex": "["}}),
    ("use_beam_search", {"prompt": "a", "use_beam_search": True}),
    ("prompt_logprobs", {"prompt": "a", "prompt_logprobs": 0}),
    ("truncate_prompt_tokens", {"prompt": "a", "truncate_prompt_tokens": 5}),
    ("logprobs", {"prompt": "a", "logprobs": 21}),
    ("logprobs", {"prompt": "a", "logprobs": True}),
    ("max_tokens", {"prompt": "a", "max_tokens": 0}),
    ("echo", {"prompt": "a", "echo": 1}),
]


@pytest.mark.long
@pytest.mark.parametrize(("param", "body"), TEXT, ids=lambda v: str(v)[:60])
def test_bad_value_in_a_text_completion(scripted: ScriptedServer, param: str, body: dict[str, Any]) -> None:
    error = refused(scripted, "/v1/completions", body)
    assert error["param"] == param
    assert param in error["message"]


def test_unknown_model(scripted: ScriptedServer) -> None:
    error = refused(scripted, "/v1/chat/completions", {"model": "gpt-9", "messages": [USER]}, 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "gpt-9" in error["message"]
    assert refused(scripted, "/v1/completions", {"model": "gpt-9", "prompt": "a"}, 404)["code"] == "model_not_found"


def test_the_context_is_as_long_as_the_engine_says_now(scripted: ScriptedServer) -> None:
    """A rolling update of a cluster changes it under a server that goes on."""
    asked = {"messages": [{"role": "user", "content": "y" * (MAX_MODEL_LEN - 500)}], "max_tokens": 9}
    info = scripted.engine.info
    assert info is not None
    scripted.engine.info = replace(info, max_model_len=1024)
    assert "1024 tokens" in refused(scripted, "/v1/chat/completions", asked)["message"]
    assert "1024 tokens" in refused(scripted, "/v1/completions", {"prompt": "x" * 1100})["message"]
    scripted.engine.info = replace(info, max_model_len=8 * MAX_MODEL_LEN)
    asked["max_tokens"] = 4 * MAX_MODEL_LEN
    assert scripted.post("/v1/chat/completions", asked).status_code == 200


def test_context_overflow_shows_the_arithmetic(scripted: ScriptedServer) -> None:
    body = {"prompt": "x" * (MAX_MODEL_LEN - 10), "max_tokens": 11}
    error = refused(scripted, "/v1/completions", body)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "prompt"
    for number in (MAX_MODEL_LEN, MAX_MODEL_LEN - 10, 11, MAX_MODEL_LEN + 1):
        assert str(number) in error["message"]
    message = {"role": "user", "content": "y" * MAX_MODEL_LEN}
    error = refused(scripted, "/v1/chat/completions", {"messages": [message]})
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    scripted.says("ok")
    assert scripted.post("/v1/completions", {**body, "max_tokens": 10}).status_code == 200


@pytest.mark.parametrize(
    ("path", "messages", "limit"),
    [
        ("/v1/chat/completions", "messages", "max_tokens"),
        ("/v1/chat/completions", "messages", "max_completion_tokens"),
        pytest.param("/v1/responses", "input", "max_output_tokens", marks=pytest.mark.needs("apis")),
    ],
)
def test_more_tokens_than_the_context_are_at_fault_themselves(
    scripted: ScriptedServer, path: str, messages: str, limit: str
) -> None:
    most = MAX_MODEL_LEN - scripted.post("/tokenize", {"messages": [USER]}).json()["count"]
    error = refused(scripted, path, {messages: [USER], limit: MAX_MODEL_LEN})
    assert (error["code"], error["param"]) == ("context_length_exceeded", limit)
    assert error["message"].endswith(f"; lower '{limit}' to {most} or less.")
    assert "shorten" not in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        ("/v1/chat/completions", {}, "max_tokens"),
        ("/v1/messages", {"max_tokens": 1}, "max_tokens"),
        ("/v1/responses", {}, "max_output_tokens"),
        ("/v1/completions", {"max_tokens": 1}, "max_tokens"),
    ],
)
def test_a_prompt_that_fills_the_context_is_too_long(
    scripted: ScriptedServer, path: str, body: dict[str, Any], limit: str
) -> None:
    """Fewer tokens to generate do not help, so none are asked for."""
    rest = MAX_MODEL_LEN
    if path != "/v1/completions":
        rest -= scripted.post("/tokenize", {"messages": [{"role": "user", "content": ""}]}).json()["count"]

    def answer(num_tokens: int, **more: Any) -> Any:
        content = "x" * (rest + num_tokens - MAX_MODEL_LEN)
        said = (
            {"prompt": content} if path == "/v1/completions" else {"messages": [{"role": "user", "content": content}]}
        )
        said = {"input": content} if path == "/v1/responses" else said
        return scripted.post(path, {"model": scripted.service.names[0], **body, **said, **more})

    for num_tokens in (MAX_MODEL_LEN, MAX_MODEL_LEN + 1):
        response = answer(num_tokens, **{limit: 7})
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "lower" not in message
        assert "input length" not in message
        assert f"prompt is too long: {num_tokens} " in message
        if path == "/v1/messages":
            most = min(MAX_MODEL_LEN, num_tokens - 1)
            assert message == f"prompt is too long: {num_tokens} tokens > {most} maximum"
        elif num_tokens == MAX_MODEL_LEN:
            assert f" + 1 to generate = {MAX_MODEL_LEN + 1};" in message
    t = scripted.tokenizer
    scripted.says(*("!" if path == "/v1/completions" else (t.channel, "final", t.message, "", t.return_)))
    assert answer(MAX_MODEL_LEN - 1, **{limit: 1}).status_code == 200


def test_unknown_paths_and_methods(scripted: ScriptedServer) -> None:
    assert refused(scripted, "/v1/nothing", {}, 404)["code"] == "unknown_url"
    assert refused(scripted, "/v1/models", {}, 405)["code"] == "unknown_url"


def test_unknown_parameters_that_change_nothing_are_ignored(scripted: ScriptedServer) -> None:
    ignored = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "parallel_tool_calls": False,
        "service_tier": "auto",
        "response_format": {"type": "text"},
        "functions": None,
        "modalities": ["text"],
        "verbosity": "medium",
        "bad_words": [],
        "use_beam_search": False,
    }
    for given in ({}, ignored):
        scripted.chat(seed=1, **given)
    plain, other = scripted.engine.requests
    assert (other.prompt_token_ids, other.sampling) == (plain.prompt_token_ids, plain.sampling)


def test_a_bug_is_a_plain_500(scripted: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("a secret")

    monkeypatch.setattr(scripted.model, "ready", broken)
    error = refused(scripted, "/v1/chat/completions", {"messages": [USER]}, 500)
    assert "secret" not in error["message"]
    assert scripted.post("/v1/chat/completions", {"messages": [USER]}).headers["x-request-id"]
    counted = scripted.get("/metrics").text
    assert 'oscine:http_responses_total{path="/v1/chat/completions",status="500"} 2.0' in counted


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [USER], "max_tokens": 5000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 5000}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 5000}),
        ("/v2/models/{model}/generate", {"text_input": "x", "max_tokens": 5000}),
        ("/api/chat", {"messages": [{**USER, "content": "x" * 5000}]}),
        ("/api/generate", {"prompt": "x" * 5000}),
        ("/api/generate", {"prompt": "x" * 5000, "raw": True}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_overflow_is_said_in_the_words_that_clients_look_for(
    scripted: ScriptedServer, path: str, body: dict[str, Any], stream: bool
) -> None:
    model = scripted.service.names[0]
    response = scripted.post(path.format(model=model), {"model": model, "stream": stream, **body})
    assert response.status_code == 400
    error = response.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
    assert "prompt is too long" in message
    if not isinstance(error, str):
        assert error["code"] == "context_length_exceeded"


LONG = "x\n" * 10_000


@pytest.mark.parametrize(
    ("path", "body", "status", "start", "end"),
    [
        ("/v1/chat/completions", {"messages": [USER], "model": LONG}, 404, "The model 'x\\nx", "."),
        (
            "/v1/chat/completions",
            {"messages": [USER], "tool_choice": LONG},
            400,
            "Invalid value for 'tool_choice'",
            ".",
        ),
        ("/v1/responses", {"input": [{"type": LONG}]}, 400, "Invalid value for 'input[0].type'", "are not supported."),
        (
            "/v1/responses",
            {"input": "a", "previous_response_id": LONG},
            400,
            "Invalid value for 'previous_response_id'",
            "at most 512.",
        ),
        ("/v1/responses", {"input": "a", "previous_response_id": LONG[:512]}, 404, "The response 'x\\nx", "."),
    ],
)
def test_a_message_is_one_short_line(
    scripted: ScriptedServer, path: str, body: Any, status: int, start: str, end: str
) -> None:
    message = refused(scripted, path, body, status)["message"]
    assert message.startswith(start)
    assert message.endswith(end)
    assert message.isprintable()
    assert len(message) < 2000
