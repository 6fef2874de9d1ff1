"""Runs one request: as the server does, without HTTP."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from oscine.api.common.errors import APIError
from oscine.api.common.keys import NO_CALLER
from oscine.api.openai.chat_answer import ChatAnswer, reasoning_fields
from oscine.api.openai.text_answer import TextAnswer
from oscine.api.serving.admission import Admission
from oscine.api.serving.call import Call
from oscine.api.serving.logprobs import ContentLogprobs
from oscine.api.serving.parameters import SamplingFields
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest, of_objects
from oscine.api.serving.service import Service
from oscine.api.turns.chat import chat_turns, top_logprobs
from oscine.api.turns.generation import Choice, Generation
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.api.turns.text import DEFAULT_MAX_TOKENS, text_turns
from oscine.chat.toolbox import Toolbox
from oscine.llm.errors import RequestError
from oscine.llm.events import CallRun, StreamEvent, Translator
from oscine.llm.forms import Parse
from oscine.llm.functions import Tools
from oscine.llm.results import ChatChoice, ChatResult, Message, TextChoice, TextResult, summed
from oscine.settings.option import did_you_mean

R = TypeVar("R", bound=SamplingFields)
A = TypeVar("A", ChatAnswer, TextAnswer)
Emit = Callable[[StreamEvent], None]
_RETRY_S = 0.1
_OWN = ("stream", "stream_options", "messages", "prompt", "tools", "return_token_ids", "echo")


def check_names(parameters: dict[str, Any], kind: type[SamplingFields]) -> None:
    """Raises RequestError for a parameter that requests of this kind do not have."""
    known = [name for name in kind.__struct_fields__ if name not in _OWN]
    for name in parameters:
        if name not in known:
            raise RequestError(f"there is no parameter {name!r}{did_you_mean(name, known)}", name)


class _Watched:
    """A choice whose events are told as well. A Choice of oscine.api.turns.generation."""

    def __init__(self, choice: Choice, index: int, emit: Emit) -> None:
        self._choice, self._emit = choice, emit
        self._translator = Translator(index)

    @property
    def turn(self) -> Turn:
        return self._choice.turn

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        for event in self._translator.events(events):
            self._emit(event)
        return self._choice.encode(events)


class Runner:
    """Runs requests on the only model of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def text(self, fields: dict[str, Any], parse: Parse | None, emit: Emit | None) -> TextResult:
        """Raises APIError and EngineError, as all of this class."""
        call = await self._call(fields, CompletionRequest)

        async def turns() -> list[Turn]:
            return await text_turns(call, DEFAULT_MAX_TOKENS)

        def answer(turns: list[Turn]) -> TextAnswer:
            return TextAnswer(turns, 1, call.name, call.body, call.model.tokenizer)

        made = await self._answered(call, turns, answer, emit)
        choices = [TextChoice.of(choice.answer(), choice.turn.generated) for choice in made.choices]
        return TextResult(choices, made.usage(), parse)

    async def chat(
        self, fields: dict[str, Any], tools: Tools, max_tool_calls: int | None, parse: Parse | None, emit: Emit | None
    ) -> ChatResult:
        """Goes on while the model calls functions that are run here."""
        if not tools.builtin:
            return await _Talk(self, fields, tools, None, self._left(max_tool_calls), parse, emit).run()
        toolbox = self._service.tools.toolbox(tools.builtin, max_tool_calls)
        if len(toolbox.names) < len(tools.builtin):
            kinds = ", ".join(str(tool.get("type")) for tool in tools.builtin)
            raise RequestError(
                f"Invalid value for 'tools': of {kinds}, not all are enabled: see LLM(tools=...).", "tools"
            )
        async with toolbox:
            return await _Talk(self, fields, tools, toolbox, self._left(max_tool_calls), parse, emit).run()

    def _left(self, max_tool_calls: int | None) -> int:
        limit = self._service.config.tools.max_tool_calls
        return limit if max_tool_calls is None else min(limit, max_tool_calls)

    async def turn(self, fields: dict[str, Any], toolbox: Toolbox | None, emit: Emit | None) -> ChatAnswer:
        call = await self._call(fields, ChatCompletionRequest)

        async def turns() -> list[Turn]:
            return await chat_turns(self._service, call, toolbox=toolbox)

        def answer(turns: list[Turn]) -> ChatAnswer:
            body, tokenizer = call.body, call.model.tokenizer
            logprobs = [ContentLogprobs(tokenizer, top_logprobs(body), turn.logprobs) for turn in turns]
            shown = reasoning_fields(body, self._service.config.server.reasoning_field)
            return ChatAnswer(turns, logprobs, call.name, shown, body)

        return await self._answered(call, turns, answer, emit)

    async def _call(self, fields: dict[str, Any], kind: type[R]) -> Call[R]:
        name, served = self._service.find(fields.get("model"))
        if served.engine.state in ("starting", "restarting"):
            await served.engine.wait_ready()
        try:
            size = len(msgspec.json.encode(fields))
        except TypeError as error:
            raise RequestError(f"Invalid request: {error}.") from None
        return Call(of_objects(fields, kind), name, served.ready(name=name), NO_CALLER, size, time.perf_counter())

    async def _answered(
        self,
        call: Call[R],
        make_turns: Callable[[], Awaitable[list[Turn]]],
        make_answer: Callable[[list[Turn]], A],
        emit: Emit | None,
    ) -> A:
        """Waits for room in the engine, where the server would refuse the request."""
        admission = call.model.served.admission
        turns = await self._patiently(admission, call.body.n or 1, make_turns)
        answer = make_answer(turns)
        choices: Sequence[Choice] = answer.choices
        if emit is not None:
            choices = [_Watched(choice, i, emit) for i, choice in enumerate(choices)]
        generation = Generation(call, choices)
        await admission.until_room(len(turns), sum(turn.num_prompt_tokens for turn in turns))
        with generation.admit():
            await generation.run(None)
        return answer

    async def _patiently(
        self, admission: Admission, sequences: int, make_turns: Callable[[], Awaitable[list[Turn]]]
    ) -> list[Turn]:
        """Tries again while others take the room meanwhile, or more grammars wait than are compiled at once."""
        while True:
            await admission.until_room(sequences)
            try:
                return await make_turns()
            except APIError as error:
                if error.code != "overloaded":
                    raise
            await asyncio.sleep(_RETRY_S)


