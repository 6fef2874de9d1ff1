"""What the answers of chat and text completions share: their head, their usage, and how a stream ends."""

import time
import uuid
from collections.abc import Sequence

import msgspec

from oscine.api.common.errors import APIError
from oscine.api.http.sse import DONE, event
from oscine.api.openai.answers import CompletionDetails, PromptDetails, Usage
from oscine.api.serving.schemas import ChatCompletionRequest, CompletionRequest
from oscine.api.turns.progress import Turn


class OpenAIAnswer:
    """The answer to one request. What is the same in all its chunks is encoded once: `start` and `end`."""

    def __init__(
        self,
        kind: tuple[str, str],
        model: str,
        body: ChatCompletionRequest | CompletionRequest,
        turns: Sequence[Turn],
        num_prompts: int = 1,
    ) -> None:
        """`kind`: prefix of the id, and `object` of a chunk. `turns`: the same number per prompt."""
        prefix, name = kind
        self.id, self.created, self.model = f"{prefix}-{uuid.uuid4().hex}", int(time.time()), model
        self._turns, self._firsts = turns, turns[:: len(turns) // num_prompts]
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        head = {"id": self.id, "object": name, "created": self.created, "model": model}
        self.start = b"data: " + msgspec.json.encode(head)[:-1]
        self.end = b',"usage":null}\n\n' if self._include_usage else b"}\n\n"

    def usage(self) -> Usage:
        """Each prompt is counted once for all its choices. Completion tokens include reasoning."""
        prompt = sum(turn.num_prompt_tokens for turn in self._firsts)
        cached = sum(turn.num_cached_tokens for turn in self._firsts)
        completion = sum(turn.num_tokens for turn in self._turns)
        reasoning = sum(turn.num_reasoning_tokens for turn in self._turns)
        return Usage(prompt, completion, prompt + completion, PromptDetails(cached), CompletionDetails(reasoning))

    def last_event(self) -> bytes:
        if not self._include_usage:
            return DONE
        return self.start + b',"choices":[],"usage":' + msgspec.json.encode(self.usage()) + b"}\n\n" + DONE

    def failure(self, error: APIError) -> bytes:
        return event(error.body()) + DONE
