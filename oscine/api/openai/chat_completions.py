"""/v1/chat/completions: from the request to its sequences and their answer."""

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from oscine.api.http.errors import APIError, invalid
from oscine.api.http.record import caller
from oscine.api.http.sse import DONE, failure
from oscine.api.http.work import beside
from oscine.api.openai.chat_choice import ChatChoice
from oscine.api.openai.chat_chunks import ChatChunks, ChunkHead
from oscine.api.openai.conversation import ToolUse, conversation, tool_use
from oscine.api.openai.endpoint import Call, Endpoint
from oscine.api.openai.usage import Usage, usage
from oscine.api.serving import sampling
from oscine.api.serving.final_headroom import FinalHeadroom, usual_headroom
from oscine.api.serving.formats import constraint
from oscine.api.serving.generation import Generation, SentChoice, engine_request
from oscine.api.serving.parameters import MAX_TOP_LOGPROBS
from oscine.api.serving.schemas import ChatCompletionRequest
from oscine.api.serving.served_model import ReadyModel
from oscine.api.serving.service import Service
from oscine.api.serving.text_format import AskedFormat, asked_format, check_beside_calls, extensions
from oscine.chat.events import Event
from oscine.chat.grammar import header_grammar, text_grammar
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams

_REASONING_FIELDS = {
    "reasoning": ("reasoning",),
    "reasoning_content": ("reasoning_content",),
    "both": ("reasoning", "reasoning_content"),
}


class ChatCompletions(Endpoint[ChatCompletionRequest]):
    request_type = ChatCompletionRequest

    async def answer(self, call: Call[ChatCompletionRequest], scope: Scope, receive: Receive, send: Send) -> None:
        body = call.body
        choices, requests = await chat_sequences(self.service, body, call.model, call.size)
        prompt = requests[0].prompt_token_ids if body.return_token_ids else None
        answer = ChatAnswer(choices, call.name, self._reasoning_fields(body), body, prompt)
        generation = Generation(call.model.served, answer.choices, requests, call.arrived_s)
        await self.respond(generation, answer, scope, receive, send, stream=body.stream)

    def _reasoning_fields(self, body: ChatCompletionRequest) -> Sequence[str]:
        excluded = body.include_reasoning is False or (body.reasoning is not None and body.reasoning.exclude)
        return () if excluded else _REASONING_FIELDS[self.service.config.server.reasoning_field]


async def chat_sequences(
    service: Service,
    body: ChatCompletionRequest,
    model: ReadyModel,
    size: int,
    *,
    form: AskedFormat | None = None,
    separator: str = "\n\n",
) -> tuple[list[ChatChoice], list[GenerationRequest]]:
    """The choices of a request and what the engine is to generate for each.

    `size` is that of the body in bytes. `form` is the answer's, if the body does not say it by its own parameters.
    `separator` joins the texts of several messages of one kind.
    """
    talk = service.reasoning.restore(caller(), await beside(lambda: conversation(body, service.date), size))
    n, stop = sampling.choices(body.n), sampling.stop_strings(body.stop)
    model.served.admission.check(n)  # before the prompt is made, which costs more
    form, use = form or asked_format(body), tool_use(body, talk.tools)
    check_beside_calls(extensions(body), use.choice)
    grammar = await _grammar(form, use, size)
    prompt = await model.prompts.render(talk, size)
    headers = header_grammar(use.tools)
    params = replace(_sampling_params(body, len(prompt), model), grammar=grammar, headers=headers)
    priority = sampling.priority(body.priority)
    seeded = [sampling.with_seed(params, i) for i in range(n)]
    requests = [engine_request(prompt, own, priority, body.cache_salt) for own in seeded]
    remember = partial(service.reasoning.keep, caller()) if talk.tools else None
    functions = frozenset(tool.name for tool in use.tools)
    choices = [_choice(body, model, len(prompt), stop, functions, separator, remember) for _ in range(n)]
    headroom = _headroom(body, params.max_tokens, service.config.server.final_headroom)
    if headroom and use.choice != "required":
        within_final = None if form is None else await beside(partial(text_grammar, form.format), size)
        for choice, request in zip(choices, requests, strict=True):
            choice.headroom = FinalHeadroom(model.prompts, request, headroom, model.info.max_model_len, within_final)
    return choices, requests


def _headroom(body: ChatCompletionRequest, max_tokens: int, setting: int) -> int:
    """Tokens reserved for the answer, also by a thinking budget; `setting` is the server's --final-headroom."""
    wanted, budget = body.final_headroom, _thinking_budget(body)
    most = max_tokens - 1
    sampling.check(wanted is None or 0 <= wanted <= most, "final_headroom", f"between 0 and {most}", wanted)
    kept = usual_headroom(setting, max_tokens) if wanted is None else wanted
    return kept if budget is None else max(kept, max_tokens - budget)


def _thinking_budget(body: ChatCompletionRequest) -> int | None:
    if body.thinking_token_budget is None and body.reasoning is None and body.thinking is None:
        return None  # as usual
    budgets = {
        "thinking_token_budget": body.thinking_token_budget,
        "reasoning.max_tokens": body.reasoning.max_tokens if body.reasoning else None,
        "thinking.budget_tokens": body.thinking.budget_tokens if body.thinking else None,
    }
    for param, budget in budgets.items():
        sampling.check(budget is None or budget >= 0, param, "at least 0", budget)
    return next((budget for budget in budgets.values() if budget is not None), None)


