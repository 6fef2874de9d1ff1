"""The output items of a response and their events, made of the events of a turn.

At most one item is open at a time. The model writes most items; calls of built-in tools are items that the server
answers.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

from oscine.api.serving.logprobs import ContentLogprobs, TokenLogprob
from oscine.api.turns.custom_tools import read_input
from oscine.api.turns.progress import ToolAnswered, ToolBegins, Turn, TurnEvent
from oscine.chat.events import (
    BuiltinCallBegin,
    BuiltinCallDelta,
    ContentDelta,
    MessageEnd,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from oscine.chat.toolbox import (
    CITATION_END,
    CITATION_LENGTH,
    Citation,
    CodeRun,
    FileSearch,
    FileSource,
    McpCall,
    McpListing,
    Source,
    Toolbox,
    ToolResult,
    WebFind,
    WebOpen,
    WebSearch,
)
from oscine.extensions.apis.responses.events import ResponseEvents
from oscine.extensions.apis.responses.tools import ClientTools
from oscine.extensions.apis.responses.typed.tools import TypedTool
from oscine.extensions.apis.responses.view import Object

Status = Literal["completed", "incomplete", "failed", "in_progress"]

ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "code_interpreter_call": "ci",
    "web_search_call": "ws",
    "mcp_call": "mcp",
    "mcp_list_tools": "mcpl",
    "mcp_approval_request": "mcpr",
    "mcp_approval_response": "mcpa",
    "compaction": "cmp",
    "additional_tools": "at",
    "configuration_update": "cfg",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "file_search_call": "fs",
    "image_generation_call": "ig",
    "computer_call": "cu",
    "computer_call_output": "cuo",
    "local_shell_call": "lsh",
    "local_shell_call_output": "lsho",
    "shell_call": "sh",
    "shell_call_output": "sho",
    "apply_patch_call": "apc",
    "apply_patch_call_output": "apco",
    "program": "prog",
    "program_output": "progo",
}
WITHOUT_STATUS = (
    *(
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "compaction",
        "additional_tools",
        "configuration_update",
        "program",
    ),
)


_RESULTS = {  # types of the items with the results of calls, by the calls' types
    "function_call": "function_call_output",
    "custom_tool_call": "custom_tool_call_output",
    "shell_call": "shell_call_output",
    "local_shell_call": "local_shell_call_output",
    "apply_patch_call": "apply_patch_call_output",
    "tool_search_call": "tool_search_output",
}


def required_input(item: Object) -> Object | None:
    """What the client is to answer an item of the output with, without the result; None for other items."""
    kind = _RESULTS.get(item["type"])
    if item["type"] == "mcp_approval_request":
        return {"type": "mcp_approval_response", "approval_request_id": item["id"]}
    if kind is None:
        return None
    more = {"name": item["name"]} if item["type"] == "function_call" else {}
    more |= {"execution": "client"} if item["type"] == "tool_search_call" else {}
    return {"type": kind, "call_id": item["call_id"], **more}


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


def new_item(kind: str, **fields: Any) -> Object:
    status = {} if kind in WITHOUT_STATUS else {"status": "in_progress"}
    return {"id": new_id(ID_PREFIXES[kind]), "type": kind, **status, **fields}


class Item:
    """An item of a response. The client sees it when it is made, and again when it has ended."""

    kind: str  # type of the item

    def __init__(self, events: ResponseEvents, index: int, **fields: Any) -> None:
        self.item = new_item(self.kind, **fields)
        self._events, self._index = events, index
        events.add_item("response.output_item.added", index, self.item)

    def emit(self, kind: str, **fields: Any) -> None:
        self._events.add(f"response.{kind}", item_id=self.item["id"], output_index=self._index, **fields)

    def add(self, text: str) -> None:
        """Takes what the model writes."""

    def end(self, status: Status) -> None:
        if "status" in self.item:
            self.item["status"] = status
        self._events.add_item("response.output_item.done", self._index, self.item)


class ReasoningItem(Item):
    """An item with one part of text."""

    kind = "reasoning"
    part_kind = "reasoning_text"

    def __init__(self, events: ResponseEvents, index: int, **fields: Any) -> None:
        super().__init__(events, index, content=[], **fields)
        self.part = self._empty_part()
        self._texts: list[str] = []
        self.emit("content_part.added", content_index=0, part=self.part)

    def _empty_part(self) -> Object:
        return {"type": self.part_kind, "text": ""}

    def add(self, text: str) -> None:
        self._texts.append(text)
        self.emit(f"{self.part_kind}.delta", content_index=0, delta=text)

    def end(self, status: Status) -> None:
        self.part["text"] = "".join(self._texts)
        self.item["content"] = [self.part]
        self._end_text()
        self.emit("content_part.done", content_index=0, part=self.part)
        super().end(status)

    def _end_text(self) -> None:
        self.emit(f"{self.part_kind}.done", content_index=0, text=self.part["text"])


class SummaryItem(ReasoningItem):
    """Repeats reasoning as its summary, for clients that show summaries only."""

    def __init__(self, events: ResponseEvents, index: int, **fields: Any) -> None:
        super().__init__(events, index, **fields)
        self._emit("part.added", part={"type": "summary_text", "text": ""})

    def _emit(self, kind: str, **fields: Any) -> None:
        self.emit(f"reasoning_summary_{kind}", summary_index=0, **fields)

    def add(self, text: str) -> None:
        super().add(text)
        self._emit("text.delta", delta=text)

    def _end_text(self) -> None:
        super()._end_text()
        part = {"type": "summary_text", "text": self.part["text"]}
        self.item["summary"] = [part]
        self._emit("text.done", text=part["text"])
        self._emit("part.done", part=part)


class MessageItem(ReasoningItem):
    """Text for the user."""

    kind = "message"
    part_kind = "output_text"

    def __init__(
        self, events: ResponseEvents, index: int, cited: Callable[[str], Sequence[Citation]], **fields: Any
    ) -> None:
        super().__init__(events, index, role="assistant", **fields)
        self._cited = cited
        self._length = 0  # of all texts

    def _empty_part(self) -> Object:
        return {**super()._empty_part(), "annotations": [], "logprobs": []}

    def add_content(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        self._texts.append(text)
        self._length += len(text)
        self.part["logprobs"] += logprobs
        self.emit("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        if CITATION_END in text:
            self._cite(len(text))

    def _cite(self, newest: int) -> None:
        """Sends the citations that end within this number of the newest characters."""
        tail = "".join(self._texts[-1 - CITATION_LENGTH :])  # a text has a character at least
        before = self._length - len(tail)
        found = self.part["annotations"]
        for citation in self._cited(tail):
            if citation.end > len(tail) - newest:
                placed = _annotation(citation, before)
                index = len(found)
                self.emit("output_text.annotation.added", content_index=0, annotation_index=index, annotation=placed)
                found.append(placed)

    def _end_text(self) -> None:
        text = self.part["text"]
        self.emit("output_text.done", content_index=0, text=text, logprobs=self.part["logprobs"])


def _annotation(citation: Citation, before: int) -> Object:
    """`before`: characters of the answer before the text that the citation is a place in."""
    start, source = citation.start + before, citation.source
    if isinstance(source, FileSource):
        return {"type": "file_citation", "index": start, **source._asdict()}
    place = {"start_index": start, "end_index": citation.end + before}
    return {"type": "url_citation", **place, "url": source.url, "title": source.title}


class FunctionCallItem(Item):
    kind = "function_call"

    def add(self, text: str) -> None:
        self.item["arguments"] += text
        self.emit("function_call_arguments.delta", delta=text)

    def end(self, status: Status) -> None:
        self.emit("function_call_arguments.done", name=self.item["name"], arguments=self.item["arguments"])
        super().end(status)


class TextCallItem(Item):
    """A call of a custom tool whose input the model writes as it is."""

    kind = "custom_tool_call"

    def add(self, text: str) -> None:
        self.item["input"] += text
        self.emit("custom_tool_call_input.delta", delta=text)

    def end(self, status: Status) -> None:
        self.emit("custom_tool_call_input.done", input=self.item["input"])
        super().end(status)


class CustomCallItem(Item):
    """The model writes JSON, and the client gets the text in it. So the text comes in one piece."""

    kind = "custom_tool_call"
    _arguments = ""

    def add(self, text: str) -> None:
        self._arguments += text

    def end(self, status: Status) -> None:
        self.item["input"] = read_input(self._arguments)
        if self.item["input"]:
            self.emit("custom_tool_call_input.delta", delta=self.item["input"])
        self.emit("custom_tool_call_input.done", input=self.item["input"])
        super().end(status)


class TypedCallItem(Item):
    """A call of a tool that has items of its own. Its arguments come in one piece, except for commands."""

    def __init__(self, events: ResponseEvents, index: int, tool: TypedTool, call_id: str) -> None:
        self.kind = tool.call
        self._tool, self._written = tool, ""
        arguments = {tool.argument: tool.arguments("")}
        super().__init__(events, index, call_id=call_id, **arguments, **tool.more)

    def add(self, text: str) -> None:
        self._written += text

    def end(self, status: Status) -> None:
        made = self.item[self._tool.argument] = self._tool.arguments(self._written)
        for i, command in enumerate(made["commands"] if self.kind == "shell_call" else ()):
            place = {"output_index": self._index, "command_index": i}
            self._events.add("response.shell_call_command.added", command="", **place)
            self._events.add("response.shell_call_command.delta", delta=command, **place)
            self._events.add("response.shell_call_command.done", command=command, **place)
        if status != "completed" and self.kind == "apply_patch_call":  # it knows no other status
            status = "in_progress"
        super().end(status)


class BuiltinItem(Item):
    """A call from its first token to its result."""

    field = ""  # of the item: the text of the call, if clients see it
    text_kind = ""  # of its events
    running = ""  # the event of a tool that begins
    _is_told = False  # whether the complete text was sent

    def __init__(self, events: ResponseEvents, index: int, **fields: Any) -> None:
        super().__init__(events, index, **fields)
        self.emit(f"{self.kind}.in_progress")

    def add(self, text: str) -> None:
        if self.field:
            self.item[self.field] += text
            self.emit(f"{self.text_kind}.delta", delta=text)

    def said(self) -> None:
        """The call is complete, and the tool begins."""
        self._tell()
        if self.running:
            self.emit(f"{self.kind}.{self.running}")

    def _tell(self) -> None:
        if self.field and not self._is_told:
            self._is_told = True
            self.emit(f"{self.text_kind}.done", **{self.field: self.item[self.field]})

    def end(self, status: Status) -> None:
        self._tell()  # the token budget may have cut the call
        super().end(status)

    def answered(self, result: ToolResult) -> None:
        """Ends the item."""
        shown = self._shown(result)
        if shown is not None:
            self.item |= shown
            self.emit(f"{self.kind}.completed")
        self.end("failed" if shown is None else "completed")

    def _shown(self, result: ToolResult) -> Object | None:
        """The item's fields with the result; None: the call failed."""
        raise NotImplementedError


