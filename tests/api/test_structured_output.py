"""Enforced forms and tool choices: the real OpenAI client against a real server with the embedded model."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tests.server import ServerProcess

MODEL = "oscine-nano"
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_tokens": 400}
INTERVAL = 7


class Person(BaseModel):
    name: str
    age: int
    mood: Literal["glad", "sad"]


def function(name: str, properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": schema, **more}}


TOOLS: Any = [
    function("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}),
    function("paint", {"color": {"enum": ["red", "green"]}, "layers": {"type": "integer", "maximum": 9, "minimum": 0}}),
]


@pytest.fixture(scope="module")
def slow_client() -> Iterator[openai.OpenAI]:
    """Of a server whose outputs have INTERVAL tokens each."""
    options = ("--stream-interval", str(INTERVAL), "--date", "2025-08-05", "--log-level", "warning")
    with ServerProcess(*options) as server, client_of(server) as client:
        yield client


@pytest.fixture(scope="module")
def client(nano_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with client_of(nano_server) as client:
        yield client


def client_of(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def ask(client: openai.OpenAI, question: str, **parameters: Any) -> ChatCompletion:
    answer = client.chat.completions.create(messages=user(question), **{**GREEDY, **parameters})
    assert isinstance(answer, ChatCompletion)
    return answer


def content(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def is_valid_call(name: str, arguments: str) -> bool:
    values = json.loads(arguments)
    if name == "add":
        return values.keys() == {"a", "b"} and all(type(value) is int for value in values.values())
    return values.keys() == {"color", "layers"} and values["color"] in ("red", "green") and 0 <= values["layers"] <= 9


def test_parse_gives_what_the_type_says_however_unlikely(client: openai.OpenAI) -> None:
    """No question is about a person, and the temperature is high: nothing but the grammar makes this one."""
    sampled: Any = {**GREEDY, "temperature": 1.5}
    for seed, question in enumerate(("What is 27 + 58?", "Hello there!", "Anna is 31 years old.")):
        parsed = client.chat.completions.parse(messages=user(question), response_format=Person, seed=seed, **sampled)
        (choice,) = parsed.choices
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Person)
        assert (choice.message.model_extra or {})["reasoning"]


def test_json_object(client: openai.OpenAI) -> None:
    answer = ask(client, "Anna is 31 years old.", response_format={"type": "json_object"}, n=2)
    for choice in answer.choices:
        assert isinstance(json.loads(choice.message.content or ""), dict)


@pytest.mark.parametrize(
    ("parameters", "form"),
    [
        ({"guided_regex": r"\d{3}-[a-f]{2}"}, r"\d{3}-[a-f]{2}"),
        ({"guided_choice": ["maybe", "perhaps"]}, "maybe|perhaps"),
        ({"guided_grammar": 'start: "<" WORD ("," WORD)? ">"\nWORD: /[xyz]{2}/'}, "<[xyz]{2}(,[xyz]{2})?>"),
        (
            {"guided_json": {"type": "array", "items": {"enum": [7]}, "minItems": 2, "maxItems": 2}},
            r"\[\s*7\s*,\s*7\s*\]",
        ),
        ({"structured_outputs": {"regex": "[ab]{9}"}}, "[ab]{9}"),
        ({"structured_outputs": {"choice": ["left"]}}, "left"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_forms_by_their_names_in_vllm(client: openai.OpenAI, parameters: dict[str, Any], form: str) -> None:
    short: Any = {"max_tokens": 200, "reasoning_effort": "low"}
    assert re.fullmatch(form, content(ask(client, "What is 3 + 4?", extra_body=parameters, **short)))
    raw = client.completions.create(prompt="Once", extra_body=parameters, **GREEDY).choices[0]
    assert re.fullmatch(form, raw.text)
    assert raw.finish_reason == "stop"


def test_a_required_call_where_the_model_would_answer(client: openai.OpenAI) -> None:
    assert ask(client, "Hello there!", tools=TOOLS).choices[0].finish_reason == "stop"
    (choice,) = ask(client, "Hello there!", tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        assert is_valid_call(call.function.name, call.function.arguments)
    assert choice.message.tool_calls


def test_a_named_function_is_the_one_that_is_called(client: openai.OpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "paint"}}
    for effort in ("low", "high"):
        answer = ask(client, "What is 27 + 58?", tools=TOOLS, tool_choice=named, reasoning_effort=effort)
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "paint"
        assert is_valid_call("paint", call.function.arguments)


def test_strict_functions_or_an_answer_in_the_form_asked_for(client: openai.OpenAI) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": Person.model_json_schema()}}
    (choice,) = ask(client, "Hello there!", tools=strict, response_format=form).choices
    if choice.finish_reason == "stop":
        Person.model_validate_json(choice.message.content or "")
    for call in choice.message.tool_calls or []:
        assert call.type == "function"
        assert is_valid_call(call.function.name, call.function.arguments)


def test_no_call_where_none_may_be(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "Add 3 and 4.", tools=TOOLS, tool_choice="none").choices
    assert not choice.message.tool_calls


PARSED: Any = {"messages": user("Anna is 31 years old."), "response_format": Person, **GREEDY}
REQUIRED: Any = {"messages": user("Hello there!"), "tools": TOOLS, "tool_choice": "required", **GREEDY}


@pytest.fixture(scope="module")
def whole(client: openai.OpenAI) -> tuple[Person | None, list[str]]:
    """Of two answers that are not streamed: what the first one is, and the arguments of the second one's calls."""
    parsed = client.chat.completions.parse(**PARSED).choices[0].message.parsed
    called = client.chat.completions.create(**REQUIRED).choices[0].message.tool_calls or []
    return parsed, [call.function.arguments for call in called if call.type == "function"]


