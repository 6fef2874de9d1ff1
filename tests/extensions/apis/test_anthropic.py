"""Anthropic's Messages API: the real client against the application over a scripted engine, and the embedded model."""

import json
from collections.abc import Awaitable, Callable, Iterator
from itertools import groupby
from typing import Any, TypeVar

import anthropic
import httpx2
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from oscine.api.app import create_app
from oscine.engine.wire.stream import EngineDied, EngineOverloaded
from oscine.types import GenerationOutput
from tests.api.scripted_engine import MAX_MODEL_LEN
from tests.api.scripted_server import ScriptedServer
from tests.extensions.apis.response_stream import parse
from tests.server import ServerProcess

T = TypeVar("T")
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)
ADD: Any = {
    "name": "add",
    "description": "Adds.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
ASKED: Any = {"model": "fake", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def server(model_folder: Any) -> Iterator[ScriptedServer]:
    with ScriptedServer(model_folder, served_model_names=("fake",), api_keys=("secret",)) as server:
        yield server


def ask(server: ScriptedServer, use: Callable[[anthropic.AsyncAnthropic], Awaitable[T]], key: str = "secret") -> T:
    async def work() -> T:
        transport = httpx2.ASGITransport(create_app(server.service), raise_app_exceptions=False)  # type: ignore[arg-type]
        http = httpx2.AsyncClient(transport=transport)
        async with anthropic.AsyncAnthropic(
            api_key=key, base_url="http://localhost", http_client=http, max_retries=0
        ) as client:
            return await use(client)

    return server.run(work())


def create(server: ScriptedServer, **parameters: Any) -> Message:
    message = ask(server, lambda client: client.messages.create(**{**ASKED, **parameters}))
    assert isinstance(message, Message)
    return Message.model_validate(message.model_dump(), strict=True)  # the client itself accepts anything


async def _streamed(client: anthropic.AsyncAnthropic, parameters: Any) -> tuple[list[Any], Message]:
    async with client.messages.stream(**{**ASKED, **parameters}) as stream:
        events = [event async for event in stream]
        return events, await stream.get_final_message()


def raw_events(server: ScriptedServer, **parameters: Any) -> list[dict[str, Any]]:
    """Each validated by the client's own types."""
    content = json.dumps({**ASKED, "stream": True, **parameters})

    async def post(client: anthropic.AsyncAnthropic) -> str:
        response = await client.post("/v1/messages", body=json.loads(content), cast_to=httpx2.Response)
        return response.text

    events = parse(ask(server, post))
    for event in events:
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event, strict=True)
    return events


def said(message: Message) -> list[dict[str, Any]]:
    """What it consists of, but for the ids of calls and what only the client's own helper adds."""
    return [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]


def say(server: ScriptedServer, size: int = 3, answer: str = "It is 4.") -> None:
    t = server.tokenizer
    server.says(
        *(t.channel, "analysis", t.message, "2 + 2", t.end, t.start, "assistant"),
        *(t.channel, "final", t.message, answer, t.return_),
        size=size,
    )


def say_calls(server: ScriptedServer, *arguments: str, size: int = 3) -> None:
    t = server.tokenizer
    parts: list[str | int] = []
    for thought in ("Well.", "I add."):
        parts += [t.channel, "analysis", t.message, thought, t.end, t.start, "assistant"]
    for text in arguments:
        parts += [t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, text]
        parts += [t.call] if text is arguments[-1] else [t.end, t.start, "assistant"]
    server.says(*parts, size=size)


def test_a_message(server: ScriptedServer) -> None:
    say(server)
    message = create(server)
    (block,) = message.content  # whoever does not ask for thinking gets none
    assert block.type == "text"
    assert block.text == "It is 4."
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        "fake",
        "end_turn",
        None,
    )
    (request,) = server.engine.requests
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == len(request.prompt_token_ids)
    assert usage.cache_read_input_tokens == 3
    assert usage.output_tokens == len("analysis" + "2 + 2" + "assistant" + "final" + "It is 4.") + 7
    assert usage.output_tokens_details is not None
    assert usage.output_tokens_details.thinking_tokens == len("2 + 2")
    assert request.sampling.max_tokens == 500


