"""From a request for a text completion to its turns, and the parser of raw text."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from oscine.api.common.errors import invalid
from oscine.api.common.work import run_in_thread
from oscine.api.serving import sampling
from oscine.api.serving.call import Call
from oscine.api.serving.formats import Form, asked_form, text_constraint
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.turns.dialect import TEXT, Dialect
from oscine.api.turns.progress import Turn
from oscine.chat.detokenizer import Detokenizer
from oscine.chat.events import ContentDelta, Event
from oscine.chat.stop_strings import StopStrings
from oscine.chat.tokenizer import Tokenizer
from oscine.types import SamplingParams

DEFAULT_MAX_TOKENS = 16  # as OpenAI's


async def text_turns(
    call: Call[CompletionRequest], usual: int | None, *, form: Form | None = None, dialect: Dialect = TEXT
) -> list[Turn]:
    """The turns that a request asks for: one per choice of each prompt.

    `usual`: tokens to generate if the request does not say; None: as many as the context has room for. `form`: the
    format of the text; None: the body's own parameters say it.
    """
    body, model = call.body, call.model
    n, stop = body.n or 1, sampling.stop_strings(body)
    read = partial(_prompts, body.prompt, dialect.prompt, model.info.vocab_size)
    given = await run_in_thread(read, call.size, call.caller.threads)
    model.served.admission.check(len(given) * n)
    encoded = iter(await model.prompts.encode([one for one in given if isinstance(one, str)], dialect.prompt))
    prompts = [next(encoded) if isinstance(one, str) else one for one in given]
    form = form or await run_in_thread(lambda: asked_form(body), call.size, call.caller.threads)
    grammar = None if form is None else await text_constraint(form, call.caller, call.size)
    params = [replace(_sampling_params(call, len(prompt), usual, dialect), grammar=grammar) for prompt in prompts]
    requests = [
        call.engine_request(prompt, own, i) for prompt, own in zip(prompts, params, strict=True) for i in range(n)
    ]
    skip = body.skip_special_tokens is not False
    return [Turn(model, request, TextParser(model.tokenizer, stop, skip_special=skip)) for request in requests]


def _prompts(given: str | list[Any], param: str, vocab_size: int) -> list[str | list[int]]:
    """Each prompt, as text or as token ids. Raises APIError for anything else, and for an empty prompt."""
    prompts: list[Any] = [given] if isinstance(given, str) or not given or _is_ids(given) else given
    for prompt in prompts:
        if not prompt or not (isinstance(prompt, str) or _is_ids(prompt)):
            raise invalid(param, "it is a text, token ids, or a list of either, and never empty")
        if not isinstance(prompt, str):
            sampling.check_ids(param, prompt, vocab_size)
    return prompts


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)


def _sampling_params(
    call: Call[CompletionRequest], num_prompt_tokens: int, usual: int | None, dialect: Dialect
) -> SamplingParams:
    body, model = call.body, call.model
    wanted = usual if body.max_tokens is None else body.max_tokens
    of_prompt = body.logprobs if body.echo else None
    return sampling.read(
        body,
        model.info,
        model.tokenizer.turn_end_ids,
        num_prompt_tokens,
        wanted,
        prompt=dialect.prompt,
        param=dialect.limit or "max_tokens",
        minimum=0 if body.echo else 1,
        clipped=dialect.clipped,
        logprobs=body.logprobs,
        # Nothing to generate: the engine then needs something else to report, the prompt's own log-probabilities.
        prompt_logprobs=0 if of_prompt is None and wanted == 0 else of_prompt,
    )


class TextParser:
    """Raw text: tokens in, content out, up to a stop string. All text is one message. A Parser of serving.turn."""

    separator = ""
    num_reasoning_tokens = num_tool_calls = 0
    thinking = False

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), *, skip_special: bool = True) -> None:
        """`skip_special`: whether special tokens are left out; else their names are text."""
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopStrings(stop)
        self._show = self._stops.feed if stop else str
        self.num_tokens = self._num_shown = 0

    @property
    def stop_string(self) -> str | None:
        return self._stops.matched

    @property
    def done(self) -> bool:
        return self._stops.matched is not None

    def feed(self, token_ids: Iterable[int]) -> list[Event]:
        texts = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            texts.append(self._show(self._text(token_id)))
        return self._content("".join(texts))

    def finish(self) -> list[Event]:
        """The events for text that was held back."""
        if self.done:
            return []
        return self._content(self._show(self._detokenizer.finish()) + self._stops.finish())

    def resume(self, prompt: Sequence[int]) -> list[Event]:
        """Generation goes on behind another prompt."""
        return []

    def _text(self, token_id: int) -> str:
        name = self._tokenizer.token_bytes(token_id)
        if self._skip_special or not name or not self._tokenizer.is_special(token_id):
            return self._detokenizer.add(token_id)
        return self._detokenizer.finish() + name.decode()

    def _content(self, text: str) -> list[Event]:
        if not text:
            return []
        first, self._num_shown = self._num_shown, self.num_tokens
        return [ContentDelta(text, [*range(first, self.num_tokens)])]
