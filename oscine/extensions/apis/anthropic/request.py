"""From a request of Anthropic's Messages API to the chat completion that asks for the same.

Values that a chat completion has too are checked there.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from oscine.api.common.errors import from_validation, invalid, unsupported
from oscine.api.serving.formats import Form, extensions, only_form
from oscine.api.serving.sampling import check
from oscine.api.serving.schemas import (
    AllowedTools,
    AllowedToolsChoice,
    ChatCompletionRequest,
    ContentPart,
    Function,
    FunctionCall,
    JsonSchema,
    Message,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    Tool,
    ToolCall,
    convert,
    not_read,
    part_text,
)
from oscine.api.turns.attachments import described, is_vendors, readable, result_text, vendors_text
from oscine.chat.effort import Effort
from oscine.chat.grammar import JsonFormat
from oscine.extensions.apis.anthropic.compaction import expanded
from oscine.extensions.apis.anthropic.schemas import (
    SHARED,
    AnthropicMessage,
    AnthropicTool,
    AnthropicToolChoice,
    Block,
    CountTokensRequest,
    MessagesRequest,
    OutputConfig,
    Thinking,
)
from oscine.extensions.apis.compaction.seal import Seal

_SEARCH, _TOOL_SEARCH = "web_search", "tool_search_tool"  # how the types of a vendor's tools begin
_TEXT = ("text",)  # types of the blocks that are read as text
_CHANGES = ("tool_addition", "tool_removal")  # types of blocks that change the tools
_BILLING = "x-anthropic-billing-header:"
_SHOWN = ("image", "document", "search_result")  # types of the blocks that show something
_LITTLE, _MUCH = 4_096, 16_384  # tokens of a thinking budget: below is low effort, from there on high effort


def shows_thinking(thinking: Thinking | None) -> bool:
    """Whether the client asks for blocks of thinking. The model reasons in any case."""
    return thinking is not None and thinking.type != "disabled"


def chat_request(body: MessagesRequest, seal: Seal) -> ChatCompletionRequest:
    """`seal`: of compactions. Raises APIError that names the parameter, for all that the model cannot read or do."""
    request = prompt_request(body, seal)
    for name in ("max_tokens", "stream", "cache_salt", "temperature", "top_p", "top_k", *SHARED.split()):
        setattr(request, name, getattr(body, name))
    request.thinking_token_budget = _thinking_budget(body)
    request.stop = body.stop_sequences
    return request


def prompt_request(body: CountTokensRequest, seal: Seal) -> ChatCompletionRequest:
    """What the prompt depends on, and what may be said: without limits and sampling. Raises APIError."""
    if body.thread is not None:
        error = unsupported("thread", "the server keeps no messages; send all of them")
        error.details = {"error_code": "thread_unsupported_request", "unsupported": []}
        raise error
    body = replace(body, messages=expanded(body, seal))
    choice, form = body.tool_choice, body.output_config.format if body.output_config else None
    shape = ResponseFormat("json_schema", JsonSchema("answer", form.schema, strict=True)) if form else None
    system = [Message("system", _instructions(body.system, "system"))] if body.system else []
    return ChatCompletionRequest(
        model=body.model,
        messages=[*system, *_messages(body.messages, may_end=body.compaction is not None)],
        tools=[*_tools(body.tools or ()), *_added(body)],
        tool_choice=_tool_choice(choice, body.tools or ()) if choice else None,
        parallel_tool_calls=not (choice and choice.disable_parallel_tool_use),
        reasoning_effort=_effort(body.thinking, body.output_config),
        response_format=shape,
    )


def _effort(thinking: Thinking | None, output: OutputConfig | None) -> Effort | None:
    if output is not None and output.effort is not None:
        return output.effort
    if thinking is None or thinking.type in ("adaptive", "between_tools"):
        return None
    if thinking.type == "disabled":
        return "none"
    budget = thinking.budget_tokens
    if budget is None:
        raise invalid("thinking.budget_tokens", "thinking of type 'enabled' needs it")
    return "low" if budget < _LITTLE else "medium" if budget < _MUCH else "high"


def _thinking_budget(body: MessagesRequest) -> int | None:
    if body.thinking is None or body.thinking.type != "enabled" or body.thinking.budget_tokens is None:
        return None
    budget, limit = body.thinking.budget_tokens, body.max_tokens
    check(budget < limit, "thinking.budget_tokens", f"less than max_tokens ({limit})", budget)
    return budget


def answer_form(body: MessagesRequest, request: ChatCompletionRequest) -> Form | None:
    """What is enforced of the answer. `request`: made of `body`. Raises APIError for two forms."""
    wanted = body.output_config.format if body.output_config else None
    path = "output_config.format.schema"
    own = [] if wanted is None else [Form(JsonFormat(wanted.schema, any_format=True), path)]
    return only_form([*own, *extensions(request)])


def lacking_tools(body: CountTokensRequest, *, searches: bool) -> list[str]:
    """The types of the tools that this server lacks. `searches`: whether it has a browser."""
    others = (str(tool.type) for tool in body.tools or () if not is_own(tool))
    return [kind for kind in others if not (searches and kind.startswith(_SEARCH))]


def is_own(tool: AnthropicTool) -> bool:
    """Whether the client runs it."""
    return tool.type in (None, "custom")


def web_search(body: CountTokensRequest) -> AnthropicTool | None:
    """The search that the server is to run, if the request has one. Raises APIError for what it cannot do."""
    for i, tool in enumerate(body.tools or ()):
        if (tool.type or "").startswith(_SEARCH):
            for name in ("allowed_domains", "blocked_domains"):
                if getattr(tool, name):
                    raise unsupported(f"tools[{i}].{name}")
            return tool
    return None


def _tools(tools: Sequence[AnthropicTool]) -> Iterator[Tool]:
    """The client's own functions. All are declared at the begin if a search of the vendor's was to find some."""
    defers = not any((tool.type or "").startswith(_TOOL_SEARCH) for tool in tools)
    for i, tool in enumerate(tools):
        if is_own(tool):
            if tool.input_schema is None:
                raise invalid(f"tools[{i}].input_schema", "a tool needs it")
            function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
            yield Tool("function", function, defer_loading=tool.defer_loading if defers else None)


def _tool_choice(choice: AnthropicToolChoice, tools: Sequence[AnthropicTool]) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise invalid("tool_choice.name", "a choice of type 'tool' needs it")
    if any(tool.name == choice.name and not is_own(tool) for tool in tools):  # no function, but what the server has
        return AllowedToolsChoice(AllowedTools("required", []))
    return NamedToolChoice(NamedFunction(choice.name))


def _messages(messages: list[AnthropicMessage], *, may_end: bool) -> Iterator[Message]:
    """`may_end`: whether the last message may be the assistant's."""
    if not messages:
        raise invalid("messages", "there must be one at least")
    if messages[-1].role == "assistant" and not may_end:
        raise invalid("messages", "the last one must not be the assistant's: an answer cannot be begun for the model")
    last_user = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    for i, message in enumerate(messages):
        where = f"messages[{i}].content"
        if message.role == "system":
            yield _system(message, where, cleared=message.clear_at == "next_user_message" and i < last_user)
        elif isinstance(message.content, str):
            yield Message(message.role, message.content)
        elif message.role == "assistant":
            yield _assistant(message.content, where)
        else:
            yield from _user(message.content, where)


