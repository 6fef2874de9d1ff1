"""One answer while it streams: when its tokens came, how many they were, what went wrong."""

import json
import math
import re
from array import array
from collections.abc import MutableSequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

from oscine.extensions.bench.serve.api import Api, decode, error_of, usage_of

_USAGE = re.compile(rb'"usage" ?: ?\{')
# Tokens after a chat's end (`ignore_eos`) have no text, so the last event with text is not the end.
_END = re.compile(rb'"finish_reason" ?: ?"[^"]|"type" ?: ?"response\.(?:completed|incomplete)"')
_ERROR = re.compile(rb'"error" ?: ?[{"]|^event: error|"type" ?: ?"error"')

Counters: TypeAlias = "MutableSequence[int] | memoryview[int]"


@dataclass(slots=True)
class Record:
    """One request. Times are seconds by time.perf_counter()."""

    due_s: float  # when it should have been sent
    sent_s: float
    events_s: "array[float]" = field(default_factory=lambda: array("d"))  # of the events with tokens
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    has_usage: bool = True  # False: every event counts as a token
    error: str = ""
    begun_s: float = math.nan  # of the first event of any kind
    ended_s: float = math.nan  # of the event that says why the answer ends, if it carries no token

    @property
    def last_s(self) -> float:
        """When the last token was there."""
        return self.events_s[-1] if math.isnan(self.ended_s) else max(self.ended_s, self.events_s[-1])


class Answer:
    """Takes a body in pieces. `counter[0]` counts events with tokens over all answers."""

    def __init__(self, api: Api, record: Record, counter: Counters, *, keep: bool) -> None:
        """`keep`: the text is wanted afterwards."""
        self.record = record
        self._search = api.token.search
        self._counter = counter
        self._kept: list[bytes] | None = [] if keep else None
        self._status, self._is_stream = 0, False
        self._latest_s = math.nan
        self._rest = b""
        self._last = self._usage = self._error = b""  # events

    @property
    def begun(self) -> bool:
        return self._status != 0

    @property
    def kept(self) -> list[bytes]:
        """The events with tokens."""
        return self._kept or []

    def head(self, status: int, content_type: str) -> None:
        self._status, self._is_stream = status, content_type.startswith("text/event-stream")

    def feed(self, data: bytes, now_s: float) -> None:
        data = self._rest + data if self._rest else data
        self._latest_s = now_s
        if self._status != 200 or not self._is_stream:
            self._rest = data
            return
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        if math.isnan(self.record.begun_s) and not all(event.startswith(b":") for event in events):
            self.record.begun_s = now_s  # a comment, which keeps the connection alive, is no event
        search, count = self._search, 0
        for event in events:
            if search(event):
                count += 1
                self._last = event
                if self._kept is not None:
                    self._kept.append(event)
            else:
                self._note(event)
        if count:
            self.record.events_s.extend(repeat(now_s, count))
            self._counter[0] += count

    def _note(self, event: bytes) -> None:
        """Of an event without tokens."""
        if _END.search(event):
            self.record.ended_s = self._latest_s
        if _USAGE.search(event):
            self._usage = event
        if _ERROR.search(event):
            self._error = event

    def finish(self) -> None:
        """Called at the end of the body."""
        record = self.record
        usage = usage_of(decode(self._usage)) or usage_of(decode(self._last))
        if usage is not None and usage[1] and not record.events_s:
            record.events_s.append(self._latest_s)  # tokens without text, such as a part of a character
        record.error = self._problem()
        record.has_usage = usage is not None
        if usage is None:
            record.output_tokens = len(record.events_s)
        else:
            record.prompt_tokens, record.output_tokens, record.cached_tokens = usage

    def _problem(self) -> str:
        if self._status != 200:
            return f"{self._status}: {_reason(self._rest)}"
        if not self._is_stream:
            return "the answer is not a stream"
        if self._error and (error := error_of(decode(self._error))):
            return error
        return "" if self.record.events_s else "no token came"


def _reason(body: bytes) -> str:
    try:
        reason = error_of(json.loads(body))
    except (ValueError, AttributeError):
        reason = None
    return " ".join((reason or body.decode(errors="replace")).split())[:300]
