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

    async def answer(self, call: Call[R], scope: Scope, receive: Receive, send: Send) -> None:
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

    async def begin(self, call: Call[OllamaChatRequest]) -> Begun | None:
        body = call.body
        if not body.messages:
            return None
        names = model_names(body)
        made = await run_in_thread(lambda: chat_request(body, names), call.size, call.caller.threads)
        chat = call.with_body(made)
        (turn,) = await chat_turns(self.service, chat, form=answer_form(body), dialect=_CHAT)
        return Begun(chat, turn, {names.seen(tool.function.name): tool.function.name for tool in body.tools or ()})


class OllamaGenerate(_Answers[OllamaGenerateRequest]):
    kind = "generate"

    async def begin(self, call: Call[OllamaGenerateRequest]) -> Begun | None:
        body, form = call.body, answer_form(call.body)
        if not body.prompt:
            return None
        if body.raw:
            text = call.with_body(raw_request(body))
            (turn,) = await text_turns(text, None, form=form, dialect=_GENERATE)
            return Begun(text, turn)
        chat = call.with_body(prompt_request(body))
        (turn,) = await chat_turns(self.service, chat, form=form, dialect=_GENERATE)
        return Begun(chat, turn)