def _instructions(content: str | list[Block], where: str) -> str:
    """The system text without Claude Code's first line, which differs per conversation and prevents prefix reuse."""
    if isinstance(content, str):
        return _without_billing(content)
    return "".join(_without_billing(part_text(block, _TEXT, f"{where}[{i}]")) for i, block in enumerate(content))


def _system(message: AnthropicMessage, where: str, *, cleared: bool) -> Message:
    """A system message within the conversation, which may add tools and remove them."""
    blocks = message.content if isinstance(message.content, list) else []
    said = [block for block in blocks if block.type not in _CHANGES] if blocks else message.content
    texts = [] if cleared else [_instructions(said, where)]
    texts += [f"The tool {name} is no longer available." for name in _changed(message, "tool_removal")]
    names = _changed(message, "tool_addition")
    references = [ContentPart("tool_reference", tool_name=name) for name in names]
    text = "\n".join(texts)
    return Message("system", [ContentPart("text", text), *references] if names else text)


def _changed(message: AnthropicMessage, kind: str) -> list[str]:
    """The names of the tools in blocks of this type."""
    blocks = message.content if message.role == "system" and isinstance(message.content, list) else []
    tools = [block.tool for block in blocks if block.type == kind and isinstance(block.tool, dict)]
    return [str(tool.get("name") or _definition(tool).get("name")) for tool in tools]


