"""One choice of a text completion: tokens in, raw text out.

Knows text, stop strings and the older shape of log-probabilities; nothing of harmony, nor how answers are encoded.
"""

from collections.abc import Sequence
from typing import Any

from oscine.api.serving.logprobs import TextLogprobs
from oscine.chat.detokenizer import Detokenizer
from oscine.chat.stop_strings import StopStrings
from oscine.chat.tokenizer import Tokenizer
from oscine.types import GenerationOutput


class TextChoice:
    """Grows with the engine's outputs. finish_reason is set when it is complete: stop or length.

    Log-probabilities are those of every generated token, special ones too, up to the one that ends the choice.
    """

    interrupted = False

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: list[int],
        *,
        stop: Sequence[str] = (),
        echo: bool = False,
        top_logprobs: int | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self.prompt = prompt
        self._echo = echo
        self._skip_special = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop) if stop else None
        self._logprobs = None if top_logprobs is None else TextLogprobs(tokenizer, top_logprobs)
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None

    def continuation(self) -> None:
        """One request of the engine is all of it."""

    def feed(self, output: GenerationOutput) -> str:
        """The text that can be shown now."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = ""
        if self._echo:
            text = self._echoed(output)
            self._echo = False
        for i, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self._logprobs is not None and output.logprobs is not None:
                self._logprobs.add(token_id, output.logprobs[i])
            text += self._shown(self._text(token_id))
            if self._stops is not None and self._stops.matched is not None:
                self.finish_reason = "stop"
                return text
        if output.finish_reason is not None:
            text += self._shown(self._detokenizer.finish())
            text += "" if self._stops is None else self._stops.finish()
            stopped = self._stops is not None and self._stops.matched is not None
            self.finish_reason = "stop" if stopped else output.finish_reason
        return text

    def take_logprobs(self) -> dict[str, Any] | None:
        """Of the tokens since the last call; None when they were not asked for."""
        if self._logprobs is None:
            return None
        lists = self._logprobs.lists
        self._logprobs.clear()
        return lists

    def _text(self, token_id: int) -> str:
        name = self._tokenizer.token_bytes(token_id)
        if self._skip_special or not name or not self._tokenizer.is_special(token_id):
            return self._detokenizer.add(token_id)
        return self._detokenizer.finish() + name.decode()

    def _shown(self, text: str) -> str:
        return text if self._stops is None else self._stops.feed(text)

    def _echoed(self, output: GenerationOutput) -> str:
        """The prompt, with its log-probabilities; stop strings are not looked for in it."""
        if self._logprobs is not None:
            for token_id, position in zip(self.prompt, [None, *(output.prompt_logprobs or ())], strict=True):
                self._logprobs.add(token_id, position)
        if not self._skip_special:
            return self._tokenizer.decode(self.prompt)
        detokenizer = Detokenizer(self._tokenizer)
        return detokenizer.feed(self.prompt) + detokenizer.finish()
