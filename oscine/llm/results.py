"""What a request is answered with."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from oscine.api.openai.answers import AnswerToolCall, ChatCompletionChoice, CompletionChoice, Usage
from oscine.api.serving.logprobs import CompletionLogprobs, TokenLogprob
from oscine.api.serving.schemas import arguments_object

Message = dict[str, Any]  # a message of OpenAI's chat completions


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made, of one of the caller's functions."""

    id: str
    name: str
    arguments: str  # JSON text, exactly as the model wrote it

    @property
    def kwargs(self) -> dict[str, Any]:
        """The arguments. A text that is no JSON object is in the field `invalid_json`."""
        return arguments_object(self.arguments)

    def message_part(self) -> Message:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One of the `n` answers."""

    content: str | None  # None: there are only calls
    reasoning: str | None
    tool_calls: list[ToolCall]
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: list[TokenLogprob] | None  # of the content's tokens, if asked for
    token_ids: list[int] = field(repr=False)  # all that was generated

    @classmethod
    def of(cls, choice: ChatCompletionChoice, token_ids: list[int]) -> "ChatChoice":
        said, logprobs = choice.message, choice.logprobs
        called = (call for call in said.tool_calls or () if isinstance(call, AnswerToolCall))
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in called]
        return cls(
            said.content,
            said.reasoning or said.reasoning_content or None,
            calls,
            choice.finish_reason,
            None if logprobs is None else logprobs.content,
            token_ids,
        )

    def message(self) -> Message:
        """The assistant's message, for the conversation to go on."""
        made: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            made["reasoning"] = self.reasoning
        if self.tool_calls:
            made["tool_calls"] = [call.message_part() for call in self.tool_calls]
        return made


@dataclass(slots=True)
class ChatResult:
    """The answer to a conversation. Its own fields are those of the first choice."""

    choices: list[ChatChoice]
    usage: Usage  # over all turns, if functions were called
    messages: list[Message]  # what the conversation continues with: calls, their results, the first choice
    parse: Callable[[str], Any] | None = field(default=None, repr=False)  # of the class in `response_format`

    @property
    def content(self) -> str | None:
        return self.choices[0].content

    @property
    def reasoning(self) -> str | None:
        return self.choices[0].reasoning

    @property
    def tool_calls(self) -> list[ToolCall]:
        return self.choices[0].tool_calls

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        return self.choices[0].finish_reason

    @property
    def parsed(self) -> Any:
        """The content as an object of the class in `response_format`. Raises ValueError for a content that is cut."""
        return _parsed(self.parse, self.content)


@dataclass(frozen=True, slots=True)
class TextChoice:
    """One of the `n` continuations of a prompt."""

    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None
    token_ids: list[int] = field(repr=False)

    @classmethod
    def of(cls, choice: CompletionChoice, token_ids: list[int]) -> "TextChoice":
        return cls(choice.text, choice.finish_reason, choice.logprobs, token_ids)


@dataclass(slots=True)
class TextResult:
    """The continuation of a prompt. Its own fields are those of the first choice."""

    choices: list[TextChoice]
    usage: Usage
    parse: Callable[[str], Any] | None = field(default=None, repr=False)

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return self.choices[0].finish_reason

    @property
    def token_ids(self) -> list[int]:
        return self.choices[0].token_ids

    @property
    def parsed(self) -> Any:
        """As ChatResult.parsed."""
        return _parsed(self.parse, self.text)


def _parsed(parse: Callable[[str], Any] | None, text: str | None) -> Any:
    if parse is None:
        raise ValueError("response_format names no class")
    return parse(text or "")


def summed(earlier: Usage | None, usage: Usage) -> Usage:
    """The usage of several turns."""
    if earlier is None:
        return usage
    numbers = _added(msgspec.to_builtins(earlier), msgspec.to_builtins(usage))
    return msgspec.convert(numbers, Usage)


def _added(one: Any, other: Any) -> Any:
    return {key: _added(one[key], other[key]) for key in one} if isinstance(one, dict) else one + other