class CodeItem(BuiltinItem):
    kind, field, text_kind, running = "code_interpreter_call", "code", "code_interpreter_call_code", "interpreting"

    def _shown(self, result: ToolResult) -> Object | None:
        if not isinstance(result.details, CodeRun):
            return None
        return {"outputs": [{"type": "logs", "logs": result.details.logs}]}


class SearchItem(BuiltinItem):
    kind, running = "web_search_call", "searching"

    def _shown(self, result: ToolResult) -> Object | None:
        match result.details:
            case WebSearch(query, sources):
                return {"action": _search(query, sources)}
            case WebOpen(url):
                return {"action": {"type": "open_page", "url": url}}
            case WebFind(url, pattern):
                return {"action": {"type": "find_in_page", "url": url or "", "pattern": pattern}}
        return None


class FileSearchItem(BuiltinItem):
    kind, running = "file_search_call", "searching"

    def _shown(self, result: ToolResult) -> Object | None:
        details = result.details
        if not isinstance(details, FileSearch):
            return None
        self.item["queries"] = [*details.queries]
        return None if details.results is None else {"results": [asdict(found) for found in details.results]}


class McpItem(BuiltinItem):
    kind, field, text_kind = "mcp_call", "arguments", "mcp_call_arguments"

    def _shown(self, result: ToolResult) -> Object | None:
        details = result.details
        if isinstance(details, McpCall) and details.error is None:
            return {"output": details.output}
        error = details.error if isinstance(details, McpCall) else result.text
        self.item["error"] = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
        self.emit("mcp_call.failed")
        return None


