"""From the messages and tools of a request to a Conversation."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from msgspec.structs import asdict

from oscine.api.common.errors import invalid, unsupported
from oscine.api.common.record import current, plain_word
from oscine.api.serving.formats import Calls, response_schema
from oscine.api.serving.schemas import (
    AllowedTool,
    AllowedToolsChoice,
    ChatCompletionRequest,
    Message,
    NamedCustomChoice,
    NamedToolChoice,
    ReasoningOptions,
    TemplateOptions,
    Tool,
    ToolCall,
    content_text,
)
from oscine.api.turns.attachments import result_text, said_text
from oscine.api.turns.custom_tools import grammar_tool, text_tool, written
from oscine.api.turns.dialect import CHAT, Dialect
from oscine.api.turns.instructions import folders_last
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
    messages = chat_messages(request.messages, {tool.name for tool in tools if tool.input is not None})
    said = tuple(_with_found(request.messages, messages, dict(waiting))) if waiting else messages
    declared = () if hidden else tuple(tool for tool in tools if tool.name not in waiting)
    return chat.Conversation(
        messages=folders_last(said) if declared else said,
        tools=declared,
        response_schema=response_schema(request.response_format),
        reasoning_effort=model_effort(_effort(request)),
        current_date=date,
    )


def _deferred(given: Sequence[Tool], tools: Sequence[chat.FunctionTool]) -> dict[str, chat.FunctionTool]:
    """The functions that are declared where they are found; none if no other function could find them."""
    named = (tool.custom if tool.type == "custom" else tool.function for tool in given if tool.defer_loading)
    names = {tool.name for tool in named if tool is not None}
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
    custom = custom_tools(request.tools)
    if isinstance(choice, NamedToolChoice):
        return Calls(_named({("function", choice.function.name)}, tools, custom), "required", parallel=False)
    if isinstance(choice, NamedCustomChoice):
        return Calls(_named({("custom", choice.custom.name)}, tools, custom), "required", parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        allowed = choice.allowed_tools
        named = {_allowed(tool, f"tool_choice.allowed_tools.tools[{i}]") for i, tool in enumerate(allowed.tools)}
        return Calls(_named(named, tools, custom), allowed.mode, parallel)
    return Calls(tuple(tools), choice, parallel)


def _allowed(tool: AllowedTool, where: str) -> tuple[str, str]:
    named = tool.custom if tool.type == "custom" else tool.function
    if named is None:
        raise invalid(f"{where}.{tool.type}", f"a tool of type {tool.type!r} needs it")
    return tool.type, named.name


def _named(
    named: Collection[tuple[str, str]], tools: Sequence[chat.FunctionTool], custom: Collection[str]
) -> tuple[chat.FunctionTool, ...]:
    """The `tools` that a choice names by type and name. Raises APIError for one that is not among them."""
    known = {("custom" if tool.name in custom else "function", tool.name): tool for tool in tools}
    for kind, name in sorted(named):
        if (kind, name) not in known:
            raise invalid("tool_choice", f"there is no {kind} {name!r} among the tools")
    return tuple(tool for key, tool in known.items() if key in named)


def custom_tools(tools: Sequence[Tool] | None) -> dict[str, bool]:
    """The custom tools by their names, and whether each has a grammar."""
    custom = (tool.custom for tool in tools or () if tool.type == "custom" and tool.custom is not None)
    return {tool.name: tool.format is not None and tool.format.type == "grammar" for tool in custom}


def is_called(tool: Tool) -> bool:
    """Whether the client answers calls of it, and not a vendor's server."""
    return tool.type in ("function", "custom")


def function_tools(tools: list[Tool] | None, longest_name: int) -> tuple[chat.FunctionTool, ...]:
    """The functions and custom tools; others are left out, as clients send types that no server knows."""
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools or ()) if is_called(tool)]
    try:
        validate_tools(functions, longest_name)
    except chat.ConversationError as error:
        raise invalid(error.param, str(error)) from None
    return tuple(functions)


def _function(tool: Tool, where: str) -> chat.FunctionTool:
    if tool.type == "function" and tool.function is not None:
        f = tool.function
        return chat.FunctionTool(f.name, f.description or "", f.parameters, f.strict is True)
    if tool.type == "function" or tool.custom is None:
        raise invalid(f"{where}.{tool.type}", f"a tool of type {tool.type!r} needs it")
    custom, format = tool.custom, tool.custom.format
    if format is None or format.type == "text":
        return text_tool(custom.name, custom.description)
    if format.grammar is None:
        raise invalid(f"{where}.custom.format.grammar", "a format of type 'grammar' needs it")
    paths = (f"{where}.custom.format", f"{where}.custom.format.grammar.definition")
    return grammar_tool(custom.name, custom.description, format.grammar.syntax, format.grammar.definition, paths)


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


def chat_messages(messages: list[Message], raw: Collection[str] = ()) -> tuple[chat.Message, ...]:
    """`raw`: names of custom tools whose input the model writes as it is."""
    if not messages:
        raise invalid("messages", "there must be one at least")
    before = (None, *(message.role for message in messages))
    pairs = enumerate(zip(messages, before, strict=False))
    return tuple(_message(message, f"messages[{i}]", raw, after_result=role == "tool") for i, (message, role) in pairs)


def _content(message: Message, where: str, *, after_result: bool) -> str:
    if message.role == "user" and isinstance(message.content, list):
        return said_text(map(asdict, message.content), where, after_result=after_result)
    if message.role == "tool" and isinstance(message.content, list):
        return result_text(map(asdict, message.content), where)
    content = message.content
    if message.role in _FINDERS and isinstance(content, list):
        content = [part for part in content if part.type != "tool_reference"]
    return content_text(content, _TEXT_PARTS, where)


def _message(message: Message, where: str, raw: Collection[str], *, after_result: bool) -> chat.Message:
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
        tool_calls=tuple(_call(call, f"{where}.tool_calls[{i}]", raw) for i, call in enumerate(calls)),
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _call(call: ToolCall, where: str, raw: Collection[str]) -> chat.ToolCall:
    if call.type == "function" and call.function is not None:
        return chat.ToolCall(call.id, call.function.name, call.function.arguments)
    if call.type == "function" or call.custom is None:
        raise invalid(f"{where}.{call.type}", f"a call of type {call.type!r} needs it")
    name, plain = call.custom.name, call.custom.name in raw
    return chat.ToolCall(call.id, name, written(call.custom.input, raw=plain), plain)
