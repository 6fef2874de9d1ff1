"""The events of an answer while it streams. `type` is the name that the Responses API has for such an event."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from oscine.api.turns.progress import ToolAnswered, TurnEvent
from oscine.chat import events as chat
from oscine.llm.results import ChatResult, TextResult, ToolCall


@dataclass(frozen=True, slots=True)
class ThinkingDelta:
    delta: str
    choice: int = 0
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"


@dataclass(frozen=True, slots=True)
class TextDelta:
    delta: str
    choice: int = 0
    type: Literal["response.output_text.delta"] = "response.output_text.delta"


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model begins to call one of the caller's functions."""

    id: str
    name: str
    choice: int = 0
    type: Literal["response.output_item.added"] = "response.output_item.added"


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    id: str
    delta: str
    choice: int = 0
    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"


@dataclass(frozen=True, slots=True)
class CallRun:
    """One of the caller's functions was run, and the model gets its result."""

    call: ToolCall
    output: str
    type: Literal["response.output_item.done"] = "response.output_item.done"


@dataclass(frozen=True, slots=True)
class BuiltinRun:
    """A built-in tool was run, and the model gets its result."""

    recipient: str  # python, browser.search, label.tool
    content: str  # code or JSON text
    output: str
    choice: int = 0
    type: str = "response.mcp_call.completed"


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event."""

    result: ChatResult | TextResult
    type: Literal["response.completed", "response.incomplete"]

    @classmethod
    def of(cls, result: ChatResult | TextResult) -> "Finished":
        return cls(result, "response.incomplete" if result.finish_reason == "length" else "response.completed")


StreamEvent = ThinkingDelta | TextDelta | CallBegun | ArgumentsDelta | CallRun | BuiltinRun | Finished
_BUILTIN = {"python": "code_interpreter_call", "browser": "web_search_call"}


class Translator:
    """Makes these events of the events of one choice."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._ids: list[str] = []  # of the calls of a turn

    def events(self, events: Sequence[TurnEvent]) -> Iterator[StreamEvent]:
        for event in events:
            match event:
                case chat.ReasoningDelta(text):
                    yield ThinkingDelta(text, self._choice)
                case chat.ContentDelta(text):
                    yield TextDelta(text, self._choice)
                case chat.ToolCallBegin(id=call_id, name=name):
                    self._ids.append(call_id)
                    yield CallBegun(call_id, name, self._choice)
                case chat.ToolCallDelta(index, arguments):
                    yield ArgumentsDelta(self._ids[index], arguments, self._choice)
                case ToolAnswered(call, result):
                    kind = _BUILTIN.get(call.recipient.partition(".")[0], "mcp_call")
                    name = f"response.{kind}.completed"
                    yield BuiltinRun(call.recipient, call.content, result.text, self._choice, name)