class CompactionItem(Item):
    """A summary that stands for the conversation before it."""

    kind = "compaction"

    def __init__(self, events: ResponseEvents, index: int) -> None:
        super().__init__(events, index, encrypted_content="")

    def grow(self) -> None:
        self.emit("compaction.compacting")

    def complete(self, sealed: str) -> None:
        self.item["encrypted_content"] = sealed
        self.end("completed")


def _search(query: str, sources: tuple[Source, ...] = ()) -> Object:
    found = [{"type": "url", "url": source.url} for source in sources]
    return {"type": "search", "query": query, "queries": [query], "sources": found}


class ListingItem(Item):
    """The tools of an MCP server."""

    kind = "mcp_list_tools"

    def __init__(self, events: ResponseEvents, index: int, listing: McpListing) -> None:
        super().__init__(events, index, server_label=listing.server_label, tools=[], error=None)
        self.emit("mcp_list_tools.in_progress")
        self.item.update(tools=list(listing.tools), error=listing.error)
        self.emit("mcp_list_tools.failed" if listing.error else "mcp_list_tools.completed")


class OutputItems:
    """All items of a response, in order. The item of a built-in call stays open until the call is answered.

    A Choice of oscine.api.turns.generation.
    """

    def __init__(
        self,
        turn: Turn,
        events: ResponseEvents,
        tools: ClientTools,
        toolbox: Toolbox,
        logprobs: ContentLogprobs,
        before: Sequence[Object] = (),
        *,
        summaries: bool,
    ) -> None:
        """`before`: items that are complete. `summaries`: whether reasoning items have a summary."""
        self.turn = turn
        self.items: list[Object] = [*before]
        self.calls: dict[str, list[str]] = {}  # of built-in tools, by item; see ItemHistory.add
        self._open: Item | None = None
        self._events, self._tools, self._toolbox, self._logprobs = events, tools, toolbox, logprobs
        self._reasoning_kind = SummaryItem if summaries else ReasoningItem
        self.is_steered: Callable[[], bool] = bool  # whether the response is to end after an item
        self.was_steered = False  # whether it has ended so, before the model's own end

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        for event in events:
            self._take(event)
            if isinstance(event, MessageEnd | ToolAnswered) and self._open is None and self.is_steered():
                self.was_steered = self.turn.stop()
                if self.was_steered:
                    break
        return self._events.take()

    def _take(self, event: TurnEvent) -> None:
        match event:
            case ReasoningDelta():
                (self._open or self._begin(self._reasoning_kind, summary=[])).add(event.text)
            case ContentDelta():
                phase = "commentary" if event.preamble else "final_answer"
                message = self._open or self._begin(MessageItem, cited=self._toolbox.citations, phase=phase)
                assert isinstance(message, MessageItem)
                message.add_content(event.text, self._logprobs.of(event))
            case ToolCallBegin():
                self._begin_call(event)
            case BuiltinCallBegin():
                self._begin_builtin(*event.recipient.partition(".")[::2])
            case ToolCallDelta(arguments=text) | BuiltinCallDelta(content=text):
                assert self._open is not None
                self._open.add(text)
            case MessageEnd() if event.cut or event.kind != "builtin_call":
                self.end("incomplete" if event.cut else "completed")
            case ToolBegins():
                self._builtin.said()
            case ToolAnswered(call, result):
                item, self._open = self._builtin, None
                item.answered(result)
                self.calls[item.item["id"]] = [call.recipient, call.content, call.channel, result.text]

    @property
    def _builtin(self) -> BuiltinItem:
        assert isinstance(self._open, BuiltinItem)
        return self._open

    def end(self, status: Status) -> None:
        """Ends the item that is open, if there is one."""
        if self._open is not None:
            self._open.end(status)
            self._open = None

    def begin(self, listings: Sequence[McpListing]) -> None:
        """Adds items with the tools of MCP servers."""
        for listing in listings:
            self._begin(ListingItem, listing=listing)
            self.end("completed")

    @property
    def ended(self) -> list[Object]:
        return self.items if self._open is None else self.items[:-1]

    def _begin(self, kind: Callable[..., Item], **fields: Any) -> Item:
        assert self._open is None
        self._open = kind(self._events, len(self.items), **fields)
        self.items.append(self._open.item)
        return self._open

    def _begin_call(self, begin: ToolCallBegin) -> None:
        tool = self._tools.named(begin.name)
        if tool.typed is not None:
            self._begin(TypedCallItem, tool=tool.typed, call_id=begin.id)
            return
        named: Object = {"call_id": begin.id, "name": tool.name}
        if tool.namespace is not None:
            named["namespace"] = tool.namespace
        if tool.custom:
            self._begin(TextCallItem if tool.function.input else CustomCallItem, **named, input="")
        else:
            self._begin(FunctionCallItem, **named, arguments="")

    def _begin_builtin(self, namespace: str, name: str) -> None:
        if namespace == "python":  # it runs in no container that could be named
            self._begin(CodeItem, code="", outputs=[], container_id="oscine")
        elif namespace == "browser":
            begun: dict[str, Object] = {
                "open": {"type": "open_page", "url": None},
                "find": {"type": "find_in_page", "url": "", "pattern": ""},
            }
            self._begin(SearchItem, action=begun.get(name, _search("")))
        elif namespace == "file_search":
            self._begin(FileSearchItem, queries=[], results=None)
        else:
            self._begin(McpItem, server_label=namespace, name=name, arguments="", output=None, error=None)
