"""OpenAI's Agents SDK over both of its APIs: answers, streams, and its loop of tools."""

import asyncio
from typing import Any

import pytest
from agents import (
    Agent,
    AgentOutputSchema,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    function_tool,
)
from openai import AsyncOpenAI
from openai.types.responses import ResponseTextDeltaEvent
from openai.types.shared import Reasoning
from pydantic import BaseModel

MODEL = "oscine-nano"
SUM = "What is 2 + 3?"
WEATHER = "What is the weather in Lisbon?"
QUIET = RunConfig(tracing_disabled=True)
GREEDY: Any = {"temperature": 0, "max_tokens": 400, "reasoning": Reasoning(effort="low"), "include_usage": True}


class Person(BaseModel):
    name: str
    age: int


class Loop:
    """An agent with one tool, that runs to its end over one connection."""

    def __init__(self, base_url: str, api: str) -> None:
        self._base_url, self._api = base_url, api
        self.cities: list[str] = []

    def run(self, question: str, **agent: Any) -> RunResult:
        return asyncio.run(self._run(question, agent))

    def stream(self, question: str, **agent: Any) -> tuple[str, RunResultStreaming]:
        return asyncio.run(self._stream(question, agent))

    async def _run(self, question: str, agent: Any) -> RunResult:
        async with self._client() as client:
            return await Runner.run(self._agent(client, **agent), question, run_config=QUIET, max_turns=4)

    async def _stream(self, question: str, agent: Any) -> tuple[str, RunResultStreaming]:
        async with self._client() as client:
            run = Runner.run_streamed(self._agent(client, **agent), question, run_config=QUIET, max_turns=4)
            events = [event.data async for event in run.stream_events() if event.type == "raw_response_event"]
            return "".join(event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)), run

    def _client(self) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=self._base_url, api_key="none", max_retries=0)

    def _agent(
        self, client: AsyncOpenAI, *, tools: bool = False, settings: Any = GREEDY, **options: Any
    ) -> Agent[None]:
        kind = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}[self._api]
        return Agent(
            name="assistant",
            model=kind(MODEL, client),
            model_settings=ModelSettings(**settings),
            tools=[self._weather()] if tools else [],
            **options,
        )

    def _weather(self) -> Any:
        @function_tool
        def get_weather(city: str) -> str:
            """Gets the current weather for a city.

            Args:
                city: The name of the city
            """
            self.cities.append(city)
            return '{"temperature": 17, "sky": "sunny"}'

        return get_weather


@pytest.fixture(params=["chat", "responses"])
def loop(request: pytest.FixtureRequest, base_url: str) -> Loop:
    return Loop(base_url, request.param)


def test_an_answer(loop: Loop) -> None:
    assert "5" in loop.run(SUM).final_output


def test_a_stream_is_the_answer(loop: Loop) -> None:
    text, run = loop.stream(SUM)
    assert "5" in text
    assert run.final_output == text
    assert run.context_wrapper.usage.output_tokens > 0


def test_a_tool_is_run_and_its_result_told(loop: Loop) -> None:
    run = loop.run(WEATHER, tools=True)
    assert loop.cities == ["Lisbon"]
    assert "17" in run.final_output
    assert len(run.raw_responses) == 2


def test_a_tool_is_run_in_a_stream(loop: Loop) -> None:
    text, run = loop.stream(WEATHER, tools=True)
    assert loop.cities == ["Lisbon"]
    assert text.endswith(run.final_output)
    assert "17" in run.final_output


def test_an_output_type(loop: Loop) -> None:
    schema = AgentOutputSchema(Person, strict_json_schema=True)
    assert loop.run("Anna is 31 years old.", output_type=schema).final_output == Person(name="Anna", age=31)


@pytest.mark.parametrize("effort", ["none", "xhigh"])
def test_efforts_and_verbosity_that_the_model_does_not_know_are_taken(loop: Loop, effort: Any) -> None:
    settings = {**GREEDY, "reasoning": Reasoning(effort=effort, summary="auto"), "verbosity": "low"}
    assert "5" in loop.run(SUM, settings=settings).final_output