@pytest.mark.parametrize("size", [1, 4, 20, 1000])
def test_a_stream_is_the_message(server: ScriptedServer, size: int) -> None:
    say(server, size)
    whole = create(server, thinking=THINKING, max_tokens=1500)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert whole.content[0].type == "thinking"
    assert whole.content[0].thinking == "2 + 2"
    assert whole.content[0].signature
    events = raw_events(server, thinking=THINKING, max_tokens=1500)
    assert [kind for kind, _ in groupby(event["type"] for event in events)] == [
        *("message_start", "ping"),
        *("content_block_start", "content_block_delta", "content_block_stop") * 2,
        *("message_delta", "message_stop"),
    ]
    assert [event["index"] for event in events if event["type"] == "content_block_start"] == [0, 1]
    deltas = [event["delta"]["type"] for event in events if event["type"] == "content_block_delta"]
    assert [kind for kind, _ in groupby(deltas)] == ["thinking_delta", "signature_delta", "text_delta"]
    assert deltas.count("signature_delta") == 1
    _, final = ask(server, lambda client: _streamed(client, {"thinking": THINKING, "max_tokens": 1500}))
    assert said(final) == said(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert final.stop_reason == "end_turn"


@pytest.mark.parametrize("size", [1, 4, 20, 1000])
def test_calls(server: ScriptedServer, size: int) -> None:
    say_calls(server, '{"a": "\u00e9"}', '{"a":2}', size=size)
    whole = create(server, tools=[ADD])
    assert [(block.type, block.name, block.input) for block in whole.content if block.type == "tool_use"] == [
        ("tool_use", "add", {"a": "\u00e9"}),
        ("tool_use", "add", {"a": 2}),
    ]
    assert whole.stop_reason == "tool_use"
    events, final = ask(server, lambda client: _streamed(client, {"tools": [ADD]}))
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"a": "\u00e9"}, {"a": 2}]
    assert len({block.id for block in final.content if block.type == "tool_use"}) == 2
    assert final.stop_reason == "tool_use"
    assert [event.type for event in events].count("content_block_stop") == 2


def test_a_call_without_arguments_and_one_that_is_no_json(server: ScriptedServer) -> None:
    say_calls(server, "")
    assert [block.input for block in create(server, tools=[ADD]).content if block.type == "tool_use"] == [{}]
    say_calls(server, "[1")
    (call,) = create(server, tools=[ADD]).content
    assert call.type == "tool_use"
    assert call.input == {"invalid_json": "[1"}


def test_thinking_that_is_not_to_be_read_has_a_signature(server: ScriptedServer) -> None:
    say(server)
    for thinking in ({**THINKING, "display": "omitted"}, {"type": "adaptive", "display": "omitted"}):
        first, second = create(server, thinking=thinking, max_tokens=1500).content
        assert first.type == "thinking"
        assert first.thinking == ""
        assert first.signature
        assert second.type == "text"


@pytest.mark.parametrize(
    ("parameters", "effort"),
    [
        ({}, "medium"),
        ({"thinking": {"type": "disabled"}}, "low"),
        ({"thinking": {"type": "adaptive"}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "low"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8192}}, "medium"),
        ({"thinking": {"type": "enabled", "budget_tokens": 20000}}, "high"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "high"),
        ({"output_config": {"effort": "minimal"}}, "low"),
    ],
    ids=str,
)
def test_effort(model_folder: Any, parameters: Any, effort: str) -> None:
    with ScriptedServer(model_folder) as server:
        say(server)
        counted = {"messages": ASKED["messages"], "model": server.service.names[0], **parameters}
        assert server.post("/v1/messages/count_tokens", counted).status_code == 200
        body = {**counted, "max_tokens": 10}
        thinking = parameters.get("thinking", {})
        if thinking.get("budget_tokens"):  # the scripted model's context is too small for a greater limit
            body["thinking"] = {**thinking}
        response = server.post("/v1/messages", body)
        if response.status_code == 200:
            prompt = server.tokenizer.decode(server.engine.requests[0].prompt_token_ids)
            assert f"Reasoning: {effort}" in prompt


