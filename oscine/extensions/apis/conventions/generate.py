"""Triton Inference Server's generate extension: a text completion, whole or as events."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from oscine.api.common.errors import APIError, ErrorText, unsupported
from oscine.api.http.sse import EventStream, event
from oscine.api.openai.endpoint import Endpoint
from oscine.api.serving.call import Call
from oscine.api.serving.parameters import refuse
from oscine.api.serving.schemas import CompletionRequest
from oscine.api.serving.service import Service
from oscine.api.turns.dialect import TEXT
from oscine.api.turns.generation import Generation
from oscine.api.turns.progress import Turn, TurnEvent
from oscine.api.turns.text import DEFAULT_MAX_TOKENS, text_turns
from oscine.chat.events import ContentDelta
from oscine.extensions.apis.conventions.kserve import VERSION, model_name
from oscine.extensions.apis.conventions.schemas import GenerateAnswer, GenerateParameters, GenerateRequest

_GENERATE = replace(TEXT, prompt="text_input")
_SAME = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)


class Generate(Endpoint[GenerateRequest]):
    def __init__(self, service: Service, *, stream: bool) -> None:
        super().__init__(service)
        self._stream = stream

    def wanted(self, body: GenerateRequest, scope: Scope) -> str | None:
        return model_name(scope["path_params"]["name"])

    def stream(self, send: Send) -> EventStream:
        """A stream without keep-alive comments: Triton sends events only."""
        return EventStream(send, comments=False)

    async def answer(self, call: Call[GenerateRequest], scope: Scope, receive: Receive, send: Send) -> None:
        parameters, stream = _merged(call.body), self._stream
        completion = call.with_body(_completion(call.body.text_input, parameters))
        (turn,) = await text_turns(completion, DEFAULT_MAX_TOKENS, dialect=_GENERATE)
        prefix = call.body.text_input if parameters.exclude_input_in_output is False else ""
        answer = _Answer(call, turn, prefix, stream=stream)
        await self.generate(Generation(completion, [answer]), answer, scope, receive, send, stream=stream)


def _merged(body: GenerateRequest) -> GenerateParameters:
    """The parameters, wherever they stand; those in `parameters` win. Raises APIError for a refused one."""
    inner = body.parameters or GenerateParameters()
    refuse(inner, "parameters.")
    for where, given in (("", body), ("parameters.", inner)):
        if _words(given.bad_words):
            raise unsupported(f"{where}bad_words")
    for name in GenerateParameters.__struct_fields__:
        if getattr(inner, name) is None:
            setattr(inner, name, getattr(body, name))
    return inner


def _completion(text: str, parameters: GenerateParameters) -> CompletionRequest:
    request = CompletionRequest(prompt=text)
    for name in _SAME:
        setattr(request, name, getattr(parameters, name))
    request.seed = parameters.random_seed if parameters.seed is None else parameters.seed
    request.min_tokens = parameters.min_length if parameters.min_tokens is None else parameters.min_tokens
    request.stop = parameters.stop if parameters.stop_words is None else _words(parameters.stop_words)
    return request


def _words(given: str | list[str] | None) -> list[str]:
    """Without the empty texts that some clients send for none."""
    return [word for word in ([given] if isinstance(given, str) else given or ()) if word]


class _Answer:
    """One answer: the encoder of the answer and of its only choice."""

    def __init__(self, call: Call[Any], turn: Turn, prefix: str, *, stream: bool) -> None:
        """`prefix`: text before what is generated."""
        self.turn = turn
        self._name, self._id, self._stream = call.name, call.body.id, stream
        self._texts = [prefix]  # not sent yet

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        self._texts += [event.text for event in events if type(event) is ContentDelta]
        return event(self.body()) if self._stream and any(self._texts) else b""

    def body(self) -> bytes:
        """The text that was not sent yet."""
        text, self._texts = "".join(self._texts), []
        return msgspec.json.encode(GenerateAnswer(self._name, VERSION, text, self._id))

    def last_event(self) -> bytes:
        return b""

    def failure(self, error: APIError) -> bytes:
        return event(msgspec.json.encode(ErrorText(error.message)))