async def _grammar(form: AskedFormat | None, use: ToolUse, size: int) -> str | None:
    text, param = (None, "response_format") if form is None else (form.format, form.param)
    return await constraint(text, use.tools, use.choice, parallel=use.parallel, text_param=param, size=size)


def _sampling_params(body: ChatCompletionRequest, num_prompt_tokens: int, model: ReadyModel) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "it is for streamed answers")
    top = body.top_logprobs
    sampling.check(
        top is None or 0 <= top <= MAX_TOP_LOGPROBS, "top_logprobs", f"between 0 and {MAX_TOP_LOGPROBS}", top
    )
    if top and not body.logprobs:
        raise invalid("top_logprobs", "it needs 'logprobs': true")
    newer = body.max_completion_tokens is not None
    max_tokens = sampling.max_new_tokens(
        num_prompt_tokens,
        body.max_completion_tokens if newer else body.max_tokens,
        model.info.max_model_len,
        prompt="messages",
        param="max_completion_tokens" if newer else "max_tokens",
    )
    return model.sampling_params(body, max_tokens=max_tokens, logprobs=(top or 0) if body.logprobs else None)


def _choice(
    body: ChatCompletionRequest,
    model: ReadyModel,
    num_prompt_tokens: int,
    stop: tuple[str, ...],
    functions: frozenset[str],
    separator: str,
    remember: Callable[[Sequence[str], str], None] | None,
) -> ChatChoice:
    return ChatChoice(
        model.tokenizer,
        num_prompt_tokens=num_prompt_tokens,
        stop=stop,
        functions=functions,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        ignore_eos=bool(body.ignore_eos),
        separator=separator,
        remember=remember,
    )


class StreamedChoice(SentChoice[ChatChoice]):
    """A choice whose news become events."""

    def __init__(self, choice: ChatChoice, chunks: ChatChunks, *, with_token_ids: bool) -> None:
        super().__init__(choice)
        self._chunks, self._with_token_ids = chunks, with_token_ids
        self.token_ids: list[int] = []  # not sent yet, where they are asked for

    def feed(self, output: GenerationOutput) -> bytes:
        events = self._fed(output)
        token_ids, self.token_ids = self.token_ids, []
        return self._chunks.encode(events, self.choice.finish_reason, token_ids)

    def _fed(self, output: GenerationOutput) -> list[Event]:
        known = self.choice.num_tokens
        events = self.choice.feed(output)
        if self._with_token_ids:
            self.token_ids += output.token_ids[: self.choice.num_tokens - known]
        return events


class WholeChoice(StreamedChoice):
    """A choice that is sent when it is complete."""

    def feed(self, output: GenerationOutput) -> bytes:
        self.choice.keep(self._fed(output))
        return b""


class ChatAnswer:
    """The answer to one request, as a stream of chunks or as one object."""

    def __init__(
        self,
        choices: list[ChatChoice],
        model: str,
        reasoning_fields: Sequence[str],
        body: ChatCompletionRequest,
        prompt: list[int] | None,
    ) -> None:
        """`prompt`: token ids of the prompt if the answer carries token ids, else None."""
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._model = model
        self._choices = choices
        self._reasoning_fields = reasoning_fields
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._prompt = prompt
        self._head = ChunkHead(self._id, self._created, model, include_usage=self._include_usage)
        kind, with_ids = StreamedChoice if body.stream else WholeChoice, prompt is not None
        self.choices = [
            kind(choice, ChatChunks(self._head, i, choice, reasoning_fields, prompt), with_token_ids=with_ids)
            for i, choice in enumerate(choices)
        ]

    def _usage(self) -> Usage:
        choices = self._choices
        return usage(
            prompt=choices[0].num_prompt_tokens,
            cached=choices[0].num_cached_tokens,
            completion=sum(choice.num_tokens for choice in choices),
            reasoning=sum(choice.num_reasoning_tokens for choice in choices),
        )

    def last_event(self) -> bytes:
        return (self._head.usage(self._usage()) if self._include_usage else b"") + DONE

    def failure(self, error: APIError) -> bytes:
        return failure(error)

    def body(self) -> bytes:
        choices: list[dict[str, Any]] = [
            {
                "index": i,
                "message": choice.message(self._reasoning_fields),
                "logprobs": choice.message_logprobs(),
                "finish_reason": choice.finish_reason,
            }
            for i, choice in enumerate(self._choices)
        ]
        body = {"id": self._id, "object": "chat.completion", "created": self._created, "model": self._model}
        return msgspec.json.encode({**body, "choices": choices, "usage": self._usage()} | self._with_token_ids(choices))

    def _with_token_ids(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Adds `token_ids` to the choices. Returns the field with those of the prompt."""
        if self._prompt is None:
            return {}
        for choice, sent in zip(choices, self.choices, strict=True):
            choice["token_ids"] = sent.token_ids
        return {"prompt_token_ids": self._prompt}
