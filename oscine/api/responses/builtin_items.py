"""The output items of calls that the server itself answers: Python, the browser, MCP servers.

Knows what clients are told of a call and its result; not how a tool works.
"""

from abc import abstractmethod

from oscine.api.responses.events import ResponseEvents
from oscine.api.responses.items import Item, Object, OpenItem, Status, new_id
from oscine.chat.events import BuiltinCallBegin
from oscine.tools.toolbox import CodeRun, McpCall, McpListing, Source, ToolResult, WebFind, WebOpen, WebSearch

_CONTAINER = "oscine"  # Python runs in no container that could be named


class BuiltinItem(OpenItem):
    """A call from its first token to its result. `content` is what the model wrote."""

    kind = ""

    def __init__(self, events: ResponseEvents, index: int, item: Object, begin: BuiltinCallBegin) -> None:
        super().__init__(events, index, {**item, "status": "in_progress"})
        self.begin = begin
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
        return CodeItem(events, index, {**item, "container_id": _CONTAINER}, begin)
    if namespace == "browser":
        action: Object = {"open": {"type": "open_page", "url": None}}.get(name, _search(""))
        if name == "find":
            action = {"type": "find_in_page", "url": "", "pattern": ""}
        return SearchItem(events, index, {"id": new_id("ws"), "type": "web_search_call", "action": action}, begin)
    item = {"id": new_id("mcp"), "type": "mcp_call", "server_label": namespace, "name": name, "arguments": ""}
    return McpItem(events, index, {**item, "output": None, "error": None}, begin)


class ListingItem(Item):
    """What an MCP server offers."""

    def __init__(self, events: ResponseEvents, index: int, listing: McpListing) -> None:
        item: Object = {"id": new_id("mcpl"), "type": "mcp_list_tools", "server_label": listing.server_label}
        super().__init__(events, index, {**item, "tools": [], "error": None})
        self.emit("mcp_list_tools.in_progress")
        self.item.update(tools=list(listing.tools), error=listing.error)
        self.emit("mcp_list_tools.failed" if listing.error else "mcp_list_tools.completed")
