"""OpenAI's Agents SDK over both of its APIs: answers, streams, and its loop of tools."""

from typing import TYPE_CHECKING, Any

import pytest
from openai.types.shared import Reasoning
from pydantic import BaseModel

if TYPE_CHECKING:
    from tests.clients.agents_loop import Loop

SUM = "What is 2 + 3?"
WEATHER = "What is the weather in Lisbon?"


class Person(BaseModel):
    name: str
    age: int


@pytest.fixture(params=["chat", "responses"])
def loop(request: pytest.FixtureRequest, base_url: str) -> "Loop":
    from tests.clients.agents_loop import Loop

    return Loop(base_url, request.param)


def test_an_answer(loop: "Loop") -> None:
    assert "5" in loop.run(SUM).final_output


def test_a_stream_adds_up_to_the_answer(loop: "Loop") -> None:
    text, run = loop.stream(SUM)
    assert "5" in text
    assert run.final_output == text
    assert run.context_wrapper.usage.output_tokens > 0


def test_a_tool_is_run_and_its_result_told(loop: "Loop") -> None:
    run = loop.run(WEATHER, tools=True)
    assert loop.cities == ["Lisbon"]
    assert "17" in run.final_output
    assert len(run.raw_responses) == 2


def test_a_tool_is_run_in_a_stream(loop: "Loop") -> None:
    text, run = loop.stream(WEATHER, tools=True)
    assert loop.cities == ["Lisbon"]
    assert text.endswith(run.final_output)
    assert "17" in run.final_output


def test_an_output_type(loop: "Loop") -> None:
    from agents import AgentOutputSchema

    schema = AgentOutputSchema(Person, strict_json_schema=True)
    assert loop.run("Anna is 31 years old.", output_type=schema).final_output == Person(name="Anna", age=31)


@pytest.mark.parametrize("effort", ["none", "xhigh"])
def test_efforts_and_verbosity_that_the_model_does_not_know_are_taken(loop: "Loop", effort: Any) -> None:
    from tests.clients.agents_loop import GREEDY

    settings = {**GREEDY, "reasoning": Reasoning(effort=effort, summary="auto"), "verbosity": "low"}
    assert "5" in loop.run(SUM, settings=settings).final_output
