"""Prompts as token ids. Long ones are made beside the event loop."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from typing import TypeVar

from oscine.api.common.errors import APIError, context_overflow, invalid
from oscine.api.common.work import REQUESTS, run_in_thread
from oscine.chat.harmony import HarmonyRenderer, PromptTooLong
from oscine.chat.messages import BuiltinCall, Conversation, ConversationError
from oscine.chat.tokenizer import Tokenizer

T = TypeVar("T")
_MAX_TOKENS = 1 << 20  # of one text for /tokenize: so many ids take 40 MiB


class Prompts:
    """Tokenises for one model, and back."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int, max_queued_tokens: int) -> None:
        self._tokenizer = tokenizer
        self._renderer = HarmonyRenderer(tokenizer)
        self._max_model_len = max_model_len
        self._most_counted = 2 * max_model_len  # tokens; a prompt that does not fit is counted no further
        self._max_queued_tokens = max_queued_tokens
        self._threads = REQUESTS

    def using(self, threads: ThreadPoolExecutor) -> "Prompts":
        """The same, made in other threads."""
        other = copy(self)
        other._threads = threads
        return other

    async def _beside(self, make: Callable[[], T], size: int) -> T:
        return await run_in_thread(make, size, self._threads)

    async def encode(self, texts: Sequence[str], param: str) -> list[list[int]]:
        """The ids of prompts. Special tokens typed in are plain text. `param`: the parameter with the texts.

        Raises APIError for more tokens than the server takes at once, and for a text longer than the context.
        """
        return await self._beside(lambda: self._encode(texts, param), sum(map(len, texts)))

    def _encode(self, texts: Sequence[str], param: str) -> list[list[int]]:
        for text in texts:
            if self._tokenizer.exceeds([text], self._max_model_len):
                raise self._overflow(self._tokenizer.count([text], self._most_counted), param)
        return self._bounded(texts, self._max_queued_tokens)

    async def tokenize(self, text: str) -> list[int]:
        """The ids of a text of any length, but for more tokens than the server takes at once: then raises APIError."""
        most = min(_MAX_TOKENS, self._max_queued_tokens)
        (ids,) = await self._beside(lambda: self._bounded([text], most), len(text))
        return ids

    def _bounded(self, texts: Sequence[str], most: int) -> list[list[int]]:
        if self._tokenizer.exceeds(texts, most):
            raise APIError(f"The request has more than the {most} tokens that this server takes.")
        return [self._tokenizer.encode(text) for text in texts]

    def _overflow(self, num_tokens: int, param: str) -> APIError:
        """`num_tokens`: counted up to `_most_counted`."""
        whole = num_tokens < self._most_counted
        return context_overflow(num_tokens, self._max_model_len, prompt=param, whole=whole)

    async def decode(self, token_ids: list[int]) -> str:
        """Special tokens by name, invalid UTF-8 as U+FFFD."""
        return await self._beside(lambda: self._tokenizer.decode(token_ids), len(token_ids))

    async def decode_each(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself, as `decode` gives it."""
        return await self._beside(lambda: [self._tokenizer.decode([i]) for i in token_ids], len(token_ids))

    async def render(self, conversation: Conversation, size: int, messages: str = "messages") -> list[int]:
        """`size`: bytes of the request, with tools and schemas. `messages`: name of the parameter with the messages.

        Raises APIError for a conversation that cannot be rendered, or is longer than the context.
        """
        try:
            return await self._render(conversation, size, messages)
        except PromptTooLong:
            counted = await self._beside(lambda: self._renderer.count(conversation, self._most_counted), size)
            raise self._overflow(counted, messages) from None

    async def count(self, conversation: Conversation, size: int, messages: str = "messages") -> int:
        """The number of tokens that `render` gives, or would give if the context were longer."""
        try:
            return len(await self._render(conversation, size, messages))
        except PromptTooLong:
            return await self._beside(lambda: self._renderer.count(conversation), size)

    async def _render(self, conversation: Conversation, size: int, messages: str) -> list[int]:
        try:
            return await self._beside(lambda: self._renderer.render(conversation, self._max_model_len), size)
        except ConversationError as error:
            raise invalid(messages if error.param == "messages" else error.param, str(error)) from None

    async def after_call(self, token_ids: Sequence[int], call: BuiltinCall, result: str) -> list[int]:
        """The prompt that goes on with the result of a built-in call; see HarmonyRenderer."""
        return await self._beside(lambda: self._renderer.after_call(token_ids, call, result), len(result))

    async def after_user(self, prompt: Sequence[int], text: str) -> list[int]:
        """The prompt with a user's message at its end; see HarmonyRenderer."""
        return await self._beside(lambda: self._renderer.after_user(prompt, text), len(prompt))

    def into_final(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt that makes the model answer at once; see HarmonyRenderer."""
        return self._renderer.into_final(token_ids)
