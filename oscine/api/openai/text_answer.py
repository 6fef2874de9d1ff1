"""What a text completion is answered with: events of a stream, or one object."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from oscine.api.openai.answers import Completion, CompletionChoice
from oscine.api.openai.stream import OpenAIAnswer
from oscine.api.serving.logprobs import TextLogprobs
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.chat.detokenizer import Detokenizer
from oscine.chat.events import ContentDelta
from oscine.chat.tokenizer import Tokenizer


class TextAnswer(OpenAIAnswer):
    """The answer to one request: n choices for each prompt, in the order of the prompts."""

    def __init__(
        self, turns: Sequence[Turn], num_prompts: int, model: str, body: CompletionRequest, tokenizer: Tokenizer
    ) -> None:
        super().__init__(("cmpl", "text_completion"), model, body, turns, num_prompts)
        self.request, self.tokenizer = body, tokenizer
        self.choices = [TextChoice(self, i, turn) for i, turn in enumerate(turns)]

    def body(self) -> bytes:
        choices = [choice.answer() for choice in self.choices]
        return msgspec.json.encode(
            Completion(self.id, "text_completion", self.created, self.model, choices, self.usage())
        )


class TextChoice:
    """One choice, sent event by event or as a whole.

    Log-probabilities are those of every generated token, special ones too, up to the one that ends the choice.
    """

    def __init__(self, answer: TextAnswer, index: int, turn: Turn) -> None:
        body = answer.request
        self.turn = turn
        self._index, self._tokenizer = index, answer.tokenizer
        self._start, self._end = answer.start, answer.end  # not the answer: a cycle would be left to the collector
        self._prompt = turn.request.prompt_token_ids
        self._echo, self._skip_special = bool(body.echo), body.skip_special_tokens is not False
        self._streams, self._with_ids = bool(body.stream), bool(body.return_token_ids)
        self._logprobs = None if body.logprobs is None else TextLogprobs(answer.tokenizer, body.logprobs)
        self._text: list[str] = []  # not sent yet
        self._num_seen = self._num_sent = 0  # generated tokens
        self._prompt_ids: list[int] | UnsetType = self._prompt  # not sent yet

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        if self._echo:
            self._echo = False
            self._text.append(self._echoed())
        self._text += [event.text for event in events if type(event) is ContentDelta]
        if self._logprobs is not None and self.turn.logprobs:
            positions = range(self._num_seen, self.turn.num_tokens)
            for i in positions:
                self._logprobs.add(self.turn.generated[i], self.turn.logprobs[i])
            self._num_seen = self.turn.num_tokens
        if not self._streams or not (any(self._text) or self.turn.finish_reason is not None or self._with_ids):
            return b""
        return self._start + b',"choices":[' + msgspec.json.encode(self.answer()) + b"]" + self._end

    def answer(self) -> CompletionChoice:
        """The choice with the text that was not sent yet."""
        text, self._text = "".join(self._text), []
        logprobs = None if self._logprobs is None else self._logprobs.take()
        reason: Any = self.turn.finish_reason  # null in all events but the last one
        choice = CompletionChoice(self._index, text, logprobs, reason)
        if self._with_ids:
            choice.prompt_token_ids, self._prompt_ids = self._prompt_ids, UNSET
            choice.token_ids = self.turn.generated[self._num_sent :]
            self._num_sent = self.turn.num_tokens
        return choice

    def _echoed(self) -> str:
        """The prompt, with its log-probabilities; stop strings are not looked for in it."""
        if self._logprobs is not None:
            for token_id, position in zip(self._prompt, [None, *(self.turn.prompt_logprobs or ())], strict=True):
                self._logprobs.add(token_id, position)
        if not self._skip_special:
            return self._tokenizer.decode(self._prompt)
        detokenizer = Detokenizer(self._tokenizer)
        return detokenizer.feed(self._prompt) + detokenizer.finish()
