"""Reasoning kept between tool calls for clients that drop it, by the ids of the calls that it led to.

Knows conversations; not how they are sent or what tokens they are.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from oscine.chat.messages import Conversation, Message

MOST_CALLS = 16_384
MOST_BYTES = 64 << 20
LONGEST_S = 24 * 3600.0


class ReasoningMemory:
    """Forgets the oldest first: what is above MOST_CALLS or MOST_BYTES, and all that is older than LONGEST_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[str, tuple[str, float]] = OrderedDict()  # call id -> reasoning, and when it was kept
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, call_ids: Sequence[str], reasoning: str) -> None:
        """`call_ids` are the calls of one turn."""
        if not reasoning:
            return
        now_s = self._clock()
        for call_id in call_ids:
            self._forget(call_id)
            self._kept[call_id] = (reasoning, now_s)
            self.num_bytes += _size(reasoning)
        self._shrink(now_s)

    def _shrink(self, now_s: float) -> None:
        while self._kept:
            oldest, (_, kept_s) = next(iter(self._kept.items()))
            fits = len(self._kept) <= MOST_CALLS and self.num_bytes <= MOST_BYTES
            if fits and now_s - kept_s <= LONGEST_S:
                return
            self._forget(oldest)

    def _forget(self, call_id: str) -> None:
        if call_id in self._kept:
            self.num_bytes -= _size(self._kept.pop(call_id)[0])

    def restore(self, conversation: Conversation) -> Conversation:
        """The conversation with the reasoning that its calls lack and that is still known."""
        self._shrink(self._clock())
        messages = conversation.messages
        if not any(message.tool_calls and not message.reasoning for message in messages):
            return conversation
        return replace(conversation, messages=tuple(map(self._restored, messages)))

    def _restored(self, message: Message) -> Message:
        if message.reasoning or not message.tool_calls:
            return message
        known = next((self._kept[call.id][0] for call in message.tool_calls if call.id in self._kept), None)
        return message if known is None else replace(message, reasoning=known)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