def test_the_conversation_reaches_the_model(server: ScriptedServer) -> None:
    say(server)
    messages: Any = [
        {"role": "user", "content": "Add 1."},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "I must add.", "signature": "c2ln"},
                {"type": "redacted_thinking", "data": "xyz"},
                {"type": "text", "text": "One moment."},
                {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "two"}]},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "system", "content": "Be quick."},
    ]
    system: Any = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]
    tools: Any = [ADD, {"type": "web_search_20250305", "name": "web_search"}]
    sampled: Any = {"extra_body": {"temperature": 0.5, "top_k": 7}}
    create(server, messages=messages, system=system, tools=tools, metadata={"user_id": "me"}, **sampled)
    (request,) = server.engine.requests
    prompt = server.tokenizer.decode(request.prompt_token_ids)
    in_order = [
        *("Be brief.Be kind.", "type add = ", "<|start|>user<|message|>Add 1.<|end|>", "I must add."),
        *("<|channel|>commentary<|message|>One moment.", "to=functions.add", '{"a":1}', "functions.add to=assistant"),
        *("two<|end|>", "<|start|>user<|message|>And now?<|end|>", "Be quick.", "<|start|>assistant"),
    ]
    places = [prompt.find(text) for text in in_order]
    assert -1 not in places, prompt
    assert places[:-1] == sorted(places[:-1])
    assert "web_search" not in prompt
    assert (request.sampling.temperature, request.sampling.top_k) == (0.5, 7)
    counted = ask(
        server,
        lambda client: client.messages.count_tokens(model="fake", messages=messages, system=system, tools=tools),
    )
    assert counted.input_tokens == len(request.prompt_token_ids)


def test_what_the_choice_of_tools_and_the_format_ask_for_is_a_grammar(server: ScriptedServer) -> None:
    say(server)
    other = {**ADD, "name": "subtract"}

    def grammar(**parameters: Any) -> str | None:
        create(server, tools=[ADD, other], **parameters)
        return server.engine.requests[-1].sampling.grammar

    assert grammar() is grammar(tool_choice={"type": "auto"}) is None
    required = grammar(tool_choice={"type": "any"})
    assert required is not None
    assert "functions.add" in required
    assert "functions.subtract" in required
    named = grammar(tool_choice={"type": "tool", "name": "subtract"})
    assert named is not None
    assert "functions.add" not in named
    assert grammar(tool_choice={"type": "any", "disable_parallel_tool_use": True}) != required
    assert grammar(tool_choice={"type": "none"}) is None
    assert "type add" not in server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert grammar(output_config={"format": {"type": "json_schema", "schema": schema}}) is not None


