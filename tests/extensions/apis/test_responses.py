"""Responses of the embedded model through the real OpenAI client."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import openai
import pytest
from openai.types.responses import (
    FunctionToolParam,
    Response,
    ResponseInputItemParam,
    ResponseStreamEvent,
)
from pydantic import BaseModel

from oscine.chat.tokenizer import Tokenizer
from tests.extensions.apis.response_stream import check_response, check_stream
from tests.server import ServerProcess
from tests.waiting import wait_until

MODEL = "oscine-nano"
SUM = "What is 27 + 58?"
GREEDY: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 300}
WEATHER: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "Gets the current weather for a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "description": "The name of the city"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(nano_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{nano_server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def create(client: openai.OpenAI, **parameters: Any) -> Response:
    response = client.responses.create(**{**GREEDY, **parameters})
    check_response(response.to_dict(mode="json"))
    return response


def texts(response: Response) -> list[Any]:
    """What the items say, without their ids."""
    hidden = ("id", "call_id")
    return [{k: v for k, v in item.to_dict().items() if k not in hidden} for item in response.output]


def test_reasons_and_answers(client: openai.OpenAI) -> None:
    response = create(client, input=SUM, instructions="Be exact.")
    reasoning, message = response.output
    assert reasoning.type == "reasoning"
    assert reasoning.content
    assert "85" in reasoning.content[0].text
    assert message.type == "message"
    assert "85" in response.output_text
    assert response.status == "completed"
    assert response.usage is not None
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_streamed_is_whole(client: openai.OpenAI) -> None:
    whole = create(client, input=SUM)
    events: list[ResponseStreamEvent] = []
    for event in client.responses.create(input=SUM, stream=True, **GREEDY):
        events.append(event)
    check_stream([event.to_dict(mode="json") for event in events])
    assert events[-1].type == "response.completed"
    assert texts(events[-1].response) == texts(whole)
    with client.responses.stream(input=SUM, **GREEDY) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_log_probabilities(client: openai.OpenAI) -> None:
    response = create(client, input=SUM, include=["message.output_text.logprobs"], top_logprobs=3)
    message = response.output[-1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert bytes(byte for token in part.logprobs for byte in token.bytes).decode() == part.text
    assert all(len(token.top_logprobs) == 3 for token in part.logprobs)


class Sum(BaseModel):
    total: int


def test_an_answer_is_parsed(client: openai.OpenAI) -> None:
    response = client.responses.parse(input=SUM, text_format=Sum, **GREEDY)
    assert response.status == "completed"
    assert isinstance(response.output_parsed, Sum)
    with client.responses.stream(input=SUM, text_format=Sum, **GREEDY) as stream:
        assert stream.get_final_response().output_parsed == response.output_parsed


def test_a_function_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    question = "What is the weather in Lisbon?"
    called = create(client, input=question, tools=[WEATHER])
    (call,) = (item for item in called.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Lisbon"})
    result: ResponseInputItemParam = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": '{"temperature": 17, "sky": "sunny"}',
    }
    stored = create(client, input=[result], tools=[WEATHER], previous_response_id=called.id)
    assert "17" in stored.output_text
    items = [{"role": "user", "content": question}, *(item.to_dict() for item in called.output), result]
    sent = create(client, input=items, tools=[WEATHER], store=False)
    assert texts(sent) == texts(stored)
    assert sent.usage is not None
    assert stored.usage is not None
    assert sent.usage.input_tokens == stored.usage.input_tokens
    assert stored.usage.input_tokens_details.cached_tokens > 0
    forced = create(client, input=SUM, tools=[WEATHER], tool_choice="required")
    assert forced.output[-1].type == "function_call"


def test_stored_responses_are_retrieved_and_deleted(client: openai.OpenAI) -> None:
    response = create(client, input=SUM, metadata={"a": "b"}, max_output_tokens=8)
    found = client.responses.retrieve(response.id)
    assert found == response
    (item,) = client.responses.input_items.list(response.id).data
    assert item.type == "message"
    assert item.content[0].to_dict() == {"type": "input_text", "text": SUM}
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            gone(response.id)
    unstored = create(client, input=SUM, store=False, max_output_tokens=8)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_only_what_runs_in_the_background_can_be_cancelled(client: openai.OpenAI) -> None:
    response = create(client, input=SUM, max_output_tokens=8)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(response.id)
    with pytest.raises(openai.BadRequestError):
        [*client.responses.retrieve(response.id, stream=True)]


def test_a_response_is_made_in_the_background(client: openai.OpenAI) -> None:
    whole = create(client, input=SUM)
    started = create(client, input=SUM, background=True)
    assert started.status in ("queued", "in_progress")
    wait_until(lambda: client.responses.retrieve(started.id).status == "completed", "a completed response")
    done = client.responses.retrieve(started.id)
    assert texts(done) == texts(whole)
    assert client.responses.cancel(started.id) == done
    events = [event.to_dict(mode="json") for event in client.responses.retrieve(started.id, stream=True)]
    check_stream(events)
    assert [event["type"] for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    rest = [e.to_dict(mode="json") for e in client.responses.retrieve(started.id, stream=True, starting_after=5)]
    assert rest == events[6:]


def test_a_stream_from_the_background_is_taken_up_again(client: openai.OpenAI) -> None:
    seen: list[dict[str, Any]] = []
    with client.responses.create(input=SUM, background=True, stream=True, **GREEDY) as stream:
        for event in stream:
            seen.append(event.to_dict(mode="json"))
            if len(seen) == 8:
                break
    response_id = seen[0]["response"]["id"]
    rest = client.responses.retrieve(response_id, stream=True, starting_after=seen[-1]["sequence_number"])
    seen += [event.to_dict(mode="json") for event in rest]
    response = check_stream(seen)
    assert response is not None
    assert response["status"] == "completed"
    assert client.responses.retrieve(response_id).to_dict(mode="json") == response


def long_one(client: openai.OpenAI) -> Response:
    """A response that takes longer than any test: the tokens that end one are not sampled."""
    t = Tokenizer(str(files("oscine.model") / "nano"))
    bias = dict.fromkeys((t.return_, t.call, t.endoftext), -100)
    parameters = {**GREEDY, "max_output_tokens": 100_000}
    return client.responses.create(input=SUM, background=True, **parameters, extra_body={"logit_bias": bias})


def test_what_runs_in_the_background_is_cancelled(client: openai.OpenAI, nano_server: ServerProcess) -> None:
    started = long_one(client)
    cancelled = client.responses.cancel(started.id)
    check_response(cancelled.to_dict(mode="json"))
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(started.id) == cancelled
    nano_server.wait_idle()
    events = [event.to_dict(mode="json") for event in client.responses.retrieve(started.id, stream=True)]
    response = check_stream(events)
    assert response is not None
    assert response["status"] == "cancelled"
    deleted = long_one(client)
    client.responses.delete(deleted.id)
    nano_server.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)


def test_a_client_that_goes_away_ends_its_response(client: openai.OpenAI, nano_server: ServerProcess) -> None:
    with client.responses.create(input=SUM, stream=True, **GREEDY) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    nano_server.wait_idle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.response.id)


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model=MODEL, input=SUM, instructions="Be exact.")
    usage = create(client, input=SUM, instructions="Be exact.", max_output_tokens=1).usage
    assert usage is not None
    assert counted.input_tokens == usage.input_tokens


def test_a_conversation_is_compacted_and_goes_on(client: openai.OpenAI) -> None:
    first = create(client, input="What is 2 + 2?")
    compacted = client.responses.compact(model=MODEL, input=SUM, previous_response_id=first.id)
    items: Any = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item["type"] for item in items] == ["message", "message", "compaction"]
    assert create(client, input=[*items, {"role": "user", "content": "What is 3 + 4?"}]).output_text


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        create(client, input=SUM, previous_response_id="resp_none")
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.NotFoundError):
        create(client, input=SUM, model="gpt-9")
    with pytest.raises(openai.BadRequestError) as refused:
        create(client, input=SUM, max_output_tokens=10**6)
    assert refused.value.code == "context_length_exceeded"
