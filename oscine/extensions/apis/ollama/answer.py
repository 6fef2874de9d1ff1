"""An answer in Ollama's format: lines of JSON with thinking, content and tool calls, or one JSON object.

A line is a record.
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET

from oscine.api.common.errors import APIError, ErrorText
from oscine.api.serving.call import Call
from oscine.api.serving.logprobs import ContentLogprobs, TokenLogprob
from oscine.api.serving.schemas import arguments_object
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.chat.events import ContentDelta, MessageEnd, ReasoningDelta, ToolCallBegin, ToolCallDelta
from oscine.extensions.apis.ollama.schemas import (
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaFunctionCall,
    OllamaGenerateAnswer,
    OllamaRecord,
    OllamaToolCall,
)

# Characters that end a line for clients in Python. JSON allows them within a string.
_LINE_ENDS = [(end.encode(), json.dumps(end)[1:-1].encode()) for end in "\x85\u2028\u2029"]
_LOADED_NS = 0  # a model is loaded before it takes requests

Kind = Literal["chat", "generate"]


def line(record: msgspec.Struct) -> bytes:
    data = msgspec.json.encode(record)
    for character, escaped in _LINE_ENDS:
        data = data.replace(character, escaped)
    return data + b"\n"


def timestamp(seconds: float | None = None) -> str:
    """A time in Ollama's format: `seconds` since 1970, or now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


@dataclass(slots=True)
class Piece:
    """The content of a record."""

    content: str = ""
    thinking: str = ""
    calls: Sequence[OllamaToolCall] = ()
    logprobs: Sequence[TokenLogprob] = ()


def _joined(pieces: Sequence[Piece]) -> Piece:
    return Piece(
        "".join(piece.content for piece in pieces),
        "".join(piece.thinking for piece in pieces),
        [call for piece in pieces for call in piece.calls],
        [logprob for piece in pieces for logprob in piece.logprobs],
    )


def record(kind: Kind, model: str, piece: Piece, **facts: Any) -> OllamaRecord:
    thinking = piece.thinking or UNSET
    head = {"model": model, "created_at": timestamp(), "logprobs": [*piece.logprobs] or UNSET, **facts}
    if kind == "generate":
        return OllamaGenerateAnswer(response=piece.content, thinking=thinking, **head)
    message = OllamaAnswerMessage("assistant", piece.content, thinking, [*piece.calls] or UNSET)
    return OllamaChatAnswer(message=message, **head)


class OllamaAnswer:
    """One answer, as lines or as one record: the encoder of the answer and of its only choice."""

    def __init__(
        self,
        kind: Kind,
        call: Call[Any],
        turn: Turn,
        logprobs: int | None,
        *,
        thinking: bool,
        stream: bool,
        names: Mapping[str, str],
    ) -> None:
        """`logprobs`: alternatives per token; None: no log-probabilities. `thinking`: whether to show the reasoning.

        `names`: the client's names of functions, by those that the model sees.
        """
        self.turn = turn
        self._kind, self._model, self._arrived_s = kind, call.name, call.arrived_s
        self._logprobs = ContentLogprobs(call.model.tokenizer, logprobs, turn.logprobs)
        self._thinking, self._stream, self._names = thinking, stream, names
        self._kept: list[Piece] = []  # if the answer is sent whole
        self._call = OllamaToolCall(OllamaFunctionCall(""))  # the incomplete call, and its arguments so far
        self._arguments: list[str] = []

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        pieces = self._pieces(events)
        if self._stream:
            return b"".join(line(record(self._kind, self._model, piece)) for piece in pieces)
        self._kept += pieces
        return b""

    def _pieces(self, events: Sequence[TurnEvent]) -> Iterator[Piece]:
        """A tool call is sent when it is complete, since its arguments are an object."""
        for event in events:
            match event:
                case ReasoningDelta() if self._thinking:
                    yield Piece(thinking=event.text)
                case ContentDelta():
                    yield Piece(event.text, logprobs=self._logprobs.of(event))
                case ToolCallBegin():
                    function = OllamaFunctionCall(self._names[event.name], index=event.index)
                    self._call, self._arguments = OllamaToolCall(function, event.id), []
                case ToolCallDelta():
                    self._arguments.append(event.arguments)
                case MessageEnd(kind="tool_call"):
                    self._call.function.arguments = arguments_object("".join(self._arguments))
                    yield Piece(calls=[self._call])

    def _last(self) -> OllamaRecord:
        """The last record, with durations: of the prompt until the first token, of the answer from there until now."""
        turn, now_s = self.turn, time.perf_counter()
        assert turn.times is not None
        first_s, scheduled_s = turn.times.first_s or now_s, turn.times.scheduled_s or now_s
        return record(
            self._kind,
            self._model,
            _joined(self._kept),
            done=True,
            done_reason="length" if turn.finish_reason == "length" else "stop",
            total_duration=_ns(now_s - self._arrived_s),
            load_duration=_LOADED_NS,
            prompt_eval_count=turn.num_prompt_tokens,
            prompt_eval_duration=_ns(first_s - scheduled_s),
            eval_count=turn.num_tokens,
            eval_duration=_ns(now_s - first_s),
        )

    def last_event(self) -> bytes:
        return line(self._last())

    def failure(self, error: APIError) -> bytes:
        return line(ErrorText(error.message))

    def body(self) -> bytes:
        return msgspec.json.encode(self._last())


def _ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
