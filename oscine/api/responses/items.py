"""From what the parser reports to the output items of a response, and their events.

A state machine in which at most one item is open. The model writes most items; calls of built-in tools are items that
the server answers. Knows no tokens, not how a tool works, and not what becomes of a response.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from oscine.api.responses.events import ResponseEvents
from oscine.api.responses.tools import ClientTools
from oscine.api.responses.view import Object
from oscine.api.serving.logprobs import ContentLogprobs, TokenLogprob
from oscine.api.serving.turn import ToolAnswered, ToolBegins, Turn, TurnEvent
from oscine.chat.events import (
    BuiltinCallBegin,
    BuiltinCallDelta,
    ContentDelta,
    MessageEnd,
    ReasoningDelta,
    ToolCallBegin,
    ToolCallDelta,
)
from oscine.tools.toolbox import (
    CITATION_END,
    CITATION_LENGTH,
    CodeRun,
    McpCall,
    McpListing,
    Source,
    Toolbox,
    ToolResult,
    WebFind,
    WebOpen,
    WebSearch,
)

Status = Literal["completed", "incomplete", "failed"]

_CONTAINER = "oscine"  # Python runs in no container that could be named


def new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(24)}"


class Item:
    """It is announced when it is made, and complete once it has ended."""

    def __init__(self, events: ResponseEvents, index: int, item: Object) -> None:
        self.item = item
        self._events, self._index = events, index
        events.add_item("response.output_item.added", index, item)

    def emit(self, kind: str, **fields: Any) -> None:
        self._events.add(f"response.{kind}", item_id=self.item["id"], output_index=self._index, **fields)

    def end(self, status: Status) -> None:
        if "status" in self.item:
            self.item["status"] = status
        self._events.add_item("response.output_item.done", self._index, self.item)


class OpenItem(Item, ABC):
    """One that the model writes."""

    @abstractmethod
    def add(self, text: str) -> None: ...


class TextItem(OpenItem):
    """Reasoning: an item with one part of text."""

    kind = "reasoning_text"

    def __init__(self, events: ResponseEvents, index: int, item: Object) -> None:
        super().__init__(events, index, item)
        self.part: Object = self._empty_part()
        self._texts: list[str] = []
        self.emit("content_part.added", content_index=0, part=self.part)

    def _empty_part(self) -> Object:
        return {"type": self.kind, "text": ""}

    def add(self, text: str) -> None:
        self._texts.append(text)
        self.emit(f"{self.kind}.delta", content_index=0, delta=text)

    def end(self, status: Status) -> None:
        self.part["text"] = "".join(self._texts)
        self.item["content"] = [self.part]
        self._end_text()
        self.emit("content_part.done", content_index=0, part=self.part)
        super().end(status)

    def _end_text(self) -> None:
        self.emit(f"{self.kind}.done", content_index=0, text=self.part["text"])


class SummaryItem(TextItem):
    """Repeats reasoning as its summary, for clients that show summaries only."""

    def __init__(self, events: ResponseEvents, index: int, item: Object) -> None:
        super().__init__(events, index, item)
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


class MessageItem(TextItem):
    """What the user reads."""

    kind = "output_text"

    def __init__(
        self, events: ResponseEvents, index: int, item: Object, annotate: Callable[[str], Sequence[Object]]
    ) -> None:
        super().__init__(events, index, item)
        self._annotate = annotate
        self._length = 0  # of all texts

    def _empty_part(self) -> Object:
        return {"type": self.kind, "text": "", "annotations": [], "logprobs": []}

    def add_content(self, text: str, logprobs: Sequence[TokenLogprob]) -> None:
        self._texts.append(text)
        self._length += len(text)
        self.part["logprobs"] += logprobs
        self.emit("output_text.delta", content_index=0, delta=text, logprobs=logprobs)
        if CITATION_END in text:
            self._cite(len(text))

    def _cite(self, newest: int) -> None:
        """Sends the citations that end within this number of the newest characters."""
        tail = self._tail(newest + CITATION_LENGTH)
        before = self._length - len(tail)
        found = self.part["annotations"]
        for annotation in self._annotate(tail):
            if annotation["end_index"] > len(tail) - newest:
                place = {name: annotation[name] + before for name in ("start_index", "end_index")}
                found.append(annotation | place)
                index = len(found) - 1
                self.emit(
                    "output_text.annotation.added", content_index=0, annotation_index=index, annotation=found[index]
                )

    def _tail(self, length: int) -> str:
        """The end of the text, with at least this number of characters."""
        first, size = len(self._texts), 0
        while first and size < length:
            first -= 1
            size += len(self._texts[first])
        return "".join(self._texts[first:])

    def _end_text(self) -> None:
        text = self.part["text"]
        self.emit("output_text.done", content_index=0, text=text, logprobs=self.part["logprobs"])


class FunctionCallItem(OpenItem):
    def add(self, text: str) -> None:
        self.item["arguments"] += text
        self.emit("function_call_arguments.delta", delta=text)

    def end(self, status: Status) -> None:
        self.emit("function_call_arguments.done", name=self.item["name"], arguments=self.item["arguments"])
        super().end(status)


class CustomCallItem(OpenItem):
    """The model writes JSON, of which the client gets the text in it; so it comes in one piece."""

    def __init__(self, events: ResponseEvents, index: int, item: Object) -> None:
        super().__init__(events, index, item)
        self._arguments = ""

    def add(self, text: str) -> None:
        self._arguments += text

    def end(self, status: Status) -> None:
        self.item["input"] = custom_input(self._arguments)
        if self.item["input"]:
            self.emit("custom_tool_call_input.delta", delta=self.item["input"])
        self.emit("custom_tool_call_input.done", input=self.item["input"])
        super().end(status)


def custom_input(arguments: str) -> str:
    """The text for a custom tool: the field `input` of JSON, or all that the model wrote if it is no such JSON."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = value.get("input") if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


