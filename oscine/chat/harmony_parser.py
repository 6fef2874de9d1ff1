"""Completion tokens to reasoning, content and tool calls, as they stream.

Takes any tokens: it never raises, and no special token gets into text.
"""

import secrets
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Literal

from oscine.chat.detokenizer import Detokenizer
from oscine.chat.events import (
    BuiltinCallBegin,
    BuiltinCallDelta,
    ContentDelta,
    Event,
    MessageEnd,
    MessageKind,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from oscine.chat.header import Header, Opening
from oscine.chat.stop_strings import StopStrings
from oscine.chat.tokenizer import Tokenizer

# return, call and endoftext are tokens; stop is a stop string; turn is a message of another role. A complete built-in
# call is a call, whichever token ended it.
Terminator = Literal["return", "call", "endoftext", "stop", "turn"]

_Ending = Literal["marker", "implied", "cut"]
_TEXTS: tuple[MessageKind, ...] = ("reasoning", "content")


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _Guard:
    """Keeps stop strings out of content, and tracks the tokens of the shown text."""

    __slots__ = ("_pending", "_shown", "_taken", "stops")

    def __init__(self, stops: StopStrings) -> None:
        self.stops = stops
        self._pending: deque[tuple[int, int]] = deque()  # tokens not shown yet: index, characters before its text
        self._taken = 0  # characters
        self._shown = 0  # characters

    def add(self, index: int | None, text: str, shown_indices: list[int]) -> str:
        """The text to show now; appends the indices of its tokens."""
        if index is not None:
            self._pending.append((index, self._taken))
        self._taken += len(text)
        return self._show(self.stops.feed(text), shown_indices)

    def finish(self, shown_indices: list[int]) -> str:
        return self._show(self.stops.finish(), shown_indices)

    def _show(self, text: str, shown_indices: list[int]) -> str:
        self._shown += len(text)
        while self._pending and self._pending[0][1] < self._shown:
            shown_indices.append(self._pending.popleft()[0])
        return text


class _EventWriter:
    """Makes events of the texts of messages, one message after another."""

    def __init__(self, separator: str, call_id: Callable[[], str], guard: _Guard | None) -> None:
        self._separator, self._new_call_id, self._guard = separator, call_id, guard
        self.num_reasoning_tokens = 0
        self.num_tool_calls = 0
        self.kind: MessageKind = "content"  # of the message
        self._recipient = ""  # of the call that the message is
        self._in_commentary = False  # whether the message is in the commentary channel: content there is a preamble
        self._begun = False  # whether the message reported anything
        self._said: set[MessageKind] = set()  # kinds of earlier messages with text
        self._parts: list[str] = []  # text not reported yet
        self._indices: list[int] = []  # content tokens not reported yet
        self._events: list[Event] = []

    @property
    def stop_string(self) -> str | None:
        return self._guard.stops.matched if self._guard else None

    def begin(self, kind: MessageKind, recipient: str, *, in_commentary: bool) -> None:
        self.kind, self._recipient, self._in_commentary, self._begun = kind, recipient, in_commentary, False

    def add(self, index: int | None, text: str) -> bool:
        """Takes text of the message; text without an index completes that of earlier tokens. True: it must stop."""
        guard = self._guard
        if self.kind != "content":
            self.num_reasoning_tokens += self.kind == "reasoning" and index is not None
        elif guard is not None:
            text = guard.add(index, text, self._indices)
        elif index is not None:
            self._indices.append(index)
        if text:
            self._parts.append(text)
        return guard is not None and guard.stops.matched is not None

    def end(self, *, by_marker: bool) -> MessageKind | None:
        """Ends the message. Returns its kind if it reported anything, as a call that a marker ends always does."""
        if self._guard is not None and self.kind == "content":
            held = self._guard.finish(self._indices)
            self._parts += [held] if held else []
        if self._parts:
            self._report()
        elif self.kind not in _TEXTS and not self._begun and by_marker:
            self._report_begin()
        if not self._begun:
            return None
        self._events.append(MessageEnd(self.kind))
        self._begun = False
        return self.kind

    def take_events(self) -> list[Event]:
        if self._parts:
            self._report()
        events, self._events = self._events, []
        return events

    def _report(self) -> None:
        """Makes an event of the text that has come since the last one."""
        text = "".join(self._parts)
        self._parts = []
        if not self._begun:
            self._report_begin()
            if self.kind in _TEXTS:
                text = self._separator + text if self.kind in self._said else text
                self._said.add(self.kind)
        if self.kind == "tool_call":
            self._events.append(ToolCallDelta(self.num_tool_calls - 1, text))
        elif self.kind == "builtin_call":
            self._events.append(BuiltinCallDelta(text))
        elif self.kind == "reasoning":
            self._events.append(ReasoningDelta(text))
        else:
            self._events.append(ContentDelta(text, self._indices, self._in_commentary))
            self._indices = []

    def _report_begin(self) -> None:
        self._begun = True
        if self.kind == "tool_call":
            self._events.append(ToolCallBegin(self.num_tool_calls, self._new_call_id(), self._recipient))
            self.num_tool_calls += 1
        elif self.kind == "builtin_call":
            self._events.append(BuiltinCallBegin(self._recipient, "commentary" if self._in_commentary else "analysis"))


class _MessageReader:
    """Divides a turn into messages by its markers and headers, and says when it is over."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        writer: _EventWriter,
        namespaces: Collection[str],
        functions: Collection[str] | None,
    ) -> None:
        self._detokenizer, self._writer = detokenizer, writer
        self._namespaces = frozenset(namespaces)
        self._functions = None if functions is None else frozenset(functions)
        self.terminator: Terminator | None = None
        self.num_tokens = 0  # fed, up to and with the terminator
        self.header: Header | None  # None inside a message
        self.begin_header("prompt")

    def begin_header(self, opening: Opening) -> None:
        self.header = Header(opening, self._namespaces)

    def add_to_header(self, header: Header, index: int, text: str) -> None:
        header.add(index, text)
        if header.is_broken:
            self._enter_message(header, header.body())

    def _enter_message(self, header: Header, pieces: Sequence[tuple[int, str]] = ()) -> None:
        """`pieces`: text of the message that came with the header, by token index."""
        builtin, function, channel = header.builtin, header.function, header.channel
        self.header = None
        kind: MessageKind
        if builtin is not None:
            kind = "builtin_call"
        elif self._may_call(function):
            kind = "tool_call"
        else:
            misled = function is not None and channel != "final"
            kind = "reasoning" if misled or channel == "analysis" else "content"
        self._writer.begin(kind, builtin or function or "", in_commentary=channel == "commentary")
        for index, text in pieces:
            if self.terminator is None and self._writer.add(index, text):
                self.terminate("stop")

    def _may_call(self, function: str | None) -> bool:
        return function is not None and (self._functions is None or function in self._functions)

    def close(self, ending: _Ending) -> None:
        """Ends the open message or header: by a marker, because the next one begins, or with the stream."""
        if self.header is not None:
            self._close_header(self.header, ending)
        if self.header is None:
            self._close_message(ending)
        self.begin_header("nothing")

    def _close_header(self, header: Header, ending: _Ending) -> None:
        """A header without <|message|>: words that no header has are the message; a call may have no arguments."""
        header.complete(self._detokenizer.finish())
        pieces = [] if header.of_other_role or (ending == "cut" and header.is_marked) else header.body()
        calls = header.builtin is not None or self._may_call(header.function)
        if pieces or (ending == "marker" and calls and not header.of_other_role):
            self._enter_message(header, pieces)

    def _close_message(self, ending: _Ending) -> None:
        tail = self._detokenizer.finish()
        if tail and self._writer.add(None, tail):
            self.terminate("stop")
        kind = self._writer.end(by_marker=ending == "marker")
        if kind == "builtin_call" and ending != "cut":
            self.num_tokens -= ending == "implied"
            self.terminator = "call"

    def terminate(self, terminator: Terminator) -> None:
        self.close("marker")
        self.terminator = self.terminator or terminator  # a stop string may have been in what was held back

    def on_start(self) -> None:
        self.close("implied")
        self.begin_header("start")

    def on_channel(self) -> None:
        if self.header is None:
            self.close("implied")
        self._enter_section("channel")

    def on_constrain(self) -> None:
        if self.header is not None:
            self._enter_section("format")

    def _enter_section(self, section: Literal["channel", "format"]) -> None:
        assert self.header is not None
        self._end_section(self.header)
        self.header.enter(section)

    def on_message(self) -> None:
        if self.header is not None:
            self._end_section(self.header)
            self._enter_message(self.header)

    def _end_section(self, header: Header) -> None:
        if header.of_other_role:
            self.terminator = "turn"
        header.complete(self._detokenizer.finish())


class HarmonyParser:
    """Starts after the prompt's `<|start|>assistant` and reads up to the first terminator; later tokens are ignored.

    The joined texts, token indices and calls do not depend on how the tokens are divided into calls of `feed`. Stop
    strings are looked for in content alone. Calls to tools of `namespaces` are built-in: tokens after them are ignored
    until `resume`. A message to a function that may not be called is reasoning, or the answer if it is in the final
    channel.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        call_id: Callable[[], str] = new_call_id,
        namespaces: Collection[str] = (),
        separator: str = "\n\n",
        functions: Collection[str] | None = None,
    ) -> None:
        """`separator` joins the texts of messages of one kind. `functions`: names that may be called; None: all."""
        self._start = tokenizer.start
        self.separator = separator
        self._detokenizer = Detokenizer(tokenizer)
        self._texts = tokenizer.texts
        self._is_special = tokenizer.is_special
        self._writer = _EventWriter(separator, call_id, _Guard(StopStrings(stop)) if stop else None)
        self._reader = reader = _MessageReader(self._detokenizer, self._writer, namespaces, functions)
        self._markers: dict[int, Callable[[], None]] = {
            tokenizer.start: reader.on_start,
            tokenizer.channel: reader.on_channel,
            tokenizer.constrain: reader.on_constrain,
            tokenizer.message: reader.on_message,
            tokenizer.end: partial(reader.close, "marker"),
            tokenizer.return_: partial(reader.terminate, "return"),
            tokenizer.call: partial(reader.terminate, "call"),
            tokenizer.endoftext: partial(reader.terminate, "endoftext"),
        }

    @property
    def terminator(self) -> Terminator | None:
        return self._reader.terminator

    @property
    def done(self) -> bool:
        """Whether the turn is over, so that further tokens are of no use."""
        return self._reader.terminator is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return self._writer.stop_string

    @property
    def thinking(self) -> bool:
        """Whether the model is in reasoning or in a header, so in neither an answer nor a call."""
        return self._reader.header is not None or self._writer.kind == "reasoning"

    @property
    def num_tokens(self) -> int:
        """Fed, up to and with the terminator."""
        return self._reader.num_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        """Text of reasoning; markers and headers do not count."""
        return self._writer.num_reasoning_tokens

    @property
    def num_tool_calls(self) -> int:
        return self._writer.num_tool_calls

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        """The events of further tokens, in order."""
        reader, writer, texts = self._reader, self._writer, self._texts
        for token_id in token_ids:
            if reader.terminator is not None:
                break
            index = reader.num_tokens
            reader.num_tokens = index + 1
            text = texts[token_id]
            if text is None and self._is_special(token_id):
                marker = self._markers.get(token_id)
                if marker is not None:
                    marker()
            elif reader.header is not None:
                reader.add_to_header(reader.header, index, self._detokenizer.add(token_id))
            elif writer.add(index, self._detokenizer.add(token_id)):
                reader.terminate("stop")
        return writer.take_events()

    def finish(self) -> list[Event]:
        """The tokens have ended, with or without a terminator. Reports text that was held back."""
        if self._reader.terminator is None:
            self._reader.close("cut")
        return self._writer.take_events()

    def resume(self, prompt: Sequence[int]) -> list[Event]:
        """Generation continues after another prompt, which ends inside a message or header of the assistant. Token
        indices and counts continue too: they cover generated tokens alone. Reports text that was still open.
        """
        events, reader = self.finish(), self._reader
        counted = reader.num_tokens
        start = len(prompt) - 1 - [*reversed(prompt)].index(self._start)
        reader.terminator = None
        events += self.feed(prompt[start:])
        if reader.header is not None:
            reader.begin_header("prompt")
        reader.num_tokens = counted
        return events
