"""/api/chat and /api/generate: Ollama's API, over the same sequences as chat completions and completions."""

from abc import abstractmethod
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from oscine.api.http.body import json_response
from oscine.api.http.errors import APIError, not_found
from oscine.api.http.sse import NDJSON, EventStream
from oscine.api.http.work import beside
from oscine.api.ollama.answer import Kind, OllamaAnswer, Piece, record
from oscine.api.ollama.request import answer_form, chat_request, prompt_request, raw_request, unloads
from oscine.api.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call
from oscine.api.serving.generation import Generation
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service
from oscine.api.serving.turn import Turn
from oscine.api.turns.chat import chat_turns
from oscine.api.turns.text import text_turns

R = TypeVar("R", bound=OllamaRequest)


def find(service: Service, name: str | None) -> tuple[str, ServedModel]:
    """Service.find with Ollama's error for an unknown name, which its clients look for."""
    try:
        return service.find(name)
    except APIError as error:
        if error.status != 404:
            raise
        raise not_found(f"model '{name}' not found", "model_not_found", "model") from None


class _Answers(Endpoint[R]):
    kind: Kind

    def find(self, name: str | None) -> tuple[str, ServedModel]:
        return find(self.service, name)

    def stream(self, send: Send) -> EventStream:
        """A stream without keep-alive comments, since each line is a record."""
        return EventStream(send, comments=False, media_type=NDJSON)

    @abstractmethod
    async def begin(self, call: Call[R]) -> tuple[Call[Any], Turn] | None:
        """The completion that the request asks for, and its turn; None for a request without input. Raises APIError."""

    async def answer(self, call: Call[R], scope: Scope, receive: Receive, send: Send) -> None:
        body, begun = call.body, await self.begin(call)
        if begun is None:
            reason = "unload" if unloads(body) else "load"
            nothing = record(self.kind, call.name, Piece(), done=True, done_reason=reason)
            await json_response(nothing)(scope, receive, send)
            return
        completion, turn = begun
        logprobs, stream = (body.top_logprobs or 0) if body.logprobs else None, body.stream is not False
        answer = OllamaAnswer(self.kind, completion, turn, logprobs, thinking=body.think is not False, stream=stream)
        await self.generate(Generation(completion, [answer]), answer, scope, receive, send, stream=stream)


class OllamaChat(_Answers[OllamaChatRequest]):
    kind = "chat"

    async def begin(self, call: Call[OllamaChatRequest]) -> tuple[Call[Any], Turn] | None:
        body = call.body
        if not body.messages:
            return None
        chat = call.with_body(await beside(lambda: chat_request(body), call.size, call.caller.threads))
        (turn,) = await chat_turns(self.service, chat, form=answer_form(body), clipped=True)
        return chat, turn


class OllamaGenerate(_Answers[OllamaGenerateRequest]):
    kind = "generate"

    async def begin(self, call: Call[OllamaGenerateRequest]) -> tuple[Call[Any], Turn] | None:
        body, form = call.body, answer_form(call.body)
        if not body.prompt:
            return None
        if body.raw:
            text = call.with_body(raw_request(body))
            (turn,) = await text_turns(text, None, form=form, clipped=True)
            return text, turn
        chat = call.with_body(prompt_request(body))
        (turn,) = await chat_turns(self.service, chat, form=form, clipped=True)
        return chat, turn
