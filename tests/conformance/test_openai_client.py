"""The `openai` client, all of its ways to a model, against a real server with the embedded model.

The client builds its objects from anything; here everything that it received is also validated strictly by its types
(events of responses in check_stream).
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response
from pydantic import BaseModel, TypeAdapter

import oscine.model
from oscine.chat.tokenizer import Tokenizer
from tests.extensions.apis.response_stream import check_stream
from tests.server import ServerProcess

MODEL = "oscine-nano"
SUM: list[Any] = [{"role": "user", "content": "What is 27 + 58?"}]
WEATHER: list[Any] = [{"role": "user", "content": "What is the weather in Paris?"}]


class GetWeather(BaseModel):
    """Get the current weather of a city."""

    city: str


class Person(BaseModel):
    name: str
    age: int
    job: Literal["baker", "teacher", "pilot"]


ANNA = "Anna is 34 years old and works as a baker."
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
CHAT_TOOL: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather.", "parameters": PARAMETERS},
}
RESPONSE_TOOL: Any = {"type": "function", **CHAT_TOOL["function"], "strict": True}

_NANO = Tokenizer(Path(oscine.model.__file__).parent / "nano")
# The tokens that end an answer are not sampled.
ENDLESS = {"logit_bias": dict.fromkeys((_NANO.return_, _NANO.call, _NANO.endoftext), -100)}


@pytest.fixture(scope="module")
def client(nano_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


_adapter = cache(TypeAdapter)


def strict(kind: Any, value: BaseModel) -> Any:
    """Validates what arrived, not what the client made of it."""
    return _adapter(kind).validate_json(value.model_dump_json(exclude_unset=True), strict=True)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "oscine"


def test_chat_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=MODEL, messages=SUM, temperature=0, logprobs=True, top_logprobs=2)
    strict(ChatCompletion, whole)
    assert whole.choices[0].message.content == "27 + 58 = 85."
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=SUM, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
    assert "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices) == "27 + 58 = 85."
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(token.token for token in logprobs.content) == "27 + 58 = 85."


def test_a_call_in_chat_its_result_and_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [CHAT_TOOL], "temperature": 0}
    with client.chat.completions.stream(messages=WEATHER, **options) as stream:
        for event in stream:
            if event.type == "chunk":
                strict(ChatCompletionChunk, event.chunk)
    message = stream.get_final_completion().choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 18}'}
    messages = [*WEATHER, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(messages=messages, **options)
    assert "18" in (answer.choices[0].message.content or "")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_is_made_when_it_must_be(client: openai.OpenAI, choice: Any) -> None:
    completion = client.chat.completions.create(
        model=MODEL, messages=SUM, tools=[CHAT_TOOL], tool_choice=choice, seed=1
    )
    strict(ChatCompletion, completion)
    (call,) = completion.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert json.loads(call.function.arguments).keys() == {"city"}


def test_the_parse_helpers_of_chat(client: openai.OpenAI) -> None:
    asked: list[Any] = [{"role": "user", "content": ANNA}]
    person = Person(name="Anna", age=34, job="baker")
    parsed = client.chat.completions.parse(model=MODEL, messages=asked, response_format=Person, temperature=0)
    assert parsed.choices[0].message.parsed == person
    with client.chat.completions.stream(model=MODEL, messages=asked, response_format=Person, temperature=0) as stream:
        for _ in stream:
            pass
    assert stream.get_final_completion().choices[0].message.parsed == person
    tool = openai.pydantic_function_tool(GetWeather, name="get_weather")
    called = client.chat.completions.parse(model=MODEL, messages=WEATHER, tools=[tool], temperature=0)
    (call,) = called.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(city="Paris")


def test_a_response_and_its_stream(client: openai.OpenAI) -> None:
    whole = client.responses.create(model=MODEL, input="What is 27 + 58?", temperature=0)
    strict(Response, whole)
    assert whole.output_text == "27 + 58 = 85."
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    events = list(client.responses.create(model=MODEL, input="What is 27 + 58?", temperature=0, stream=True))
    final = check_stream([event.model_dump(mode="json", exclude_unset=True) for event in events])
    assert final is not None
    assert final["output"][-1]["content"][0]["text"] == whole.output_text
    assert events[-1].type == "response.completed"


def test_stored_responses_are_found_followed_and_forgotten(client: openai.OpenAI) -> None:
    first = client.responses.create(model=MODEL, input="What is 27 + 58?", temperature=0)
    found = client.responses.retrieve(first.id)
    assert strict(Response, found) == strict(Response, first)
    second = client.responses.create(
        model=MODEL, input="What is 20 + 30?", previous_response_id=first.id, temperature=0
    )
    assert "50" in second.output_text
    assert second.previous_response_id == first.id
    items = list(client.responses.input_items.list(second.id))
    assert [item.type for item in items] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_a_response_in_the_background_is_cancelled(client: openai.OpenAI) -> None:
    made = client.responses.create(model=MODEL, input="Hello!", background=True, extra_body=ENDLESS)
    assert made.status in ("queued", "in_progress")
    cancelled = client.responses.cancel(made.id)
    strict(Response, cancelled)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(made.id).status == "cancelled"


def test_a_stream_from_the_background_is_left_and_taken_up_again(client: openai.OpenAI) -> None:
    with client.responses.create(
        model=MODEL, input="Hello!", background=True, stream=True, extra_body=ENDLESS
    ) as stream:
        begun = next(stream)
    assert begun.type == "response.created"
    rest = client.responses.retrieve(begun.response.id, stream=True, starting_after=begun.sequence_number)
    received = [begun, next(rest)]
    client.responses.cancel(begun.response.id)
    received += rest
    final = check_stream([event.model_dump(mode="json", exclude_unset=True) for event in received])
    assert final is not None
    assert final["status"] == "cancelled"


def test_a_call_in_responses_its_result_and_the_answer(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "tools": [RESPONSE_TOOL], "temperature": 0}
    with client.responses.stream(input=WEATHER[0]["content"], **options) as stream:
        for _ in stream:
            pass
    response = stream.get_final_response()
    (call,) = (item for item in response.output if item.type == "function_call")
    assert json.loads(call.arguments) == {"city": "Paris"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 18}'}
    answer = client.responses.create(input=[result], previous_response_id=response.id, **options)
    assert "18" in answer.output_text


def test_the_parse_helpers_of_responses(client: openai.OpenAI) -> None:
    person = Person(name="Anna", age=34, job="baker")
    parsed = client.responses.parse(model=MODEL, input=ANNA, text_format=Person, temperature=0)
    assert parsed.output_parsed == person
    with client.responses.stream(model=MODEL, input=ANNA, text_format=Person, temperature=0) as stream:
        for _ in stream:
            pass
    assert stream.get_final_response().output_parsed == person
