"""The input of a response: its items as they are listed and stored, and the conversation that items are.

This module knows every type of item that a client may send back. Stored items are passed in.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct, structs

from oscine.api.common.errors import APIError, invalid
from oscine.api.common.ids import Id
from oscine.api.serving.schemas import ContentPart, content_text, convert
from oscine.api.turns.attachments import described, result_text, said_text
from oscine.api.turns.custom_tools import written
from oscine.chat import messages as chat
from oscine.chat.effort import Effort
from oscine.extensions.apis.compaction.seal import Seal
from oscine.extensions.apis.compaction.summary import summarised
from oscine.extensions.apis.responses.items import ID_PREFIXES, WITHOUT_STATUS, new_id
from oscine.extensions.apis.responses.schemas import ReasoningConfig, ResponseRequest, TextConfig
from oscine.extensions.apis.responses.tools import ClientTools, words_of
from oscine.extensions.apis.responses.typed.hosted import HOSTED, HostedCall, HostedItem
from oscine.extensions.apis.responses.view import Object, unsealed

_TRIGGER = "compaction_trigger"
_WITH_TOOLS = ("additional_tools", "tool_search_output")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "refusal")


class _Reference(Struct):
    id: Id


class _Item(Struct):
    type: str = "message"
    id: Id | None = None
    status: str | None = None


class _Message(Struct):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Object]


class _Part(Struct):
    type: str


class _Reasoning(Struct):
    content: list[ContentPart] | None = None
    encrypted_content: str | None = None
    summary: list[ContentPart] | None = None


class _Compaction(Struct):
    encrypted_content: str


class _Call(Struct, kw_only=True):
    call_id: str
    name: str
    namespace: str | None = None


class _FunctionCall(_Call, kw_only=True):
    arguments: str


class _CustomCall(_Call, kw_only=True):
    input: str


class _CallOutput(Struct):
    output: str | list[Object]
    call_id: str | None = None
    name: str | None = None  # of the function, instead of call_id
    namespace: str | None = None


class _CodeCall(Struct):
    code: str | None = None
    outputs: list[Object] | None = None


class _McpCall(Struct):
    server_label: str
    name: str
    arguments: str
    output: str | None = None
    error: Any = None


class _McpRequest(Struct):
    server_label: str
    name: str
    arguments: str


class _McpConsent(Struct):
    approval_request_id: str
    approve: bool
    reason: str | None = None


class _NewTools(Struct):
    tools: list[Object]


class _Effort(Struct):
    effort: Effort | None = None


class _Update(Struct):
    reasoning: _Effort | None = None
    text: TextConfig | None = None


def references(given: str | Sequence[Object], where: str = "input") -> list[str]:
    """The ids of stored items that the input stands for. Raises APIError for one that cannot be an id."""
    items = () if isinstance(given, str) else given
    return [convert(item, _Reference, f"{where}[{i}]").id for i, item in enumerate(items) if _is_reference(item)]


def _is_reference(item: Object) -> bool:
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and "role" not in item and "id" in item)


def input_items(given: str | Sequence[Object], stored: Mapping[str, Object], where: str = "input") -> list[Object]:
    """The items of an input, each with its type, id and status; references give way to `stored` items.

    Raises APIError that names what is wrong.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_input_item(item, stored, f"{where}[{i}]") for i, item in enumerate(given)]


def refuse_duplicates(items: Sequence[Object], before: Iterable[str], where: str) -> None:
    """Raises APIError, as OpenAI does, for an item with the id of another one of its conversation.

    `before`: the ids of the items before them.
    """
    seen = set(before)
    for i, item in enumerate(items):
        item_id = item["id"]
        if item_id in seen:
            message = f"Duplicate item found with id {item_id}. Remove duplicate items from your input and try again."
            raise APIError(message, param=f"{where}[{i}].id", code="duplicate_item")
        seen.add(item_id)


def _input_item(item: Object, stored: Mapping[str, Object], where: str) -> Object:
    if _is_reference(item):
        found = stored.get(item["id"])
        if found is None:
            raise invalid(f"{where}.id", f"there is no stored item {item['id']!r}")
        return found
    head = convert(item, _Item, where)
    kind = head.type
    if kind not in ID_PREFIXES:
        raise invalid(f"{where}.type", f"items of type {kind!r} are not supported")
    named = {"type": kind, **item, "id": head.id or new_id(ID_PREFIXES[kind])}
    if kind not in WITHOUT_STATUS:
        named["status"] = head.status or "completed"
    if kind == "message":
        named["content"] = _parts(item.get("content"), by_assistant=item.get("role") == "assistant")
    return named


def without_trigger(given: str | list[Object]) -> tuple[str | list[Object], bool]:
    """The input without a trigger of compaction at its end, and whether there was one. Raises APIError for a trigger
    that other items follow."""
    if isinstance(given, str):
        return given, False
    for i, item in enumerate(given[:-1]):
        if item.get("type") == _TRIGGER:
            raise invalid(f"input[{i}].type", f"an item of type {_TRIGGER!r} must be the last one")
    found = bool(given) and given[-1].get("type") == _TRIGGER
    return (given[:-1] if found else given), found


