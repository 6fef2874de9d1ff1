"""The token counts of an answer, counted from token ids."""

from msgspec import Struct


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


def usage(*, prompt: int, cached: int, completion: int, reasoning: int) -> Usage:
    """`completion` includes `reasoning`; `prompt` is counted once for all choices, and includes `cached`."""
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), CompletionDetails(reasoning))
