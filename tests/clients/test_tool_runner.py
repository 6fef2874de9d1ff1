"""Anthropic's client with its tool runner, which asks for threads first and continues without them."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.server import ServerProcess

ASKED: Any = {
    "model": "oscine-nano",
    "max_tokens": 6000,
    "extra_body": {"temperature": 0},
}
SUM = "What is 2 + 3?"
WEATHER = "What is the weather in Lisbon?"


@pytest.fixture
def client(nano_server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=nano_server.url, api_key="none", max_retries=0) as client:
        yield client


class Tool:
    """What the model calls, and which cities it asked for."""

    def __init__(self) -> None:
        self.cities: list[str] = []

        @anthropic.beta_tool
        def get_weather(city: str) -> str:
            """Gets the current weather for a city.

            Args:
                city: The name of the city
            """
            self.cities.append(city)
            return '{"temperature": 17, "sky": "sunny"}'

        self.function = get_weather


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def text_of(message: Any) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def test_an_answer_with_its_thinking(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASKED, messages=user(SUM), thinking={"type": "enabled", "budget_tokens": 5000})
    assert [block.type for block in message.content] == ["thinking", "text"]
    assert "5" in text_of(message)


def test_a_stream_adds_up_to_the_answer(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**ASKED, messages=user(SUM)) as stream:
        text = "".join(stream.text_stream)
        assert text == text_of(stream.get_final_message())
    assert "5" in text


def test_the_tool_runner_ends_in_an_answer(client: anthropic.Anthropic) -> None:
    tool = Tool()
    runner = client.beta.messages.tool_runner(**ASKED, messages=user(WEATHER), tools=[tool.function], max_iterations=4)
    final = runner.until_done()
    assert tool.cities == ["Lisbon"]
    assert "17" in text_of(final)


def test_the_tool_runner_streams(client: anthropic.Anthropic) -> None:
    tool = Tool()
    runner = client.beta.messages.tool_runner(
        **ASKED, messages=user(WEATHER), tools=[tool.function], max_iterations=4, stream=True
    )
    texts = ["".join(event.text for event in turn if event.type == "text") for turn in runner]
    assert tool.cities == ["Lisbon"]
    assert "17" in texts[-1]


def test_every_effort_is_taken(client: anthropic.Anthropic) -> None:
    efforts: tuple[Any, ...] = ("low", "medium", "high", "xhigh", "max")
    for effort in efforts:
        asked = ASKED | {"max_tokens": 1}
        message = client.messages.create(**asked, messages=user(SUM), output_config={"effort": effort})
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 1)


def test_models_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type) == ("oscine-nano", "model")
