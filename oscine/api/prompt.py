"""Prompts as token ids, made without holding up the event loop.

Knows how long a text may be to be tokenised at once; not where it comes from.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from oscine.api.errors import invalid
from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.messages import Conversation
from oscine.chat.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_CHARACTERS = 16_384  # some milliseconds of tokenising; longer texts go to a thread


class Prompts:
    """Tokenises for one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._renderer = HarmonyRenderer(tokenizer)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Special tokens typed in are plain text."""
        return await _run(lambda: [self._tokenizer.encode(text) for text in texts], sum(map(len, texts)))

    async def render(self, conversation: Conversation) -> list[int]:
        """Raises APIError for a conversation that has no rendering."""
        size = sum(len(m.content) + len(m.reasoning or "") for m in conversation.messages)
        try:
            return await _run(lambda: self._renderer.render(conversation), size)
        except ValueError as error:
            param = "tools" if "tool " in str(error) and "tool message" not in str(error) else "messages"
            raise invalid(param, str(error)) from None


async def _run(make: Callable[[], T], characters: int) -> T:
    return make() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(make)
