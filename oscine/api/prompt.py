"""Prompts as token ids, made without holding up the event loop.

Knows how large a text may be to be dealt with at once; not where it comes from.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeVar

from oscine.api.errors import APIError, invalid
from oscine.chat.harmony import HarmonyRenderer, PromptTooLong
from oscine.chat.messages import BuiltinCall, Conversation
from oscine.chat.tokenizer import Tokenizer

T = TypeVar("T")

_INLINE_SIZE = 16_384  # characters, bytes or tokens: some milliseconds of work; what is larger goes to a thread


class Prompts:
    """Tokenises for one model, and back."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_queued_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = HarmonyRenderer(tokenizer)
        self._max_model_len = max_model_len
        self._max_queued_tokens = max_queued_tokens

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Special tokens typed in are plain text. Raises APIError for more tokens than the server takes at once."""
        return await _run(lambda: self._encode(texts), sum(map(len, texts)))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer.exceeds(texts, self._max_queued_tokens):
            raise APIError(f"The request has more than the {self._max_queued_tokens} tokens that this server takes.")
        return [self._tokenizer.encode(text) for text in texts]

    async def decode(self, sequences: Sequence[list[int]]) -> list[str]:
        """Special tokens by name, invalid UTF-8 as U+FFFD."""
        return await _run(lambda: [self._tokenizer.decode(ids) for ids in sequences], sum(map(len, sequences)))

    async def render(self, conversation: Conversation, size: int, messages: str = "messages") -> list[int]:
        """`size` is that of the request in bytes, tools and schemas included; `messages` is the parameter with those.

        Raises APIError for a conversation that has no rendering, or that is so long that none is made.
        """
        try:
            return await _run(lambda: self._renderer.render(conversation, self._max_model_len), size)
        except PromptTooLong:
            raise APIError(
                f"The context of this model holds {self._max_model_len} tokens, and '{messages}' has many more.",
                param=messages,
                code="context_length_exceeded",
            ) from None
        except ValueError as error:
            param = "tools" if "tool " in str(error) and "tool message" not in str(error) else messages
            raise invalid(param, str(error)) from None

    async def after_call(self, token_ids: Sequence[int], call: BuiltinCall, result: str) -> list[int]:
        """The prompt that goes on with the result of a built-in call; see HarmonyRenderer."""
        return await _run(lambda: self._renderer.after_call(token_ids, call, result), len(result))

    def into_final(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt that makes the model answer, whatever it was saying; see HarmonyRenderer."""
        return self._renderer.into_final(token_ids)


async def _run(make: Callable[[], T], size: int) -> T:
    return make() if size <= _INLINE_SIZE else await asyncio.to_thread(make)