@dataclass
class _Talk:
    """One request for a chat: the turns of the model, and the calls of functions between them."""

    runner: Runner
    fields: dict[str, Any]
    tools: Tools
    toolbox: Toolbox | None
    left: int  # calls that are still run
    parse: Parse | None
    emit: Emit | None

    async def run(self) -> ChatResult:
        said: list[Message] = []
        usage = None
        while True:
            fields = self.fields | {"messages": [*self.fields["messages"], *said]}
            answer = await self.runner.turn(fields, self.toolbox, self.emit)
            whole = answer.whole
            choices = [ChatChoice.of(choice.answer(), choice.turn.generated) for choice in whole]
            usage = summed(usage, answer.usage())
            said.append(choices[0].message())
            calls = choices[0].tool_calls
            if len(choices) > 1 or not self.tools.runs(calls) or not self.left:
                return ChatResult(choices, usage, said, self.parse)
            self._count(len(calls))
            for call, output in zip(calls, await self.tools.results(calls), strict=True):
                said.append({"role": "tool", "tool_call_id": call.id, "content": output})
                if self.emit is not None:
                    self.emit(CallRun(call, output))

    def _count(self, num_calls: int) -> None:
        """A call that is required is so once. When no more may be made, the model must answer."""
        self.left = max(self.left - num_calls, 0)
        if not self.left:
            self.fields["tool_choice"] = "none"
        elif self.fields.get("tool_choice", "auto") != "auto":
            self.fields["tool_choice"] = "auto"
