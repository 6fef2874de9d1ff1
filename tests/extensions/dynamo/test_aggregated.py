"""Dynamo's frontend with two aggregated workers: answers, calls, forms, errors, cancellation."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import openai
import pytest

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation, FunctionTool, Message
from oscine.chat.tokenizer import Tokenizer
from oscine.checkpoint.hub import NANO_FOLDER
from tests.extensions.dynamo.fleet import MODEL, Fleet
from tests.waiting import wait_until

SUM = {"role": "user", "content": "What is 27 + 58?"}
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
SCHEMAS: list[dict[str, Any]] = [
    {"properties": dict.fromkeys(("city", "größe", "größe in cm", "$a-b.c_1", 'a"b'), True)},
    {"properties": {"x": {"type": ["integer", "null"], "description": "a\nb"}, "y": {"type": ["array"], "items": {}}}},
    {"properties": {"x": {"oneOf": [{"type": "string"}, {"minimum": 1}], "nullable": True, "default": "a"}}},
    {
        "properties": {"x": {"$ref": "#/$defs/road"}, "y": {"$ref": "#/$defs/road"}},
        "$defs": {"city": {"type": "object", "description": "a"}, "road": {"items": {"$ref": "#/$defs/city"}}},
    },
]
NUMBER = {
    "type": "object",
    "properties": {"number": {"type": "integer"}},
    "required": ["number"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, vocabulary: Path) -> Iterator[Fleet]:
    limits = ("--max-num-seqs", "4", "--max-waiting", "1")
    with Fleet(tmp_path_factory.mktemp("fleet"), vocabulary, "aggregated", "aggregated", worker=limits) as fleet:
        yield fleet


def test_an_answer_has_its_reasoning_apart(fleet: Fleet) -> None:
    answer = fleet.ask(SUM)
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("27 + 58 = 85.", "stop")
    assert message.reasoning_content.endswith("The sum is 85.")
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_stream_says_the_same(fleet: Fleet) -> None:
    chunks = [*fleet.ask(SUM, stream=True, stream_options={"include_usage": True})]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "27 + 58 = 85."
    assert len([choice for choice in choices if choice.delta.content]) > 5
    assert choices[-1].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens > 20


def test_a_function_is_called_and_its_result_used(fleet: Fleet) -> None:
    choice = fleet.ask(WEATHER, tools=[TOOL]).choices[0]
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'}
    said = choice.message.model_dump(exclude_none=True)
    assert "21" in fleet.ask(WEATHER, said, result, tools=[TOOL]).choices[0].message.content


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_prompt_with_tools_is_as_long_as_oscines_own(fleet: Fleet, schema: dict[str, Any]) -> None:
    """The frontend renders the template of the model, by an engine of its own."""
    parameters = {"type": "object"} | schema
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    today = datetime.now(UTC).date().isoformat()
    own = Conversation((Message("user", SUM["content"]),), (FunctionTool("f", "", parameters),), current_date=today)
    tokens = HarmonyRenderer(Tokenizer(NANO_FOLDER)).render(own)
    assert fleet.ask(SUM, tools=[tool], max_tokens=1).usage.prompt_tokens == len(tokens)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_can_be_required_of_a_question_that_needs_none(fleet: Fleet, choice: Any) -> None:
    (call,) = fleet.ask(SUM, tools=[TOOL], tool_choice=choice).choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city"}


def test_an_answer_keeps_to_a_schema(fleet: Fleet) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "number", "schema": NUMBER, "strict": True}}
    found = json.loads(fleet.ask(SUM, response_format=form).choices[0].message.content)
    assert list(found) == ["number"]
    assert isinstance(found["number"], int)


def test_an_answer_keeps_to_a_pattern(fleet: Fleet) -> None:
    content = fleet.ask(SUM, extra_body={"guided_regex": "[xyz]{3}"}).choices[0].message.content
    assert re.fullmatch("[xyz]{3}", content)


def test_a_stop_string_ends_an_answer(fleet: Fleet) -> None:
    assert fleet.ask(SUM, stop=["="]).choices[0].message.content in ("27 + 58 ", "27 + 58", None)


def test_log_probabilities_are_those_of_the_tokens(fleet: Fleet) -> None:
    entries = fleet.ask(SUM, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert all(entry.logprob <= 0 and len(entry.top_logprobs) == 2 for entry in entries)
    shown = entries[:-1]  # the frontend hides the text of the token that ends a turn
    assert all(entry.top_logprobs[0].token == entry.token for entry in shown)  # greedy
    assert "".join(entry.token for entry in shown).endswith("27 + 58 = 85.")


def test_a_seed_decides(fleet: Fleet) -> None:
    def sampled(seed: int) -> str:
        choice = fleet.ask(SUM, temperature=2, seed=seed, max_tokens=24, logprobs=True).choices[0]
        return "".join(entry.token for entry in choice.logprobs.content)

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


def test_raw_text_is_continued(fleet: Fleet) -> None:
    answer = fleet.client.completions.create(model=MODEL, prompt="What is 2 + 2?", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"n": 2, "temperature": 1}, "'n'"),
        ({"max_tokens": 1_000_000}, "max_tokens"),
        ({"extra_body": {"guided_regex": "("}}, "'guided_regex'"),
        ({"extra_body": {"nvext": {"cache_salt": "mine"}}}, "'cache_salt'"),
    ],
)
def test_what_a_worker_refuses_is_the_clients_fault(fleet: Fleet, more: dict[str, Any], says: str) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        fleet.ask(SUM, **more)
    assert fleet.ask(SUM).choices[0].message.content == "27 + 58 = 85."


def test_more_than_workers_take_is_refused_for_now(fleet: Fleet) -> None:
    def status(number: int) -> int:
        try:
            fleet.ask(SUM, max_tokens=60, extra_body={"ignore_eos": True})
        except openai.InternalServerError as error:
            return error.status_code
        return 200

    with ThreadPoolExecutor(24) as pool:
        assert {*pool.map(status, range(24))} == {200, 503}
    assert fleet.ask(SUM).choices[0].message.content == "27 + 58 = 85."


def running(fleet: Fleet) -> int:
    return sum(worker.metric("num_requests_running") for worker in fleet.workers)


def test_a_request_ends_with_its_client(fleet: Fleet) -> None:
    stream = fleet.ask(SUM, stream=True, max_tokens=8000, extra_body={"ignore_eos": True})
    for _ in range(3):
        next(stream)
    wait_until(lambda: running(fleet) == 1, "a worker with the request")  # figures are some time old
    stream.close()
    idle = ("num_requests_running", "num_requests_waiting", "full_pages_used")
    wait_until(
        lambda: not any(worker.metric(name) for worker in fleet.workers for name in idle), "workers without requests"
    )


def test_torch_is_in_the_engine_process_alone(fleet: Fleet) -> None:
    for worker in fleet.workers:
        own, engine = Path(f"/proc/{worker.pid}/maps"), Path(f"/proc/{worker.engine().pid}/maps")
        assert "libtorch" not in own.read_text()
        assert "libtorch" in engine.read_text()
