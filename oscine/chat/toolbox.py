"""The contract of tools that the server itself answers, and the tools of one conversation."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from oscine.chat.messages import ToolNamespace

logger = logging.getLogger(__name__)


CITATION_END = "】"  # last character of every citation
CITATION_LENGTH = 256  # characters of the longest citation
MAX_DECLARED_BYTES = 256 << 10  # of the tools of all servers in one conversation: about half of a context


@dataclass(frozen=True, slots=True)
class Source:
    url: str
    title: str


class FileSource(NamedTuple):
    file_id: str
    filename: str


@dataclass(frozen=True, slots=True)
class Citation:
    """A place in an answer that cites a source. `start` and `end` are characters of the answer."""

    start: int
    end: int
    source: Source | FileSource


@dataclass(frozen=True, slots=True)
class CodeRun:
    code: str
    logs: str


@dataclass(frozen=True, slots=True)
class WebSearch:
    query: str
    sources: tuple[Source, ...] = ()


@dataclass(frozen=True, slots=True)
class WebOpen:
    url: str | None  # None: there was no such page


@dataclass(frozen=True, slots=True)
class WebFind:
    url: str | None  # None: there was no such page
    pattern: str


@dataclass(frozen=True, slots=True)
class McpCall:
    server_label: str
    name: str
    arguments: str  # JSON text, exactly as the model wrote it
    output: str | None  # None: it failed
    error: str | None = None


@dataclass(frozen=True, slots=True)
class FoundText:
    file_id: str
    filename: str
    score: float  # 0 to 1
    attributes: dict[str, str | int | float | bool]
    text: str


@dataclass(frozen=True, slots=True)
class FileSearch:
    queries: tuple[str, ...]
    results: tuple[FoundText, ...] | None  # None: it failed


Details = CodeRun | WebSearch | WebOpen | WebFind | McpCall | FileSearch


@dataclass(frozen=True, slots=True)
class ToolResult:
    text: str  # for the model
    details: Details | None  # for the client; None for a call that no tool took
    is_error: bool = False


@dataclass(frozen=True, slots=True)
class McpListing:
    """What an MCP server offers in this conversation."""

    server_label: str
    tools: tuple[dict[str, Any], ...]  # name, description, input_schema, annotations
    error: str | None = None


class Tool:
    """One namespace in one conversation. It is entered before it is declared, and exited when the response is
    complete."""

    namespace: ToolNamespace
    listing: McpListing | None = None
    room = MAX_DECLARED_BYTES  # of declarations, which this tool must not exceed; set before it is entered
    size = 0  # bytes of its declarations, about; known once it is entered

    async def call(self, recipient: str, content: str) -> ToolResult:
        """Runs one call of the model. A failure is a text for the model, not an exception."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        return

    def citations(self, text: str) -> Iterable[Citation]:
        """The places in an answer that cite a result of this tool."""
        return ()

    def state(self) -> Any:
        """For this tool in the conversation's next request; None: it needs none."""
        return None


class Toolbox:
    """The tools of one conversation, for one response: at most `max_calls` calls."""

    def __init__(self, tools: Sequence[Tool], max_calls: int) -> None:
        self._tools = {tool.namespace.name: tool for tool in tools}
        self._left = max_calls
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            for tool in self._tools.values():
                tool.room = MAX_DECLARED_BYTES - self.size
                await stack.enter_async_context(tool)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._stack.aclose()

    @property
    def size(self) -> int:
        """Bytes, about, of what the tools declare; known once the toolbox is entered."""
        return sum(tool.size for tool in self._tools.values())

    @property
    def names(self) -> frozenset[str]:
        """For HarmonyParser."""
        return frozenset(self._tools)

    @property
    def namespaces(self) -> tuple[ToolNamespace, ...]:
        """For Conversation; known once the toolbox is entered. A server that offers nothing is not declared."""
        found = (tool.namespace for tool in self._tools.values())
        return tuple(namespace for namespace in found if namespace.description or namespace.functions)

    @property
    def recipients(self) -> tuple[str, ...]:
        """The tools of all namespaces as they are named after `to=`; known once the toolbox is entered."""
        found: list[str] = []
        for space in self.namespaces:
            found += [f"{space.name}.{function.name}" for function in space.functions] or [space.name]
        return tuple(found)

    @property
    def listings(self) -> tuple[McpListing, ...]:
        return tuple(tool.listing for tool in self._tools.values() if tool.listing is not None)

    @property
    def exhausted(self) -> bool:
        """Whether further calls are refused, so that the model should be made to answer."""
        return self._left <= 0

    async def call(self, recipient: str, content: str) -> ToolResult:
        """Never raises, except to cancel."""
        tool = self._tools.get(recipient.partition(".")[0])
        if tool is None:
            return ToolResult(f"Error: there is no tool {recipient}.", None, is_error=True)
        if self.exhausted:
            return ToolResult("Error: no more calls are allowed. Answer with what you know.", None, is_error=True)
        self._left -= 1
        try:
            return await tool.call(recipient, content)
        except Exception:
            logger.exception("the tool %s failed", recipient)
            return ToolResult("Error: the tool failed.", None, is_error=True)

    def citations(self, text: str) -> list[Citation]:
        """The places in an answer that cite a result of the tools, in order."""
        found = (citation for tool in self._tools.values() for citation in tool.citations(text))
        return sorted(found, key=lambda citation: citation.start)

    def state(self) -> dict[str, Any]:
        """JSON values from which ServerTools.toolbox continues this toolbox."""
        states = {name: tool.state() for name, tool in self._tools.items()}
        return {name: state for name, state in states.items() if state is not None}


def bounded(text: str, limit: int) -> str:
    """Both ends of a text that is longer than `limit` characters, the cut marked."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"
