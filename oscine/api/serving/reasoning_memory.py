"""Reasoning kept between tool calls for clients that drop it, by the ids of the calls that it led to.

Reasoning kept for one owner is not found for another.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace

from oscine.chat.messages import Conversation, Message

MAX_CALLS = 16_384
MAX_BYTES = 64 << 20
LONGEST_S = 24 * 3600.0

_Call = tuple[str, str]  # owner and id


class ReasoningMemory:
    """Forgets the oldest first: above MAX_CALLS or MAX_BYTES, and after LONGEST_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[_Call, tuple[str, float]] = OrderedDict()  # reasoning and the time when it was kept
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, owner: str, call_ids: Sequence[str], reasoning: str) -> None:
        """`call_ids` are the calls of one turn."""
        if not reasoning:
            return
        now_s = self._clock()
        for call in ((owner, call_id) for call_id in call_ids):
            self._forget(call)
            self._kept[call] = (reasoning, now_s)
            self.num_bytes += _size(reasoning)
        self._shrink(now_s)

    def _shrink(self, now_s: float) -> None:
        while self._kept:
            oldest, (_, kept_s) = next(iter(self._kept.items()))
            fits = len(self._kept) <= MAX_CALLS and self.num_bytes <= MAX_BYTES
            if fits and now_s - kept_s <= LONGEST_S:
                return
            self._forget(oldest)

    def _forget(self, call: _Call) -> None:
        if call in self._kept:
            self.num_bytes -= _size(self._kept.pop(call)[0])

    def restore(self, owner: str, conversation: Conversation) -> Conversation:
        """The conversation with the missing reasoning of its calls, as far as it is still known."""
        self._shrink(self._clock())
        messages = conversation.messages
        if not any(message.tool_calls and not message.reasoning for message in messages):
            return conversation
        return replace(conversation, messages=tuple(self._restored(owner, message) for message in messages))

    def _restored(self, owner: str, message: Message) -> Message:
        if message.reasoning or not message.tool_calls:
            return message
        calls = ((owner, call.id) for call in message.tool_calls)
        known = next((self._kept[call][0] for call in calls if call in self._kept), None)
        return message if known is None else replace(message, reasoning=known)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))
