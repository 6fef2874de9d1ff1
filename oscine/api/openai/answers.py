"""The JSON of answers as msgspec structs: answers are made of them, and /openapi.json describes them."""

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from oscine.api.serving.logprobs import CompletionLogprobs, TokenLogprob
from oscine.api.serving.served_model import ModelState


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class CalledFunction(Struct):
    name: str
    arguments: str  # JSON text


class CustomInput(Struct):
    name: str
    input: str


class AnswerToolCall(Struct, tag_field="type", tag="function"):
    id: str
    function: CalledFunction


class AnswerCustomCall(Struct, tag_field="type", tag="custom"):
    id: str
    custom: CustomInput


class AnswerMessage(Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    tool_calls: list[AnswerToolCall | AnswerCustomCall] | UnsetType = UNSET


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None


class ChatCompletionChoice(Struct):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatCompletionChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None
    state: ModelState = "ready"


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct):
    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class Text(Struct):
    prompt: str


class ModelReport(Struct):
    names: list[str]
    status: ModelState
    error: str | None
    model: str
    running: int
    waiting: int


class HealthReport(Struct):
    status: ModelState  # of the worst model
    error: str | None
    model: str | None  # where there is one alone
    uptime_s: float
    running: int
    waiting: int
    models: list[ModelReport]


class Status(Struct):
    status: str


class Readiness(Struct):
    status: ModelState  # ready: all models are
    models: dict[str, ModelState]


class Version(Struct):
    version: str


class InputTokens(Struct):
    input_tokens: int
