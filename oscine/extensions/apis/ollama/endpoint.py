"""/api/chat and /api/generate: Ollama's API, over the same sequences as chat completions and completions."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from oscine.api.common.errors import APIError, not_found
from oscine.api.common.work import run_in_thread
from oscine.api.http.body import json_response
from oscine.api.http.sse import NDJSON, EventStream
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service
from oscine.api.turns.chat import chat_turns
from oscine.api.turns.dialect import Dialect
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn
from oscine.api.turns.text import text_turns
from oscine.extensions.apis.ollama.answer import Kind, OllamaAnswer, Piece, record
from oscine.extensions.apis.ollama.request import (
    answer_form,
    chat_request,
    kept_s,
    model_names,
    prompt_request,
    raw_request,
    unloads,
)
from oscine.extensions.apis.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest

_CHAT = Dialect(limit="options.num_predict", clipped=True)
_GENERATE = replace(_CHAT, prompt="prompt")
R = TypeVar("R", bound=OllamaRequest)


def find(service: Service, name: str | None) -> tuple[str, ServedModel]:
    """Service.find with Ollama's error for an unknown name, which its clients look for."""
    try:
        return service.find(name)
    except APIError as error:
        if error.status != 404:
            raise
        raise not_found(f"model '{name}' not found", "model_not_found", "model") from None


@dataclass(frozen=True, slots=True)
class Begun:
    """A turn, and the completion that it is for."""

    completion: Call[Any]
    turn: Turn
    names: Mapping[str, str] = field(default_factory=dict)  # of functions: the client's, by the model's


class _Answers(Endpoint[R]):
    kind: Kind

    def find(self, name: str | None) -> tuple[str, ServedModel]:
        return find(self.service, name)

    def stream(self, send: Send) -> EventStream:
        """A stream without keep-alive comments, since each line is a record."""
        return EventStream(send, comments=False, media_type=NDJSON)

    @abstractmethod
    async def begin(self, call: Call[R]) -> Begun | None:
        """The turn that the request asks for; None for a request without input. Raises APIError."""

    @abstractmethod
    def is_empty(self, body: R) -> bool:
        """Whether the request has no input, and only loads or unloads its model."""

    async def answered(
        self, body: R, name: str, model: ServedModel, scope: Scope, receive: Receive, send: Send
    ) -> bool:
        """Unloads the model of an empty request with `keep_alive: 0`, where models are on demand."""
        demand = self.service.demand
        if demand is None or not (self.is_empty(body) and unloads(body)):
            return False
        self.service.keys.check_admin(scope)
        await demand.unload(model)
        await json_response(record(self.kind, name, Piece(), done=True, done_reason="unload"))(scope, receive, send)
        return True

    def _keep(self, call: Call[R], scope: Scope) -> None:
        """Of a client without the right `admin`, `keep_alive` has no effect."""
        seconds = kept_s(call.body)
        if self.service.demand is not None and seconds is not None and self.service.keys.is_admin(scope):
            self.service.demand.keep(call.model.served, seconds)

    async def answer(self, call: Call[R], scope: Scope, receive: Receive, send: Send) -> None:
        self._keep(call, scope)
        body = call.body
        reason = "unload" if unloads(body) else "load"
        begun = await self.begin(call)
        if begun is None:
            nothing = record(self.kind, call.name, Piece(), done=True, done_reason=reason)
            await json_response(nothing)(scope, receive, send)
            return
        logprobs, stream = (body.top_logprobs or 0) if body.logprobs else None, body.stream is not False
        answer = OllamaAnswer(
            self.kind,
            begun.completion,
            begun.turn,
            logprobs,
            thinking=body.think is not False,
            stream=stream,
            names=begun.names,
        )
        await self.generate(Generation(begun.completion, [answer]), answer, scope, receive, send, stream=stream)


class OllamaChat(_Answers[OllamaChatRequest]):
    kind = "chat"

    def is_empty(self, body: OllamaChatRequest) -> bool:
        return not body.messages

    async def begin(self, call: Call[OllamaChatRequest]) -> Begun | None:
        body = call.body
        if self.is_empty(body):
            return None
        names = model_names(body)
        made = await run_in_thread(lambda: chat_request(body, names), call.size, call.caller.threads)
        chat = call.with_body(made)
        (turn,) = await chat_turns(self.service, chat, form=answer_form(body), dialect=_CHAT)
        return Begun(chat, turn, {names.seen(tool.function.name): tool.function.name for tool in body.tools or ()})


class OllamaGenerate(_Answers[OllamaGenerateRequest]):
    kind = "generate"

    def is_empty(self, body: OllamaGenerateRequest) -> bool:
        return not body.prompt

    async def begin(self, call: Call[OllamaGenerateRequest]) -> Begun | None:
        body, form = call.body, answer_form(call.body)
        if self.is_empty(body):
            return None
        if body.raw:
            text = call.with_body(raw_request(body))
            (turn,) = await text_turns(text, None, form=form, dialect=_GENERATE)
            return Begun(text, turn)
        chat = call.with_body(prompt_request(body))
        (turn,) = await chat_turns(self.service, chat, form=form, dialect=_GENERATE)
        return Begun(chat, turn)
