"""Converts requests of Ollama's API to chat completions and completions, which check the common values."""

import re
from collections.abc import Iterator, Sequence
from math import inf

import msgspec
from msgspec.structs import replace

from oscine.api.common.errors import APIError, invalid
from oscine.api.serving.formats import Form
from oscine.api.serving.parameters import LEAST_REPETITION, SamplingFields, refuse
from oscine.api.serving.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    FunctionCall,
    JsonSchema,
    Message,
    ResponseFormat,
    Tool,
    ToolCall,
)
from oscine.api.turns.attachments import described
from oscine.chat.grammar import JsonFormat
from oscine.chat.tools import ModelNames
from oscine.extensions.apis.ollama.schemas import (
    OllamaChatRequest,
    OllamaFunctionCall,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from oscine.settings.models import FOREVER, seconds_of

_SAME = ["presence_penalty", "frequency_penalty", "stop"]
_TIME = r"(\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|μs|ms|s|m|h)"
_LONGEST = 200  # characters of a client's value that an error repeats
_DURATION = re.compile(rf"[+-]?(?:0|(?:{_TIME})+)", re.ASCII)


def unloads(body: OllamaRequest) -> bool:
    """Whether a request without an input asks to unload the model: its `keep_alive` is zero.

    Raises APIError for what is no duration, in the words of Ollama.
    """
    given = body.keep_alive
    if not isinstance(given, str):
        return given is not None and 0 <= given < 1  # whole seconds count
    if not _DURATION.fullmatch(given):
        quoted = msgspec.json.encode(given[:_LONGEST]).decode()
        raise APIError(f"time: invalid duration {quoted}", param="keep_alive")
    return not any(map(float, re.findall(_TIME, given)))


def kept_s(body: OllamaRequest) -> float | None:
    """The seconds for which a request wants its model kept; FOREVER for a negative time, None if it does not say.

    Raises APIError as `unloads` does.
    """
    unloads(body)
    given = body.keep_alive
    if given is None or isinstance(given, str):
        return None if given is None else seconds_of(given)
    return FOREVER if given < 0 else float(int(given))


def model_names(body: OllamaChatRequest) -> ModelNames:
    """The names of functions as the model sees them. Ollama's clients may use any name."""
    return ModelNames((tool.function.name,) for tool in body.tools or ())


def chat_request(body: OllamaChatRequest, names: ModelNames) -> ChatCompletionRequest:
    """The chat completion for a conversation. Raises APIError naming a parameter that is not supported."""
    functions = (replace(tool.function, name=names.seen(tool.function.name)) for tool in body.tools or ())
    tools = [Tool("function", function) for function in functions]
    return _conversation(body, [*_messages(body.messages or (), names)], tools)


def prompt_request(body: OllamaGenerateRequest) -> ChatCompletionRequest:
    """The chat completion for a prompt, which is the user's message."""
    system = [Message("system", body.system)] if body.system else []
    return _conversation(body, [*system, Message("user", body.prompt)])


def raw_request(body: OllamaGenerateRequest) -> CompletionRequest:
    """The completion for a raw prompt, which the model continues."""
    if body.system:
        raise invalid("system", "a raw prompt takes no system message")
    request = CompletionRequest(prompt=body.prompt or "")
    _sample(request, body)
    request.logprobs = _top_logprobs(body) if body.logprobs else None
    return request


def _conversation(body: OllamaRequest, messages: list[Message], tools: Sequence[Tool] = ()) -> ChatCompletionRequest:
    request = ChatCompletionRequest(messages=messages, tools=[*tools], think=body.think)
    _sample(request, body)
    request.logprobs = body.logprobs
    request.top_logprobs = _top_logprobs(body) if body.logprobs else None
    if isinstance(body.format, dict):
        request.response_format = ResponseFormat("json_schema", JsonSchema("answer", body.format, strict=True))
    elif body.format:
        request.response_format = ResponseFormat("json_object")
    return request


def _sample(request: SamplingFields, body: OllamaRequest) -> None:
    options = body.options or OllamaOptions()
    refuse(options, "options.")
    for name in _SAME:
        setattr(request, name, getattr(options, name))
    request.temperature = _clamped(options.temperature, inf)
    request.top_p, request.min_p = _clamped(options.top_p, 1.0), _clamped(options.min_p, 1.0)
    if options.repeat_penalty is not None and options.repeat_penalty >= LEAST_REPETITION:
        request.repetition_penalty = options.repeat_penalty
    request.top_k, seed, most = _whole(options.top_k), _whole(options.seed), _whole(options.num_predict)
    request.seed = None if seed is None or seed < 0 else seed
    request.max_tokens = None if most is None or most < 1 else most


def _whole(given: float | None) -> int | None:
    return None if given is None else int(given)


def _clamped(given: float | None, most: float) -> float | None:
    return None if given is None else min(max(given, 0.0), most)


def _top_logprobs(body: OllamaRequest) -> int:
    return body.top_logprobs or 0


def answer_form(body: OllamaRequest) -> Form | None:
    """The grammar that the answer must follow. Raises APIError for a format that is neither `json` nor a schema."""
    if not body.format and not isinstance(body.format, dict):
        return None
    if isinstance(body.format, str) and body.format != "json":
        raise invalid("format", f"it must be 'json' or a JSON schema, not {body.format[:80]!r}")
    schema = body.format if isinstance(body.format, dict) else {"type": "object"}
    return Form(JsonFormat(schema, any_format=True), "format")


def _messages(messages: Sequence[OllamaMessage], names: ModelNames) -> Iterator[Message]:
    """`names`: of functions, also of those that are no longer among the tools."""
    waiting: dict[str, str] = {}  # calls without a result: id -> function, as the client names it
    for i, message in enumerate(messages):
        content, images = message.content or "", message.images or ()
        if images and message.role != "tool":
            raise invalid(f"messages[{i}].images", "the model reads text only")
        content += "".join(described({"type": "image", "data": image}) for image in images)
        if message.role == "tool":
            name = message.tool_name or message.name
            call_id = _answered(message.tool_call_id, name, waiting)
            yield Message("tool", content, name=name and names.seen(name), tool_call_id=call_id)
            continue
        calls = [
            ToolCall(call.id or f"{i}.{j}", _function_call(call.function, names))
            for j, call in enumerate(message.tool_calls or ())
        ]
        waiting |= {made.id: call.function.name for made, call in zip(calls, message.tool_calls or (), strict=True)}
        yield Message(message.role, content, reasoning=message.thinking, tool_calls=calls or None)


def _answered(call_id: str | None, name: str | None, waiting: dict[str, str]) -> str | None:
    """The id of the call that a result belongs to: by its id, else the first call of its function, else the first."""
    found = next((i for i, called in waiting.items() if name in (None, called)), None)
    found = call_id if call_id in waiting else found
    waiting.pop(found or "", None)
    return found


def _function_call(called: OllamaFunctionCall, names: ModelNames) -> FunctionCall:
    return FunctionCall(names.seen(called.name), msgspec.json.encode(called.arguments).decode())
