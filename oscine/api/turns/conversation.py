"""From the messages and tools of a request to a Conversation."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from msgspec.structs import asdict

from oscine.api.common.errors import invalid, unsupported
from oscine.api.common.record import current, plain_word
from oscine.api.serving.formats import Calls, response_schema
from oscine.api.serving.schemas import (
    AllowedToolsChoice,
    ChatCompletionRequest,
    Message,
    NamedToolChoice,
    ReasoningOptions,
    TemplateOptions,
    Tool,
    content_text,
)
from oscine.api.turns.attachments import result_text, said_text
from oscine.api.turns.dialect import CHAT, Dialect
from oscine.chat import messages as chat
from oscine.chat.effort import Effort, model_effort
from oscine.chat.tools import validate_tools

_TEXT_PARTS = ("text", "refusal")
_FINDERS = ("tool", "system", "developer")  # roles of messages that may refer to deferred functions
_MAX_NOTED = 16  # types of tools that are left out


def conversation(request: ChatCompletionRequest, date: str, dialect: Dialect = CHAT) -> chat.Conversation:
    """Raises APIError that names the parameter, for all that cannot be honoured."""
    tools = function_tools(request.tools, dialect.longest_name)
    hidden = request.tool_choice == "none"
    waiting = {} if hidden else _deferred(request.tools or (), tools)
    messages = chat_messages(request.messages)
    return chat.Conversation(
        messages=tuple(_with_found(request.messages, messages, dict(waiting))) if waiting else messages,
        tools=() if hidden else tuple(tool for tool in tools if tool.name not in waiting),
        response_schema=response_schema(request.response_format),
        reasoning_effort=model_effort(_effort(request)),
        current_date=date,
    )


def _deferred(given: Sequence[Tool], tools: Sequence[chat.FunctionTool]) -> dict[str, chat.FunctionTool]:
    """The functions that are declared where they are found; none if no other function could find them."""
    names = {tool.function.name for tool in given if tool.function is not None and tool.defer_loading}
    return {tool.name: tool for tool in tools if tool.name in names} if len(names) < len(tools) else {}


def _with_found(
    given: Sequence[Message], said: Sequence[chat.Message], waiting: dict[str, chat.FunctionTool]
) -> Iterator[chat.Message]:
    """The messages `said` for those that were `given`, each with the functions that are first found in it."""
    for message, made in zip(given, said, strict=True):
        parts = message.content if made.role in _FINDERS and isinstance(message.content, list) else ()
        names = dict.fromkeys(part.tool_name for part in parts if part.type == "tool_reference")
        found = tuple(waiting.pop(name) for name in names if name in waiting)
        yield replace(made, tools=found) if found else made


def _effort(request: ChatCompletionRequest) -> Effort | None:
    """The effort asked for. A named effort wins over switches; a switch that is off means `none`."""
    options, template = request.reasoning or ReasoningOptions(), request.chat_template_kwargs or TemplateOptions()
    think = request.think if isinstance(request.think, str) else None
    efforts = (request.reasoning_effort, options.effort, template.reasoning_effort, think)
    switches = (request.think, request.enable_thinking, options.enabled, template.enable_thinking, template.thinking)
    off = any(switch is False for switch in switches) or (request.thinking and request.thinking.type == "disabled")
    return next(filter(None, efforts), "none" if off else None)


def allowed_calls(request: ChatCompletionRequest, tools: Sequence[chat.FunctionTool]) -> Calls:
    """`tools`: in the prompt. Raises APIError for a choice of none of them."""
    choice, parallel = request.tool_choice or "auto", request.parallel_tool_calls is not False
    if isinstance(choice, NamedToolChoice):
        return Calls(_named([choice.function.name], tools), "required", parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        return Calls(_named([tool.function.name for tool in allowed.tools], tools), allowed.mode, parallel)
    return Calls(tuple(tools), choice, parallel)


def _named(names: Sequence[str], tools: Sequence[chat.FunctionTool]) -> tuple[chat.FunctionTool, ...]:
    """The `tools` that a choice names. Raises APIError for a name that no tool has."""
    named = set(names)
    unknown = named - {tool.name for tool in tools}
    if unknown:
        raise invalid("tool_choice", f"there is no function {min(unknown)!r} among the tools")
    return tuple(tool for tool in tools if tool.name in named)


def function_tools(tools: list[Tool] | None, longest_name: int) -> tuple[chat.FunctionTool, ...]:
    """The functions among the tools; tools of other types are left out, as clients send types that no server knows."""
    functions = []
    for i, tool in enumerate(tools or ()):
        if tool.type != "function":
            continue
        if tool.function is None:
            raise invalid(f"tools[{i}].function", "a tool of type 'function' needs it")
        f = tool.function
        functions.append(chat.FunctionTool(f.name, f.description or "", f.parameters, f.strict is True))
    try:
        validate_tools(functions, longest_name)
    except chat.ConversationError as error:
        raise invalid(error.param, str(error)) from None
    return tuple(functions)


def leave_out(lacking: Sequence[str], num_others: int, choice: object) -> None:
    """Notes the types of tools that this server lacks, for a header of the response and for the log.

    Clients name tools of their vendor without knowing whether a server has them, so these are left out beside others.
    Raises APIError where there are no others, unless the `choice` is "none": the model would make up what they find.
    """
    if lacking and not num_others and choice != "none":
        param = "tools[0].type" if choice in (None, "auto") else "tool_choice"
        raise unsupported(param, f"this server has no tool of type {lacking[0]!r}, and there is no other")
    record = current.get()
    if record is not None and lacking:
        record.tools_left_out = tuple(dict.fromkeys(map(plain_word, lacking)))[:_MAX_NOTED]


def chat_messages(messages: list[Message]) -> tuple[chat.Message, ...]:
    if not messages:
        raise invalid("messages", "there must be one at least")
    before = (None, *(message.role for message in messages))
    pairs = enumerate(zip(messages, before, strict=False))
    return tuple(_message(message, f"messages[{i}]", after_result=role == "tool") for i, (message, role) in pairs)


def _content(message: Message, where: str, *, after_result: bool) -> str:
    if message.role == "user" and isinstance(message.content, list):
        return said_text(map(asdict, message.content), where, after_result=after_result)
    if message.role == "tool" and isinstance(message.content, list):
        return result_text(map(asdict, message.content), where)
    content = message.content
    if message.role in _FINDERS and isinstance(content, list):
        content = [part for part in content if part.type != "tool_reference"]
    return content_text(content, _TEXT_PARTS, where)


def _message(message: Message, where: str, *, after_result: bool) -> chat.Message:
    calls = message.tool_calls or []
    if calls and message.role != "assistant":
        raise invalid(f"{where}.tool_calls", "only assistant messages have calls")
    if message.role == "tool" and message.tool_call_id is None and message.name is None:
        raise invalid(f"{where}.tool_call_id", "a tool message needs it")
    if message.content is None and message.role != "assistant":
        raise invalid(f"{where}.content", f"a {message.role} message needs it")
    return chat.Message(
        role=message.role,
        content=_content(message, f"{where}.content", after_result=after_result),
        reasoning=message.reasoning or message.reasoning_content,
        tool_calls=tuple(chat.ToolCall(c.id, c.function.name, c.function.arguments) for c in calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )
