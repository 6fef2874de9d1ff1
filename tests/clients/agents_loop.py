"""An agent of OpenAI's Agents SDK, which takes a second to import: tests import this module when they run."""

import asyncio
from typing import Any

from agents import (
    Agent,
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

MODEL = "oscine-nano"
QUIET = RunConfig(tracing_disabled=True)
GREEDY: Any = {"temperature": 0, "max_tokens": 400, "reasoning": Reasoning(effort="low"), "include_usage": True}


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
