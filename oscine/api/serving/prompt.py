"""Prompts as token ids. Long ones are made beside the event loop."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TypeVar

from oscine.api.http.errors import APIError, invalid
from oscine.api.http.work import REQUESTS, beside
from oscine.chat.harmony import HarmonyRenderer, PromptTooLong
from oscine.chat.messages import BuiltinCall, Conversation, ConversationError
from oscine.chat.tokenizer import Tokenizer

T = TypeVar("T")
_MOST_TOKENS = 1 << 20  # of one text: more than any context, and as many as become Python's without a pause


class Prompts:
    """Tokenises for one model, and back."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_queued_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = HarmonyRenderer(tokenizer)
        self._max_model_len = max_model_len
        self._max_queued_tokens = max_queued_tokens
        self._threads = REQUESTS

    def using(self, threads: ThreadPoolExecutor) -> "Prompts":
        """The same, made in other threads."""
        other = copy(self)
        other._threads = threads
        return other

    async def _beside(self, make: Callable[[], T], size: int) -> T:
        return await beside(make, size, self._threads)

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Special tokens typed in are plain text. Raises APIError for more tokens than the server takes at once."""
        return await self._beside(lambda: self._encode(texts), sum(map(len, texts)))

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        if self._tokenizer.exceeds(texts, self._max_queued_tokens):
            raise APIError(f"The request has more than the {self._max_queued_tokens} tokens that this server takes.")
        if any(self._tokenizer.exceeds([text], _MOST_TOKENS) for text in texts):
            raise APIError(f"A text has more than {_MOST_TOKENS} tokens.", code="context_length_exceeded")
        return [self._tokenizer.encode(text) for text in texts]

    async def decode(self, token_ids: list[int]) -> str:
        """Special tokens by name, invalid UTF-8 as U+FFFD."""
        return await self._beside(lambda: self._tokenizer.decode(token_ids), len(token_ids))

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as `decode` gives it."""
        return await self._beside(lambda: [self._tokenizer.decode([i]) for i in token_ids], len(token_ids))

    async def render(self, conversation: Conversation, size: int, messages: str = "messages") -> list[int]:
        """`size`: bytes of the request, with tools and schemas. `messages`: name of the parameter with the messages.

        Raises APIError for a conversation that has no rendering, or that is so long that none is made.
        """
        try:
            return await self._beside(lambda: self._renderer.render(conversation, self._max_model_len), size)
        except PromptTooLong:
            message = f"The context of this model holds {self._max_model_len} tokens, and '{messages}' has many more."
            raise APIError(message, param=messages, code="context_length_exceeded") from None
        except ConversationError as error:
            raise invalid(messages if error.param == "messages" else error.param, str(error)) from None

    async def after_call(self, token_ids: Sequence[int], call: BuiltinCall, result: str) -> list[int]:
        """The prompt that goes on with the result of a built-in call; see HarmonyRenderer."""
        return await self._beside(lambda: self._renderer.after_call(token_ids, call, result), len(result))

    def into_final(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt that makes the model answer at once; see HarmonyRenderer."""
        return self._renderer.into_final(token_ids)