def new_tools(items: Iterable[Object], where: str) -> Iterator[tuple[Object, str]]:
    """The tools in the items, each with its path in the parameter `where`."""
    for i, item in enumerate(items):
        if item["type"] in _WITH_TOOLS:
            tools = convert(item, _NewTools, f"{where}[{i}]").tools
            yield from ((tool, f"{where}[{i}].tools[{j}]") for j, tool in enumerate(tools))


def configured(body: ResponseRequest, items: Iterable[Object], where: str) -> ResponseRequest:
    """The request with what items say of effort and form: the last of each counts. `where`: as in ItemHistory.add.

    Raises APIError for an item that says it wrongly.
    """
    for i, item in enumerate(items):
        if item["type"] == "configuration_update":
            update = convert(item, _Update, f"{where}[{i}]")
            if update.reasoning is not None:
                reasoning = structs.replace(body.reasoning or ReasoningConfig(), effort=update.reasoning.effort)
                body = structs.replace(body, reasoning=reasoning)
            if update.text is not None:
                text = structs.replace(body.text or TextConfig(), format=update.text.format)
                body = structs.replace(body, text=text)
    return body


def _parts(content: Any, *, by_assistant: bool) -> Any:
    """The content of a message in its listed form; a malformed one is kept, to be refused later."""
    if isinstance(content, str):
        content = [{"type": "output_text" if by_assistant else "input_text", "text": content}]
    if not by_assistant or not isinstance(content, list):
        return content
    return [
        {"annotations": [], "logprobs": [], **part} if isinstance(part, dict) and "text" in part else part
        for part in content
    ]


def _typed(content: str | list[Object], where: str) -> str | list[Object]:
    """The content itself. Raises APIError for a part without a type."""
    for i, part in enumerate(content if isinstance(content, list) else ()):
        convert(part, _Part, f"{where}.content[{i}]")
    return content


