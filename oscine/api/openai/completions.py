"""/v1/completions: raw text or token ids in, raw text out."""

import time
import uuid
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from oscine.api.http.errors import APIError, invalid, unsupported
from oscine.api.http.sse import DONE, event, failure
from oscine.api.openai.endpoint import Call, Endpoint
from oscine.api.openai.text_choice import TextChoice
from oscine.api.openai.usage import Usage, usage
from oscine.api.serving import sampling
from oscine.api.serving.formats import text_constraint
from oscine.api.serving.generation import Generation, SentChoice, engine_request
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.serving.served_model import ReadyModel
from oscine.api.serving.text_format import asked_format
from oscine.types import GenerationOutput, SamplingParams

_DEFAULT_MAX_TOKENS = 16  # as OpenAI's


class Completions(Endpoint[CompletionRequest]):
    request_type = CompletionRequest

    async def answer(self, call: Call[CompletionRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body, model = call.body, call.model
        _check_supported(body)
        n, stop = sampling.choices(body.n), sampling.stop_strings(body.stop)
        given = _prompts(body.prompt)
        model.served.admission.check(len(given) * n)
        prompts = await _token_ids(given, model)
        priority = sampling.priority(body.priority)
        form = asked_format(body)
        grammar = None if form is None else await text_constraint(form.format, form.param, call.size)
        params = [replace(_sampling_params(body, len(prompt), model), grammar=grammar) for prompt in prompts]
        choices = [_choice(body, model, prompt, stop) for prompt in prompts for _ in range(n)]
        requests = [
            engine_request(prompt, sampling.with_seed(own, i), priority, body.cache_salt)
            for prompt, own in zip(prompts, params, strict=True)
            for i in range(n)
        ]
        answer = TextAnswer(choices, n, call.name, body)
        generation = Generation(model.served, answer.choices, requests, call.arrived_s)
        await self.respond(generation, answer, scope, receive, send, stream=body.stream)


def _check_supported(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", "other than 'n' it is not supported")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is for streamed answers")


def _prompts(prompt: str | list[Any]) -> list[Any]:
    """The prompts of a request, each a text or token ids if it is anything that can be used."""
    return [prompt] if isinstance(prompt, str) or not prompt or _is_ids(prompt) else prompt


async def _token_ids(prompts: list[Any], model: ReadyModel) -> list[list[int]]:
    """Token ids of each prompt. Raises APIError for what is neither text nor token ids, and for an empty prompt."""
    for prompt in prompts:
        if not prompt or not (isinstance(prompt, str) or _is_ids(prompt)):
            raise invalid("prompt", "it is a text, token ids, or a list of either, and never empty")
    encoded = iter(await model.prompts.encode([prompt for prompt in prompts if isinstance(prompt, str)]))
    found = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    size = model.info.vocab_size
    wrong = next((i for ids in found for i in ids if not 0 <= i < size), None)
    sampling.check(wrong is None, "prompt", f"made of token ids between 0 and {size - 1}", wrong)
    return found


def _is_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(i) is int for i in prompt)


def _sampling_params(body: CompletionRequest, num_prompt_tokens: int, model: ReadyModel) -> SamplingParams:
    wanted = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    max_tokens = sampling.max_new_tokens(
        num_prompt_tokens, wanted, model.info.max_model_len, prompt="prompt", minimum=0 if body.echo else 1
    )
    of_prompt = body.logprobs if body.echo else None
    return model.sampling_params(
        body,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        # Nothing to generate: the engine then needs something else to report, the prompt's own log-probabilities.
        prompt_logprobs=0 if of_prompt is None and max_tokens == 0 else of_prompt,
    )


def _choice(body: CompletionRequest, model: ReadyModel, prompt: list[int], stop: tuple[str, ...]) -> TextChoice:
    return TextChoice(
        model.tokenizer,
        prompt,
        stop=stop,
        echo=bool(body.echo),
        top_logprobs=body.logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
    )


class _Sent(SentChoice[TextChoice]):
    """A choice, and what of it is to be sent: event by event, or as a whole."""

    def __init__(
        self, answer: "TextAnswer", index: int, choice: TextChoice, *, stream: bool, prompt: list[int] | None
    ) -> None:
        """`prompt`: token ids of the prompt if the answer carries token ids, else None."""
        super().__init__(choice)
        self._answer, self._index, self._stream = answer, index, stream
        self._ids = None if prompt is None else {"prompt_token_ids": prompt, "token_ids": list[int]()}
        self.text = ""

    def feed(self, output: GenerationOutput) -> bytes:
        known = self.num_tokens
        text = self.choice.feed(output)
        if self._ids is not None:
            self._ids["token_ids"] += output.token_ids[: self.num_tokens - known]
        if not self._stream:
            self.text += text
            return b""
        if not text and self.finish_reason is None and not self._ids:
            return b""
        return self._answer.event(self.as_dict(text))

    def as_dict(self, text: str) -> dict[str, Any]:
        logprobs = self.choice.take_logprobs()
        shown = {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": self.finish_reason}
        if self._ids is None:
            return shown
        ids, self._ids = self._ids, {"token_ids": []}
        return shown | ids


class TextAnswer:
    """The answer to one request: n choices for each prompt, in the order of the prompts."""

    def __init__(self, choices: list[TextChoice], n: int, model: str, body: CompletionRequest) -> None:
        fields = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "created": int(time.time())}
        self._start = msgspec.json.encode({**fields, "model": model})[:-1]
        self._n = n
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._end = b',"usage":null}' if self._include_usage else b"}"
        stream, with_ids = bool(body.stream), bool(body.return_token_ids)
        self.choices = [
            _Sent(self, i, choice, stream=stream, prompt=choice.prompt if with_ids else None)
            for i, choice in enumerate(choices)
        ]

    def event(self, choice: dict[str, Any]) -> bytes:
        return event(self._start + b',"choices":[' + msgspec.json.encode(choice) + b"]" + self._end)

    def _usage(self) -> Usage:
        choices = [sent.choice for sent in self.choices]
        first = choices[:: self._n]  # of each prompt
        return usage(
            prompt=sum(choice.num_prompt_tokens for choice in first),
            cached=sum(choice.num_cached_tokens for choice in first),
            completion=sum(choice.num_tokens for choice in choices),
            reasoning=0,
        )

    def last_event(self) -> bytes:
        if not self._include_usage:
            return DONE
        return event(self._start + b',"choices":[],"usage":' + msgspec.json.encode(self._usage()) + b"}") + DONE

    def failure(self, error: APIError) -> bytes:
        return failure(error)

    def body(self) -> bytes:
        choices = msgspec.json.encode([sent.as_dict(sent.text) for sent in self.choices])
        return self._start + b',"choices":' + choices + b',"usage":' + msgspec.json.encode(self._usage()) + b"}"
