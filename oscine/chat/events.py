"""The events of the parser while a completion streams. Plain records; no tokens, no JSON."""

from dataclasses import dataclass, field
from typing import Literal

MessageKind = Literal["reasoning", "content", "tool_call", "builtin_call"]


@dataclass(slots=True)
class ReasoningDelta:
    text: str  # never empty


@dataclass(slots=True)
class ContentDelta:
    text: str  # never empty
    token_indices: list[int]  # indices of the text's tokens, counted from the first one fed; each reported once
    preamble: bool = field(default=False, compare=False)  # said before calls, in the commentary channel


@dataclass(slots=True)
class ToolCallBegin:
    index: int  # counts the calls of the completion from 0
    id: str
    name: str  # without the namespace


@dataclass(slots=True)
class ToolCallDelta:
    index: int
    arguments: str  # never empty


@dataclass(slots=True)
class BuiltinCallBegin:
    recipient: str  # with its namespace
    channel: Literal["analysis", "commentary"]


@dataclass(slots=True)
class BuiltinCallDelta:
    content: str  # never empty


@dataclass(slots=True)
class MessageEnd:
    """A message that reported anything is over."""

    kind: MessageKind
    cut: bool = field(default=False, compare=False)  # whether the token budget ended it


Event = ReasoningDelta | ContentDelta | ToolCallBegin | ToolCallDelta | BuiltinCallBegin | BuiltinCallDelta | MessageEnd