class OutputItems:
    """All items of a response, in order; those of built-in calls stay open until they are answered.

    A Choice of oscine.api.serving.generation.
    """

    def __init__(
        self,
        turn: Turn,
        events: ResponseEvents,
        tools: ClientTools,
        toolbox: Toolbox,
        logprobs: ContentLogprobs,
        *,
        summaries: bool,
    ) -> None:
        """`summaries`: whether reasoning items have a summary."""
        self.turn = turn
        self.items: list[Object] = []
        self.calls: dict[str, list[str]] = {}  # of built-in tools, by item; see ItemHistory.add
        self._open: OpenItem | None = None
        self._events, self._tools, self._toolbox, self._logprobs = events, tools, toolbox, logprobs
        self._reasoning_kind = SummaryItem if summaries else TextItem

    def encode(self, events: Sequence[TurnEvent]) -> bytes:
        self._take(events)
        return self._events.take()

    def _take(self, events: Iterable[TurnEvent]) -> None:
        for event in events:
            match event:
                case ReasoningDelta():
                    (self._open or self._begin(self._reasoning())).add(event.text)
                case ContentDelta():
                    message = self._open or self._begin(self._message(event.preamble))
                    assert isinstance(message, MessageItem)
                    message.add_content(event.text, self._logprobs.of(event))
                case ToolCallBegin():
                    self._begin(self._call(event))
                case BuiltinCallBegin():
                    self._begin(begin_builtin(event, self._events, len(self.items)))
                case ToolCallDelta():
                    assert self._open is not None
                    self._open.add(event.arguments)
                case BuiltinCallDelta():
                    assert self._open is not None
                    self._open.add(event.content)
                case MessageEnd() if event.cut or event.kind != "builtin_call":
                    self.end("incomplete" if event.cut else "completed")
                case ToolBegins():
                    self._builtin.said()
                case ToolAnswered():
                    self._answered(event)

    @property
    def _builtin(self) -> "BuiltinItem":
        assert isinstance(self._open, BuiltinItem)
        return self._open

    def _answered(self, event: ToolAnswered) -> None:
        item, self._open = self._builtin, None
        item.answered(event.result)
        call = event.call
        self.calls[item.item["id"]] = [call.recipient, call.content, call.channel, event.result.text]

    def end(self, status: Status) -> None:
        """Ends the item that is open, if there is one."""
        if self._open is not None:
            self._open.end(status)
            self._open = None

    def append(self, item: Item) -> None:
        """Adds an item that the model did not write, and that is complete."""
        assert self._open is None
        self.items.append(item.item)
        item.end("completed")

    @property
    def ended(self) -> list[Object]:
        return self.items if self._open is None else self.items[:-1]

    def _begin(self, item: OpenItem) -> OpenItem:
        assert self._open is None
        self._open = item
        self.items.append(item.item)
        return item

    def _reasoning(self) -> OpenItem:
        item = {"id": new_id("rs"), "type": "reasoning", "status": "in_progress", "summary": [], "content": []}
        return self._reasoning_kind(self._events, len(self.items), item)

    def _message(self, preamble: bool) -> OpenItem:
        item = {"id": new_id("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        phase = "commentary" if preamble else "final_answer"
        return MessageItem(self._events, len(self.items), {**item, "phase": phase}, self._annotations)

    def _annotations(self, text: str) -> list[Object]:
        return [
            {
                "type": "url_citation",
                "start_index": citation.start,
                "end_index": citation.end,
                "url": citation.source.url,
                "title": citation.source.title,
            }
            for citation in self._toolbox.citations(text)
        ]

    def _call(self, begin: ToolCallBegin) -> OpenItem:
        tool = self._tools.named(begin.name)
        named: Object = {"status": "in_progress", "call_id": begin.id, "name": tool.name}
        if tool.namespace is not None:
            named["namespace"] = tool.namespace
        if tool.custom:
            item = {"id": new_id("ctc"), "type": "custom_tool_call", **named, "input": ""}
            return CustomCallItem(self._events, len(self.items), item)
        item = {"id": new_id("fc"), "type": "function_call", **named, "arguments": ""}
        return FunctionCallItem(self._events, len(self.items), item)


class BuiltinItem(OpenItem):
    """A call from its first token to its result. `content` is what the model wrote."""

    kind = ""

    def __init__(self, events: ResponseEvents, index: int, item: Object) -> None:
        super().__init__(events, index, {**item, "status": "in_progress"})
        self.content = ""
        self.result = ""  # as the model got it
        self._told = False
        self.emit(f"{self.kind}.in_progress")

    def add(self, text: str) -> None:
        self.content += text

    def said(self) -> None:
        """The call is complete, and the tool begins."""
        self._tell()

    def _tell(self) -> None:
        """Sends the complete text that the model wrote."""
        self._told = True

    def end(self, status: Status) -> None:
        if not self._told:  # the token budget cut the call
            self._tell()
        super().end(status)

    def answered(self, result: ToolResult) -> None:
        """Ends the item."""
        self.result = result.text
        status = self._show(result)
        if status == "completed":
            self.emit(f"{self.kind}.completed")
        self.end(status)

    @abstractmethod
    def _show(self, result: ToolResult) -> Status:
        """Puts what came of the call into the item."""


class CodeItem(BuiltinItem):
    kind = "code_interpreter_call"

    def add(self, text: str) -> None:
        super().add(text)
        self.emit("code_interpreter_call_code.delta", delta=text)

    def said(self) -> None:
        super().said()
        self.emit("code_interpreter_call.interpreting")

    def _tell(self) -> None:
        super()._tell()
        self.item["code"] = self.content
        self.emit("code_interpreter_call_code.done", code=self.content)

    def _show(self, result: ToolResult) -> Status:
        if not isinstance(result.details, CodeRun):
            return "failed"
        self.item["outputs"] = [{"type": "logs", "logs": result.details.logs}]
        return "completed"


class SearchItem(BuiltinItem):
    kind = "web_search_call"

    def said(self) -> None:
        super().said()
        self.emit("web_search_call.searching")

    def _show(self, result: ToolResult) -> Status:
        match result.details:
            case WebSearch(query, sources):
                self.item["action"] = _search(query, sources)
            case WebOpen(url):
                self.item["action"] = {"type": "open_page", "url": url}
            case WebFind(url, pattern):
                self.item["action"] = {"type": "find_in_page", "url": url or "", "pattern": pattern}
            case _:
                return "failed"
        return "completed"


class McpItem(BuiltinItem):
    kind = "mcp_call"

    def add(self, text: str) -> None:
        super().add(text)
        self.emit("mcp_call_arguments.delta", delta=text)

    def _tell(self) -> None:
        super()._tell()
        self.item["arguments"] = self.content
        self.emit("mcp_call_arguments.done", arguments=self.content)

    def _show(self, result: ToolResult) -> Status:
        details = result.details
        error = details.error if isinstance(details, McpCall) else result.text
        if error is None:
            assert isinstance(details, McpCall)
            self.item["output"] = details.output
            return "completed"
        self.item["error"] = {"type": "mcp_tool_execution_error", "content": [{"type": "text", "text": error}]}
        self.emit("mcp_call.failed")
        return "failed"


def _search(query: str, sources: tuple[Source, ...] = ()) -> Object:
    found = [{"type": "url", "url": source.url} for source in sources]
    return {"type": "search", "query": query, "queries": [query], "sources": found}


def begin_builtin(begin: BuiltinCallBegin, events: ResponseEvents, index: int) -> OpenItem:
    """The item of a call that the model begins to write."""
    namespace, _, name = begin.recipient.partition(".")
    if namespace == "python":
        item = {"id": new_id("ci"), "type": "code_interpreter_call", "code": "", "outputs": []}
        return CodeItem(events, index, {**item, "container_id": _CONTAINER})
    if namespace == "browser":
        action: Object = {"open": {"type": "open_page", "url": None}}.get(name, _search(""))
        if name == "find":
            action = {"type": "find_in_page", "url": "", "pattern": ""}
        return SearchItem(events, index, {"id": new_id("ws"), "type": "web_search_call", "action": action})
    item = {"id": new_id("mcp"), "type": "mcp_call", "server_label": namespace, "name": name, "arguments": ""}
    return McpItem(events, index, {**item, "output": None, "error": None})


class ListingItem(Item):
    """What an MCP server offers."""

    def __init__(self, events: ResponseEvents, index: int, listing: McpListing) -> None:
        item: Object = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": listing.server_label}
        super().__init__(events, index, {**item, "tools": [], "error": None})
        self.emit("mcp_list_tools.in_progress")
        self.item.update(tools=list(listing.tools), error=listing.error)
        self.emit("mcp_list_tools.failed" if listing.error else "mcp_list_tools.completed")