def _definition(tool: dict[str, Any]) -> dict[str, Any]:
    definition = tool.get("definition")
    return definition if isinstance(definition, dict) else {}


def _added(body: CountTokensRequest) -> Iterator[Tool]:
    """The functions that messages define, each once; those of the request win."""
    known = {tool.name for tool in body.tools or ()}
    for i, message in enumerate(body.messages):
        for j, block in enumerate(message.content if isinstance(message.content, list) else ()):
            if block.type == "tool_addition" and isinstance(block.tool, dict) and _definition(block.tool):
                tool = convert(_definition(block.tool), AnthropicTool, f"messages[{i}].content[{j}].tool.definition")
                if tool.name not in known:
                    known.add(tool.name)
                    yield from _tools([replace(tool, defer_loading=True)])


def removed_tools(body: CountTokensRequest) -> frozenset[str]:
    """The names of tools that the conversation has removed, and not added again."""
    removed: set[str] = set()
    for message in body.messages:
        removed |= {*_changed(message, "tool_removal")}
        removed -= {*_changed(message, "tool_addition")}
    return frozenset(removed)


def _without_billing(text: str) -> str:
    return text.partition("\n")[2].lstrip("\n") if text.startswith(_BILLING) else text


def _user(blocks: list[Block], where: str) -> Iterator[Message]:
    """Results of tools and what the user says, in their order."""
    said: list[str] = []
    of_tools = any(block.type == "tool_result" for block in blocks)
    for i, block in enumerate(blocks):
        if block.type != "tool_result":
            said.append(_said(block, f"{where}[{i}]", of_tools=of_tools))
            continue
        if said:
            yield Message("user", "".join(said))
            said = []
        yield _result(block, f"{where}[{i}]")
    if said or not blocks:
        yield Message("user", "".join(said))


def _said(block: Block, where: str, *, of_tools: bool) -> str:
    """The text of a user's block. `of_tools`: it stands beside results of tools, and what it shows is from them."""
    if block.type in _SHOWN:
        text = readable(asdict(block))
        if text is not None:
            return text
        if of_tools:
            return described(asdict(block))
        raise not_read(block.type, f"{where}.type")
    return part_text(block, _TEXT, where)


def _result(block: Block, where: str) -> Message:
    try:
        content = msgspec.convert(block.content, str | list[dict[str, Any]] | None)
    except msgspec.ValidationError as error:
        inner = from_validation(error)
        raise invalid(f"{where}.content{inner.param or ''}", "it is neither a text nor a list of blocks") from None
    parts = content if isinstance(content, list) else []
    found = [part for part in parts if part.get("type") == "tool_reference"]
    text = result_text([part for part in parts if part not in found] if found else content, f"{where}.content")
    said = f"Error: {text}" if block.is_error else text
    references = [ContentPart("tool_reference", tool_name=str(part.get("tool_name"))) for part in found]
    call_id = _needed(block.tool_use_id, where, "tool_use_id")
    return Message("tool", [ContentPart("text", said), *references] if found else said, tool_call_id=call_id)


def _assistant(blocks: list[Block], where: str) -> Message:
    said, thoughts, calls = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "thinking":
            thoughts.append(_needed(block.thinking, f"{where}[{i}]", "thinking"))
        elif block.type == "tool_use":
            calls.append(_call(block, f"{where}[{i}]"))
        elif is_vendors(block.type):
            said.append(vendors_text(asdict(block)))
        elif block.type != "redacted_thinking":
            said.append(part_text(block, _TEXT, f"{where}[{i}]"))
    reasoning = "\n\n".join(filter(None, thoughts))
    return Message("assistant", "".join(said) or None, reasoning=reasoning or None, tool_calls=calls or None)


def _call(block: Block, where: str) -> ToolCall:
    arguments = msgspec.json.encode(block.input or {}).decode()
    return ToolCall(_needed(block.id, where, "id"), FunctionCall(_needed(block.name, where, "name"), arguments))


def _needed(value: str | None, where: str, field: str) -> str:
    if value is None:
        raise invalid(f"{where}.{field}", "the block needs it")
    return value