class ItemHistory:
    """Joins items to messages: consecutive items of the model are one message."""

    def __init__(self, tools: ClientTools, seal: Seal) -> None:
        """`tools`: their names are also those of functions that are no longer among them. `seal`: of compacted
        conversations."""
        self._tools, self._names, self._seal = tools, tools.names, seal
        self._declared: set[str] = set()  # functions that were found
        self._messages: list[chat.Message] = []
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[chat.ToolCall] = []
        self._call_ids: set[str] = set()
        self._mcp_requests: dict[str, _McpRequest] = {}  # for the user's consent, by their ids

    def messages(self) -> tuple[chat.Message, ...]:
        self._flush()
        return tuple(self._messages)

    def add(
        self, items: Iterable[Object], calls: Mapping[str, Sequence[str]], where: str, *, kept: bool = False
    ) -> None:
        """`calls` are the built-in calls among the items by id: recipient, content, channel and result.

        `where` is the parameter that the items came in, for APIError. `kept`: by the server, where a client may have
        deleted a call; its result is then left out.
        """
        for i, item in enumerate(items):
            self._add(item, calls.get(item["id"]), f"{where}[{i}]", kept=kept)

    def _add(self, item: Object, call: Sequence[str] | None, where: str, *, kept: bool) -> None:
        if call is not None:
            recipient, content, channel, result = call
            said: Literal["analysis", "commentary"] = "commentary" if channel == "commentary" else "analysis"
            self._builtin(chat.BuiltinCall(recipient, content, said), result)
            return
        match item["type"]:
            case "message":
                self._message(convert(item, _Message, where), where)
            case "reasoning":
                self._reason(convert(item, _Reasoning, where), where)
            case "compaction":
                self._compacted(convert(item, _Compaction, where), where)
            case "function_call":
                made = convert(item, _FunctionCall, where)
                self._call(made, made.arguments)
            case "custom_tool_call":
                custom = convert(item, _CustomCall, where)
                raw = self._tools.takes_text(custom.name, custom.namespace)
                self._call(custom, written(custom.input, raw=raw), raw=raw)
            case "function_call_output" | "custom_tool_call_output":
                self._output(convert(item, _CallOutput, where), where, kept=kept)
            case "code_interpreter_call":
                code = convert(item, _CodeCall, where)
                outputs = (
                    str(o.get("logs") or "") if o.get("type") == "logs" else described(o) for o in code.outputs or ()
                )
                self._builtin(chat.BuiltinCall("python", code.code or ""), "".join(outputs))
            case "mcp_call":
                mcp = convert(item, _McpCall, where)
                error = mcp.error if isinstance(mcp.error, str) else msgspec.json.encode(mcp.error).decode()
                answer = f"Error: {error}" if mcp.output is None else mcp.output
                self._mcp(mcp, answer)
            case "mcp_approval_request":
                self._mcp_requests[item["id"]] = convert(item, _McpRequest, where)
            case "mcp_approval_response":
                self._consent(convert(item, _McpConsent, where), where, kept=kept)
            case kind if kind in HOSTED:
                self._hosted(convert(item, HOSTED[kind], where), where, kept=kept)
        if item["type"] in _WITH_TOOLS:
            self._find_tools(convert(item, _NewTools, where).tools, f"{where}.tools")

    def _find_tools(self, tools: list[Object], where: str) -> None:
        """Declares tools where the conversation has them: with the message that found them, or by themselves."""
        new = tuple(
            {tool.name: tool for tool in self._tools.found(tools, where) if tool.name not in self._declared}.values()
        )
        self._declared.update(tool.name for tool in new)
        self._flush()
        last = self._messages[-1] if self._messages else None
        if new and last is not None and last.role == "tool" and not last.builtin:
            self._messages[-1] = replace(last, tools=(*last.tools, *new))
        elif new:
            self._messages.append(chat.Message("developer", tools=new))

    def _flush(self) -> None:
        """Ends the current message of the model."""
        if self._reasoning is not None or self._content is not None or self._calls:
            content, calls = self._content or "", tuple(self._calls)
            self._messages.append(chat.Message("assistant", content, self._reasoning, calls))
        self._reasoning, self._content, self._calls = None, None, []

    def _message(self, message: _Message, where: str) -> None:
        if message.role != "assistant":
            self._flush()
            after_result = message.role == "user" and bool(self._messages) and self._messages[-1].role == "tool"
            self._messages.append(
                chat.Message(
                    message.role,
                    said_text(_typed(message.content, where), f"{where}.content", after_result=after_result),
                )
            )
            return
        text = said_text(_typed(message.content, where), f"{where}.content", after_result=False)
        if self._content is not None or self._calls:
            self._flush()
        self._content = text

    def _reason(self, item: _Reasoning, where: str) -> None:
        """Takes the summary only of items without content: summaries of this server repeat the content."""
        text = content_text(item.content, _TEXT_PARTS, f"{where}.content") or unsealed(item.encrypted_content or "")
        text = text or "\n\n".join(part.text or "" for part in item.summary or ())
        if text:
            self._flush()
            self._reasoning = text

    def _compacted(self, item: _Compaction, where: str) -> None:
        """Replaces all messages before, unless the client sends those that are kept."""
        compacted = self._seal.open(item.encrypted_content)
        if compacted is None:
            raise invalid(f"{where}.encrypted_content", "it was changed, or written by another server")
        self._flush()
        if compacted.said is not None:
            tools = tuple(tool for message in self._messages for tool in message.tools)
            found = [chat.Message("developer", tools=tools)] if tools else []
            self._messages = [*(chat.Message(cast(Any, role), text) for role, text in compacted.said), *found]
        self._messages.append(summarised(compacted.summary))

    def _call(self, call: _Call, arguments: str, *, raw: bool = False) -> None:
        self._call_ids.add(call.call_id)
        name = self._names.seen(*words_of(call.name, call.namespace))
        self._calls.append(chat.ToolCall(call.call_id, name, arguments, raw))

    def _output(self, output: _CallOutput, where: str, *, kept: bool) -> None:
        if output.call_id is None and output.name is None:
            raise invalid(f"{where}.call_id", "it is required")
        name = None if output.name is None else self._names.seen(*words_of(output.name, output.namespace))
        self._result(output.call_id, name, result_text(output.output, f"{where}.output"), where, kept=kept)

    def _hosted(self, item: HostedItem, where: str, *, kept: bool) -> None:
        """A result without a call_id names its function."""
        name, text = self._names.seen(item.tool), item.text()
        if isinstance(item, HostedCall):
            call_id = item.call_id or item.id
            self._call_ids.add(call_id)
            self._calls.append(chat.ToolCall(call_id, name, msgspec.json.encode(item.input()).decode()))
        if text is not None:
            self._result(item.call_id, name, text, where, kept=kept)

    def _result(self, call_id: str | None, name: str | None, text: str, where: str, *, kept: bool) -> None:
        """`name`: of the function, for a result without a call_id."""
        if call_id is not None and call_id not in self._call_ids:
            if kept:
                return
            raise invalid(f"{where}.call_id", f"no call before it has the id {call_id!r}")
        self._flush()
        self._messages.append(chat.Message("tool", text, tool_call_id=call_id, name=name))

    def _consent(self, consent: _McpConsent, where: str, *, kept: bool) -> None:
        """A refusal becomes the result of the call; an approved call is an item of its own."""
        request = self._mcp_requests.get(consent.approval_request_id)
        if request is None:
            if kept:
                return
            why = f"no request before it has the id {consent.approval_request_id!r}"
            raise invalid(f"{where}.approval_request_id", why)
        if not consent.approve:
            self._mcp(request, ": ".join(filter(None, ("Error: the user refused this call", consent.reason))))

    def _mcp(self, call: _McpCall | _McpRequest, result: str) -> None:
        self._builtin(chat.BuiltinCall(f"{call.server_label}.{call.name}", call.arguments, "commentary"), result)

    def _builtin(self, call: chat.BuiltinCall, result: str) -> None:
        if self._calls:
            self._flush()
        said = chat.Message("assistant", self._content or "", self._reasoning, builtin=call)
        self._reasoning = self._content = None
        self._messages += [said, chat.Message("tool", result, builtin=call)]
