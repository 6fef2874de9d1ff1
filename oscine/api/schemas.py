"""The JSON of requests, as msgspec structs with strict types. Values are judged in sampling and conversation.

A parameter that OpenAI's clients send and that changes nothing here (`user`, `store`, `metadata`...) has no field:
unknown parameters are ignored. One that would change the answer has a field, so that it can be honoured or refused.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar, get_args

import msgspec
from msgspec import Struct

from oscine.api.errors import APIError, from_validation, invalid
from oscine.api.limits import check_values
from oscine.chat.effort import EFFORTS, Effort

Role = Literal["system", "developer", "user", "assistant", "tool"]
Verbosity = Literal["low", "medium", "high"]  # the model knows none: taken, and without effect


class ContentPart(Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(Struct):
    name: str
    arguments: str  # JSON text


class ToolCall(Struct):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class Message(Struct):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # what other servers call it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    type: str
    function: Function | None = None


class NamedFunction(Struct):
    name: str


class NamedToolChoice(Struct, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTool(Struct):
    function: NamedFunction
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    allowed_tools: AllowedTools


ToolChoiceField = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None


class JsonSchema(Struct):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Struct):
    """`enforce: false` is Oscine's own: it asks for a schema to be shown to the model, without a promise to keep it."""

    type: str
    json_schema: JsonSchema | None = None
    enforce: bool | None = None


class StructuredOutputs(Struct):
    """As vLLM has it: one of these is given."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class StreamOptions(Struct):
    include_usage: bool | None = None


class ReasoningOptions(Struct):
    effort: Effort | None = None
    exclude: bool | None = None


class TemplateOptions(Struct, forbid_unknown_fields=True):
    """What clients of servers with chat templates say there. `enable_thinking` and `thinking` are other models'."""

    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    thinking: bool | None = None


class SamplingFields(Struct, kw_only=True):
    """What chat and text completions share. None is "not given" throughout, as clients send null for it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # As vLLM extends the API:
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    # Refused: they would change the answer.
    bad_words: Any = None
    allowed_token_ids: Any = None
    logits_processors: Any = None
    prompt_logprobs: Any = None
    truncate_prompt_tokens: Any = None
    include_stop_str_in_output: Any = None
    use_beam_search: Any = None


class ChatCompletionRequest(SamplingFields, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoiceField = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: TemplateOptions | None = None
    verbosity: Verbosity | None = None
    include_reasoning: bool | None = None
    final_headroom: int | None = None  # tokens of the budget kept for the answer, Oscine's own
    # Refused: they would change the answer.
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    continue_final_message: Any = None


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: str | list[Any]  # a text, texts, token ids, or lists of token ids
    echo: bool | None = None
    logprobs: int | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    # Refused: they would change the answer.
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(Struct):
    """Either a text, or messages and whatever else of a chat completion its prompt depends on."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateOptions | None = None
    tool_choice: ToolChoiceField = None
    response_format: ResponseFormat | None = None
    add_generation_prompt: bool | None = None  # false: without the header of the answer to come
    return_token_strs: bool | None = None


class DetokenizeRequest(Struct):
    tokens: list[int]
    model: str | None = None


T = TypeVar("T")

_CHOICES = {
    "role": get_args(Role),
    "reasoning_effort": EFFORTS,
    "effort": EFFORTS,
    "verbosity": get_args(Verbosity),
}


def decode(body: bytes, type: type[T]) -> T:
    """Raises APIError that names the parameter, or says that the body is no JSON."""
    try:
        check_values(body)
    except ValueError as error:
        raise _too_many_values(body, str(error)) from None
    try:
        with _no_collection():
            return msgspec.json.decode(body, type=type)
    except msgspec.ValidationError as error:
        raise _with_choices(from_validation(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise APIError(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise APIError("The JSON of the body is nested too deeply.", code="invalid_json") from None


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without the garbage collector, which would walk through a large request again and again while it is decoded."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _with_choices(error: APIError) -> APIError:
    choices = _CHOICES.get((error.param or "").rpartition(".")[2])
    if choices:
        error.message += f" Choose one of {', '.join(choices)}."
    return error


def _too_many_values(body: bytes, why: str) -> APIError:
    """Names the parameter that is the longest."""
    try:
        params = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        params = {}
    largest = max(params, key=lambda param: len(bytes(params[param])), default=None)
    return APIError(f"Invalid request: {why}.") if largest is None else invalid(largest, why)


def convert(value: Any, type: type[T], where: str) -> T:
    """The same of a part of the body that was decoded as plain objects; `where` is its path."""
    try:
        return msgspec.convert(value, type)
    except msgspec.ValidationError as error:
        raise from_validation(error, where) from None
