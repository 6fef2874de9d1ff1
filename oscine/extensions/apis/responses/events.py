"""The events of one response: numbered, encoded, and kept as long as they may be read again."""

from collections.abc import Collection
from typing import Any

import msgspec

from oscine.api.common.asgi import Write
from oscine.api.http.sse import named_event
from oscine.extensions.apis.responses.view import shown

_encode = msgspec.json.encode
_END = b"\n\n"


class ResponseEvents:
    """With `kept`, a background response can be read from any event on."""

    def __init__(self, include: Collection[str] = (), *, wanted: bool = True, kept: bool = False) -> None:
        """`include` is how much of an item the client wants to see."""
        self._include = include
        self._wanted = wanted or kept
        self._kept = kept
        self._events: list[bytes] = []
        self.num_taken = 0  # events that `take` has given
        self._number = 0

    def add(self, kind: str, **fields: Any) -> None:
        """The next event. Nothing is encoded for an answer that is sent whole."""
        if self._wanted:
            data = _encode({"type": kind, **fields, "sequence_number": self._number})
            self._events.append(named_event(kind, data))
            self._number += 1

    def add_item(self, kind: str, index: int, item: dict[str, Any]) -> None:
        if self._wanted:
            self.add(kind, output_index=index, item=shown(item, self._include))

    def take(self) -> bytes:
        """The events since the last call."""
        if self._kept:
            events = self._events[self.num_taken :]
        else:
            events, self._events = self._events, []
        self.num_taken += len(events)
        return b"".join(events)

    async def flush(self, write: Write | None) -> None:
        """Sends the result of `take`, if the response has a reader."""
        events = self.take()
        if write is not None and events:
            await write(events)

    def since(self, number: int) -> bytes:
        """The kept events from a number on, up to the last one that `take` has returned."""
        return b"".join(self._events[number : self.num_taken])

    def all(self) -> bytes | None:
        """Every event, if they are kept, for `events_since`."""
        return b"".join(self._events) if self._kept else None


def events_since(stored: bytes, number: int) -> bytes:
    """The same of events that were stored as one text."""
    return b"".join(event + _END for event in stored.split(_END)[number:-1])
