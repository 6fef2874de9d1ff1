"""Converts requests of Ollama's API to chat completions and completions, which check the common values."""

import re
from collections.abc import Iterator, Sequence

import msgspec

from oscine.api.http.errors import invalid
from oscine.api.ollama.schemas import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from oscine.api.serving.formats import Form
from oscine.api.serving.parameters import SamplingFields, refuse
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
from oscine.chat.grammar import JsonFormat

_SAME = ["temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "stop"]
_NO_TIME = re.compile(r"[+-]?0+(\.0*)?[a-zµ]*")  # 0, 0s, 0.0m


def unloads(body: OllamaRequest) -> bool:
    """Whether a request without an input asks to unload the model."""
    return body.keep_alive is not None and bool(_NO_TIME.fullmatch(str(body.keep_alive)))


def chat_request(body: OllamaChatRequest) -> ChatCompletionRequest:
    """The chat completion for a conversation. Raises APIError naming a parameter that is not supported."""
    tools = [Tool("function", tool.function) for tool in body.tools or ()]
    return _conversation(body, [*_messages(body.messages or ())], tools)


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
    refuse(options)
    for name in _SAME:
        setattr(request, name, getattr(options, name))
    request.repetition_penalty = options.repeat_penalty
    request.seed = None if options.seed is None or options.seed < 0 else options.seed
    request.max_tokens = None if options.num_predict is None or options.num_predict < 1 else options.num_predict


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


def _messages(messages: Sequence[OllamaMessage]) -> Iterator[Message]:
    waiting: dict[str, str] = {}  # calls without a result: id -> function
    for i, message in enumerate(messages):
        if message.images:
            raise invalid(f"messages[{i}].images", "the model reads text only")
        content = message.content or ""
        if message.role == "tool":
            name = message.tool_name or message.name
            yield Message("tool", content, name=name, tool_call_id=_answered(message.tool_call_id, name, waiting))
            continue
        calls = [
            ToolCall(call.id or f"{i}.{j}", FunctionCall(call.function.name, _json(call.function.arguments)))
            for j, call in enumerate(message.tool_calls or ())
        ]
        waiting |= {call.id: call.function.name for call in calls}
        yield Message(message.role, content, reasoning=message.thinking, tool_calls=calls or None)


def _answered(call_id: str | None, name: str | None, waiting: dict[str, str]) -> str | None:
    """The id of the call that a result belongs to: by its id, else the first call of its function, else the first."""
    found = next((i for i, called in waiting.items() if name in (None, called)), None)
    found = call_id if call_id in waiting else found
    waiting.pop(found or "", None)
    return found


def _json(arguments: object) -> str:
    return msgspec.json.encode(arguments).decode()