@pytest.mark.parametrize("server", ["client", "slow_client"])
def test_streams_carry_the_same(
    request: pytest.FixtureRequest, whole: tuple[Person | None, list[str]], server: str
) -> None:
    streaming: openai.OpenAI = request.getfixturevalue(server)
    with streaming.chat.completions.stream(**PARSED) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "stop"
    with streaming.chat.completions.stream(**REQUIRED) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls or []
    assert (final.message.parsed, [call.function.arguments for call in streamed]) == whole


def test_a_budget_that_ends_within_a_form_says_so(client: openai.OpenAI) -> None:
    (choice,) = ask(client, "What is 3 + 4?", max_tokens=12, response_format={"type": "json_object"}).choices
    assert choice.finish_reason == "length"


def test_logprobs_bias_and_least_tokens_go_with_a_form(client: openai.OpenAI) -> None:
    bias = {str(token): -100 for token in range(48, 58)}
    asked: Any = {"logprobs": True, "top_logprobs": 2, "logit_bias": bias, "extra_body": {"min_tokens": 60}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1234, 5678]}}}
    (choice,) = ask(client, "What is 3 + 4?", response_format=form, **asked).choices
    assert choice.message.content in ("1234", "5678")
    assert choice.logprobs is not None
    text = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content or ())
    assert text.decode() == choice.message.content


def test_free_and_constrained_company_changes_nothing(nano_server: ServerProcess, client: openai.OpenAI) -> None:
    question, low = "What is 27 + 58?", {"reasoning_effort": "low"}
    pattern: Any = {"n": 3, "temperature": 1, "seed": 1, "extra_body": {"guided_regex": "[0-9]{30}"}}

    async def ask_all() -> list[ChatCompletion]:
        async with openai.AsyncOpenAI(base_url=client.base_url, api_key="none", max_retries=0) as company:
            create = company.chat.completions.create
            kinds: Any = ({}, pattern, {"seed": 3, "temperature": 1}, {"tools": TOOLS, "tool_choice": "required"})
            asked = [create(messages=user(question), **{**GREEDY, **low, **kind}) for kind in kinds]
            return list(await asyncio.gather(*asked))

    free, constrained, sampled, called = asyncio.run(ask_all())
    assert content(free) == content(ask(client, question, **low))
    assert content(sampled) == content(ask(client, question, seed=3, temperature=1, **low))
    assert all(re.fullmatch("[0-9]{30}", choice.message.content or "") for choice in constrained.choices)
    assert called.choices[0].message.tool_calls
    nano_server.wait_idle()