def test_a_result_that_is_an_error_says_so(server: ScriptedServer) -> None:
    say(server)
    use = {"type": "tool_use", "id": "t", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no network", "is_error": True}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    create(server, messages=[*ASKED["messages"], *turns])
    assert "Error: no network" in server.tokenizer.decode(server.engine.requests[0].prompt_token_ids)


def test_reasoning_is_kept_between_calls_though_the_client_never_saw_it(server: ScriptedServer) -> None:
    say_calls(server, "{}")
    called = create(server, tools=[ADD])
    (use,) = called.content
    assert use.type == "tool_use"
    say(server)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "2"}
    turns = [{"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    create(server, messages=[*ASKED["messages"], *turns], tools=[ADD])
    prompt = server.tokenizer.decode(server.engine.requests[-1].prompt_token_ids)
    assert "<|channel|>analysis<|message|>Well.\n\nI add.<|end|>" in prompt


@pytest.mark.parametrize("size", [1, 20])
def test_stop_sequences(server: ScriptedServer, size: int) -> None:
    say(server, size, answer="one 2 + 2 STOP three")
    message = create(server, stop_sequences=["STOP", "never"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert [block.text for block in message.content if block.type == "text"] == ["one 2 + 2 "]
    _, final = ask(server, lambda client: _streamed(client, {"stop_sequences": ["STOP"]}))
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "STOP")


def test_the_limit(server: ScriptedServer) -> None:
    t = server.tokenizer
    server.says(t.channel, "analysis", t.message, "thinking", finish="length")
    message = create(server, thinking={"type": "adaptive"})
    assert message.stop_reason == "max_tokens"
    assert [block.type for block in message.content] == ["thinking"]


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "messages"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "text"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0].text",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "unknown"}]}]},
            "unknown",
        ),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"extra_body": {"temperature": 3.0}}, "temperature"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 500}}, "thinking.budget_tokens"),
        ({"tools": [{"name": "no schema"}]}, "tools[0].input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
            "output_config.format.schema",
        ),
        ({"system": [{"type": "image"}]}, "system[0].type"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_cannot_be_honoured_is_refused_in_anthropics_words(
    server: ScriptedServer, parameters: Any, said: str
) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(server, **parameters)
    assert caught.value.type == "invalid_request_error"
    assert said in caught.value.message
    assert not server.engine.requests


def test_errors_have_anthropics_shape(server: ScriptedServer) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        create(server, model="claude")
    assert missing.value.type == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        ask(server, lambda client: client.messages.create(**ASKED), key="wrong")
    assert unknown.value.type == "authentication_error"
    server.engine.script = lambda request: [EngineOverloaded("too many")]
    with pytest.raises(anthropic.InternalServerError) as full:
        create(server)
    assert (full.value.status_code, full.value.type) == (529, "overloaded_error")
    server.engine.script = lambda request: [EngineDied("it crashed")]
    with pytest.raises(anthropic.InternalServerError) as died:
        create(server)
    assert (died.value.status_code, died.value.type) == (503, "api_error")


def test_the_client_finds_its_request_id(server: ScriptedServer) -> None:
    say(server)
    message = ask(server, lambda client: client.messages.create(**ASKED, extra_headers={"x-request-id": "mine"}))
    assert message._request_id == "mine"


def test_a_failure_midway_is_an_error_event(server: ScriptedServer) -> None:
    t = server.tokenizer
    ids = [t.channel, *b"final", t.message, *b"Hel"]
    server.engine.script = lambda r: [GenerationOutput(r.request_id, ids), EngineDied("it crashed")]
    *_, last = raw_events(server)
    assert last["type"] == "error"
    assert last["error"]["type"] == "api_error"
    with pytest.raises(anthropic.APIStatusError, match="it crashed"):
        ask(server, lambda client: _streamed(client, {}))


def test_the_tool_runner_goes_on_without_threads(server: ScriptedServer) -> None:
    """The client asks for a thread first, and repeats the request without one where threads are not supported."""
    t = server.tokenizer
    call = (t.channel, "commentary to=functions.add ", t.constrain, "json", t.message, '{"a": 1, "b": 2}', t.call)
    says = [server.says(*call), server.says(t.channel, "final", t.message, "It is 3.", t.return_)]
    server.engine.script = lambda request: says[len(server.engine.requests) - 1](request)
    sums = []

    @anthropic.beta_async_tool
    async def add(a: int, b: int) -> str:
        sums.append(a + b)
        return str(a + b)

    async def run(client: anthropic.AsyncAnthropic) -> Any:
        return await client.beta.messages.tool_runner(**ASKED, tools=[add]).until_done()

    last = ask(server, run)
    assert (sums, last.content[0].text) == ([3], "It is 3.")
    assert "3" in t.decode(server.engine.requests[1].prompt_token_ids).rpartition("functions.add to=assistant")[2]


def test_threads_are_refused_as_clients_know_it(server: ScriptedServer) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(server, lambda client: client.messages.create(**ASKED, extra_body={"thread": {"type": "new"}}))
    error: Any = caught.value.body
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["details"] == {"error_code": "thread_unsupported_request", "unsupported": []}
    assert server.engine.requests == []


def test_models_in_the_shape_that_the_client_asks_for(server: ScriptedServer) -> None:
    async def models(client: anthropic.AsyncAnthropic) -> Any:
        return [model async for model in client.models.list()], await client.models.retrieve("fake")

    listed, one = ask(server, models)
    assert listed == [one]
    one.model_validate(one.model_dump(), strict=True)
    assert (one.type, one.id, one.display_name, one.max_input_tokens) == ("model", "fake", "fake", MAX_MODEL_LEN)
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(server, lambda client: client.models.retrieve("none"))
    missing: Any = caught.value.body
    assert (missing["type"], missing["error"]["type"]) == ("error", "not_found_error")
    openai = server.get("/v1/models", headers={"Authorization": "Bearer secret"}).json()
    assert (openai["object"], openai["data"][0]["object"]) == ("list", "model")


def test_the_embedded_model_thinks_calls_and_answers(nano_server: ServerProcess) -> None:
    model, weather = (
        "oscine-nano",
        {
            "name": "get_weather",
            "description": "Gets the current weather for a city.",
            "input_schema": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "The name of the city"}},
                "required": ["city"],
            },
        },
    )
    asked: Any = {"model": model, "max_tokens": 1500, "extra_body": {"temperature": 0}, "tools": [weather]}
    question: Any = {"role": "user", "content": "What is the weather in Lisbon?"}
    with anthropic.Anthropic(base_url=nano_server.url, api_key="none", max_retries=0) as client:
        called = client.messages.create(**asked, messages=[question], thinking={"type": "adaptive"})
        thinking, use = called.content
        assert thinking.type == "thinking"
        assert use.type == "tool_use"
        assert (use.name, use.input) == ("get_weather", {"city": "Lisbon"})
        with client.messages.stream(**asked, messages=[question], thinking={"type": "adaptive"}) as stream:
            streamed = stream.get_final_message()
        assert said(streamed) == said(called)
        result = {"type": "tool_result", "tool_use_id": use.id, "content": '{"temperature": 17, "sky": "sunny"}'}
        turns: Any = [question, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
        forced = client.messages.create(**asked, messages=turns[:1], tool_choice={"type": "any"})
        assert forced.stop_reason == "tool_use"
        answer = client.messages.create(**asked, messages=turns)
        (text,) = answer.content
        assert text.type == "text"
        assert "17" in text.text
        assert (answer.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.parametrize("stream", [True, False])
def test_an_overflow_is_said_in_anthropics_two_sentences(scripted: ScriptedServer, stream: bool) -> None:
    model = {"model": scripted.service.names[0], "stream": stream}

    def refused(content: str, max_tokens: int) -> tuple[str, int]:
        """The message, and the tokens of the prompt."""
        asked = {**model, "messages": [{"role": "user", "content": content}]}
        response = scripted.post("/v1/messages", {**asked, "max_tokens": max_tokens})
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"
        counted = scripted.post("/v1/messages/count_tokens", asked).json()
        return response.json()["error"]["message"], counted["input_tokens"]

    for length in (MAX_MODEL_LEN, 1.9 * MAX_MODEL_LEN, 40 * MAX_MODEL_LEN):
        message, count = refused("x" * int(length), 7)
        known = min(count, 2 * MAX_MODEL_LEN)
        more = "" if count == known else " (or more: its tokens were not counted further)"
        assert message == f"prompt is too long: {known} tokens > {MAX_MODEL_LEN} maximum{more}"
    message, count = refused("hi", MAX_MODEL_LEN)
    assert message == (
        f"input length and `max_tokens` exceed context limit: {count} + {MAX_MODEL_LEN} > {MAX_MODEL_LEN}, "
        "decrease input length or `max_tokens` and try again"
    )


BILLING = "x-anthropic-billing-header: cc_version=1.0.0.abc; cch=1f3;"


@pytest.mark.parametrize(
    ("system", "seen"),
    [
        (BILLING, ""),
        (f"{BILLING}\n\nBe brief.", "Be brief."),
        (f"Be brief.\n{BILLING}", f"Be brief.\n{BILLING}"),
        ([{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}], "Be brief."),
        ([{"type": "text", "text": "Be brief. "}, {"type": "text", "text": f"About {BILLING}"}], f"About {BILLING}"),
        ([{"type": "text", "text": BILLING}], ""),
    ],
)
def test_what_differs_per_conversation_is_left_out_of_the_prompt(
    scripted: ScriptedServer, system: Any, seen: str
) -> None:
    named = {**ASKED, "model": scripted.service.names[0]}
    for body in ({"system": system}, {"messages": [{"role": "system", "content": system}, *ASKED["messages"]]}):
        assert scripted.post("/v1/messages", {**named, **body}).status_code == 200
        prompt = scripted.tokenizer.decode(scripted.engine.requests[-1].prompt_token_ids)
        assert f"{seen}<|end|>" in prompt
        assert prompt.count(BILLING) == seen.count(BILLING)
        assert ("<|start|>developer" in prompt) is bool(seen)
        counted = {key: value for key, value in {**named, **body}.items() if key != "max_tokens"}
        tokens = scripted.post("/v1/messages/count_tokens", counted).json()["input_tokens"]
        assert tokens == len(scripted.engine.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("kind", ["adaptive", "enabled"])
def test_updates_of_thinking_are_shown_as_the_summary_is(server: ScriptedServer, kind: str) -> None:
    say(server)
    budget = {"budget_tokens": 400} if kind == "enabled" else {}
    shown = [create(server, thinking={"type": kind, "display": how, **budget}) for how in ("summarized", "updates")]
    assert said(shown[0]) == said(shown[1])
    assert shown[1].content[0].type == "thinking"
    assert shown[1].content[0].thinking == "2 + 2"
