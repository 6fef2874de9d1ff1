"""Calls in a chat completion: of functions, with their arguments, and of custom tools, with their input."""

from collections.abc import Mapping
from typing import Any

from oscine.api.openai.answers import AnswerCustomCall, AnswerToolCall, CalledFunction, CustomInput
from oscine.api.turns.custom_tools import read_input
from oscine.api.turns.progress import TurnEvent
from oscine.chat.events import MessageEnd, ToolCallBegin, ToolCallDelta

Custom = Mapping[str, bool]  # custom tools by their names, and whether each has a grammar


def answer_call(begin: ToolCallBegin, text: str, custom: Custom) -> AnswerToolCall | AnswerCustomCall:
    """`text`: what the model wrote."""
    if begin.name not in custom:
        return AnswerToolCall(begin.id, CalledFunction(begin.name, text))
    return AnswerCustomCall(begin.id, CustomInput(begin.name, text if custom[begin.name] else read_input(text)))


class CallDeltas:
    """The parts of a stream's calls. An input without a grammar comes in one piece, as the model writes it in JSON."""

    def __init__(self, custom: Custom) -> None:
        self._custom = custom
        self._open: ToolCallBegin | None = None  # a call of a custom tool
        self._written: list[str] = []  # its JSON

    def delta(self, event: TurnEvent) -> dict[str, Any] | None:
        """What a chunk says of the event; None: nothing."""
        match event:
            case ToolCallBegin(name=name) if name in self._custom:
                self._open = event
                return _head(event, "custom", "input")
            case ToolCallBegin():
                return _head(event, "function", "arguments")
            case ToolCallDelta() if self._open is None:
                return {"index": event.index, "function": {"arguments": event.arguments}}
            case ToolCallDelta():
                return self._input(event)
            case MessageEnd() if self._open is not None:
                return self._end(self._open)
        return None

    def _input(self, event: ToolCallDelta) -> dict[str, Any] | None:
        assert self._open is not None
        if self._custom[self._open.name]:
            return {"index": event.index, "custom": {"input": event.arguments}}
        self._written.append(event.arguments)
        return None

    def _end(self, call: ToolCallBegin) -> dict[str, Any] | None:
        written, self._open, self._written = "".join(self._written), None, []
        text = read_input(written)
        return {"index": call.index, "custom": {"input": text}} if text else None


def _head(call: ToolCallBegin, kind: str, field: str) -> dict[str, Any]:
    return {"index": call.index, "id": call.id, "type": kind, kind: {"name": call.name, field: ""}}
