"""MCP tool servers: commands that the operator runs, and addresses that the operator or a request names.

Only this module imports the `mcp` package. The failure of a server is reported to the model as a text.
"""

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import anyio
import httpx2
import msgspec
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client
from mcp_types import (
    CONNECTION_CLOSED,
    CallToolResult,
    EmbeddedResource,
    ResourceLink,
    TextContent,
    TextResourceContents,
)
from mcp_types import Tool as ListedTool

from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.chat.tools import NAME, NAMESPACE, TRAINED
from oscine.system.yaml_text import parse_yaml
from oscine.tools.toolbox import McpCall, McpListing, Tool, ToolResult, bounded

T = TypeVar("T")

logger = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole addresses, whose queries may hold secrets

_LONGEST = 32_768  # characters of a result, for the model
_MOST_PAGES = 20  # of a list of tools
_FAREWELL_S = 5.0  # for a server to end
_HTTP_TIMEOUT = httpx2.Timeout(30.0, read=300.0)
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-zA-Z-]+")
_HEADER_VALUE = re.compile(r"(?:[!-~](?:[\t -~]*[!-~])?)?")
_TAKEN = {NAMESPACE, *TRAINED, "assistant", "user", "system", "developer", "tool", "all"}


class ServerEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a server is reached: a command, or an address."""

    command: str | None = None
    args: list[str] = []
    env: dict[str, str] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, str] = {}

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("needs either command or url")
        if self.url is not None and not _host(self.url):
            raise ValueError(f"url must begin with http:// or https:// and a host, not {self.url!r}")
        for name, value in self.headers.items():
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
                # Checked here, because the HTTP client would show the value, also to clients of a shared server.
                raise ValueError(f"the header {name!r} cannot be sent: its value must be ASCII, with nothing around it")

    @property
    def place(self) -> str:
        """For the log: without arguments, paths and queries, which may hold secrets."""
        return self.command or _host(self.url or "")


def _host(url: str) -> str:
    """Empty if the text is not an HTTP address."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        return ""
    return parsed.host if parsed.scheme in ("http", "https") else ""


def read_servers(path: str) -> dict[str, ServerEntry]:
    """By label. Raises ValueError that names the option, and the label."""
    try:
        content = parse_yaml(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"--mcp-servers {path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"--mcp-servers {path} is not YAML: {error}") from None
    if isinstance(content, dict) and [*content] == ["mcpServers"]:
        content = content["mcpServers"]
    if not isinstance(content, dict):
        raise ValueError(f"--mcp-servers {path} must be a mapping of labels to servers")
    servers: dict[str, ServerEntry] = {}
    for label, entry in content.items():
        try:
            servers[check_label(label)] = msgspec.convert(entry, ServerEntry)
        except (ValueError, msgspec.ValidationError) as error:
            raise ValueError(f"--mcp-servers {path}: {label}: {error}") from None
    return servers


def check_label(label: object) -> str:
    """Raises ValueError unless this can be a namespace."""
    if not isinstance(label, str) or not NAME.fullmatch(label):
        raise ValueError(f"the MCP server_label {label!r} is not 1 to 64 letters, digits, underscores or hyphens")
    if label in _TAKEN:
        raise ValueError(f"the MCP server_label {label!r} has a meaning of its own; choose another")
    return label


class AllowedTools(msgspec.Struct, frozen=True):
    """Which of a server's tools a conversation may use."""

    tool_names: frozenset[str] | None = None  # None: any
    read_only: bool | None = None  # whether only tools that declare themselves read-only

    def permits(self, tool: ListedTool) -> bool:
        harmless = tool.annotations is not None and tool.annotations.read_only_hint is True
        return (self.tool_names is None or tool.name in self.tool_names) and (harmless or not self.read_only)


class ServerError(Exception):
    """The failure of a server, in a sentence."""


class _Held:
    """A connection that a task of its own holds open, so that its failure does not cancel other tasks."""

    def __init__(self, entry: ServerEntry) -> None:
        self._entry = entry
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        # around all of it: the package cleans up if this scope cancels it, but not if asyncio does
        self._scope = anyio.CancelScope()
        self.task = asyncio.ensure_future(self._hold())

    async def close(self) -> None:
        self._closing.set()
        if not self.client.done():
            self._scope.cancel()
        if not (await asyncio.wait({self.task}, timeout=_FAREWELL_S))[0]:
            self._scope.cancel()

    async def _hold(self) -> None:
        failure: Exception = ServerError("it did not answer")
        try:
            with self._scope:
                async with AsyncExitStack() as stack:
                    self.client.set_result(await stack.enter_async_context(await self._open(stack)))
                    await self._closing.wait()
        except Exception as error:
            failure = error
            logger.info("the connection to an MCP server failed: %s: %s", self._entry.place, _reason(error))
        if not self.client.done():
            self.client.set_exception(failure)
            self.client.exception()  # perhaps no task waits for it any more

    async def _open(self, stack: AsyncExitStack) -> Client:
        entry = self._entry
        if entry.url is None:
            assert entry.command is not None
            return Client(StdioServerParameters(command=entry.command, args=entry.args, env=entry.env, cwd=entry.cwd))
        http = await stack.enter_async_context(httpx2.AsyncClient(headers=entry.headers, timeout=_HTTP_TIMEOUT))
        return Client(streamable_http_client(entry.url, http_client=http))


class Connection:
    """A connection to one server, opened when it is needed, and again when it is broken."""

    def __init__(self, entry: ServerEntry, timeout_s: float) -> None:
        self._entry = entry
        self.timeout_s = timeout_s  # for an answer; the first one waits for the connection too
        self._held: _Held | None = None

    async def list_tools(self) -> list[ListedTool]:
        """Raises ServerError."""
        held = self._held
        try:
            return await self._use(_all_tools)
        except ServerError:
            if held is None or held is self._held:
                raise
        return await self._use(_all_tools)  # it had broken since it was last used

    async def call(self, name: str, arguments: dict[str, Any]) -> CallToolResult:
        """Raises ServerError."""
        return await self._use(lambda client: client.call_tool(name, arguments))

    async def close(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            await held.close()

    async def _use(self, request: Callable[[Client], Awaitable[T]]) -> T:
        held = self._held = self._held or _Held(self._entry)
        try:
            async with asyncio.timeout(self.timeout_s):
                client = await asyncio.shield(held.client)
                return await request(client)
        except TimeoutError:
            if not held.client.done():
                await self._drop(held)
            raise ServerError(f"no answer within {self.timeout_s:g} seconds") from None
        except Exception as error:
            if not isinstance(error, MCPError) or error.code == CONNECTION_CLOSED or held.task.done():
                await self._drop(held)
            raise ServerError(_reason(error)) from None

    async def _drop(self, held: _Held) -> None:
        if self._held is held:
            await self.close()


async def _all_tools(client: Client) -> list[ListedTool]:
    tools: list[ListedTool] = []
    cursor = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        if (cursor := page.next_cursor) is None:
            break
    return tools


def _reason(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class McpTool(Tool):
    """One server's tools in one conversation."""

    def __init__(self, label: str, connection: Connection, allowed: AllowedTools, *, owned: bool) -> None:
        """`owned`: the connection is this conversation's alone, and ends with it."""
        self._label = label
        self._connection = connection
        self._allowed = allowed
        self._owned = owned
        self._names: dict[str, str] = {}  # as the model knows it -> as the server does
        self.namespace = ToolNamespace(label)
        self.listing = McpListing(label, ())

    async def __aenter__(self) -> Self:
        try:
            await self._list()
        except BaseException:  # the client left
            await self.__aexit__()
            raise
        return self

    async def _list(self) -> None:
        try:
            listed = [tool for tool in await self._connection.list_tools() if self._allowed.permits(tool)]
        except ServerError as error:
            self.listing = McpListing(self._label, (), f"The MCP server failed: {error}.")
            return
        functions = []
        for tool in listed:
            name = _NOT_IN_NAMES.sub("_", tool.name)[:64]
            if name not in self._names:
                self._names[name] = tool.name
                functions.append(FunctionTool(name, tool.description or "", tool.input_schema))
        self.namespace = ToolNamespace(self._label, "", tuple(functions))
        self.listing = McpListing(self._label, tuple(map(_described, listed)))

    async def __aexit__(self, *exc_info: object) -> None:
        if self._owned:
            await self._connection.close()

    async def call(self, recipient: str, content: str) -> ToolResult:
        called = recipient.partition(".")[2]
        name = self._names.get(called)
        missing = f"Error: there is no tool {recipient}"
        text, is_error = (missing, True) if name is None else await self._answer(name, content)
        output, error = (None, text) if is_error else (text, None)
        details = McpCall(self._label, name or called, content, output, error)
        return ToolResult(text or "[no output]", details, is_error)

    async def _answer(self, name: str, content: str) -> tuple[str, bool]:
        """What the tool says, and whether it is an error."""
        try:
            arguments = msgspec.json.decode(content.strip() or "{}", type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON object: {error}", True
        try:
            result = await self._connection.call(name, arguments)
        except ServerError as error:
            return f"Error: the MCP server failed: {error}", True
        return bounded(_text(result), _LONGEST), result.is_error


def _described(tool: ListedTool) -> dict[str, Any]:
    hints = tool.annotations and tool.annotations.model_dump(mode="json", by_alias=True, exclude_none=True)
    about = {"name": tool.name, "description": tool.description}
    return about | {"input_schema": tool.input_schema, "annotations": hints}


def _text(result: CallToolResult) -> str:
    parts: list[str] = []
    for block in result.content:
        match block:
            case TextContent():
                parts.append(block.text)
            case ResourceLink():
                parts.append(f"[{block.name}: {block.uri}]")
            case EmbeddedResource() if isinstance(block.resource, TextResourceContents):
                parts.append(block.resource.text)
            case _:
                parts.append(f"[{block.type} that cannot be shown as text]")
    if not parts and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(parts)


class Servers:
    """The MCP servers of the operator, whose connections all conversations share, and those that requests name."""

    def __init__(self, path: str | None, allow_urls: bool, timeout_s: float) -> None:
        entries = read_servers(path) if path is not None else {}
        self._shared = {label: Connection(entry, timeout_s) for label, entry in entries.items()}
        self._allow_urls = allow_urls
        self._timeout_s = timeout_s

    @property
    def labels(self) -> list[str]:
        """Of the operator's servers."""
        return [*self._shared]

    async def close(self) -> None:
        await asyncio.gather(*(connection.close() for connection in self._shared.values()))

    def tool(self, given: Mapping[str, Any]) -> McpTool:
        """The tool for a request's entry of type mcp. Raises ValueError."""
        try:
            wanted = msgspec.convert(given, _Wanted)
        except msgspec.ValidationError as error:
            raise ValueError(f"the tool of type 'mcp' is malformed: {error}") from None
        label, allowed = check_label(wanted.server_label), _allowed(wanted)
        if wanted.server_url is None:
            if label not in self._shared:
                raise ValueError(f"this server has no MCP server {label!r}; it has {', '.join(self._shared) or 'none'}")
            return McpTool(label, self._shared[label], allowed, owned=False)
        if not self._allow_urls:
            raise ValueError("server_url is not enabled on this server; --allow-mcp-urls enables it")
        headers = dict(wanted.headers or {})
        if wanted.authorization is not None:
            headers["Authorization"] = f"Bearer {wanted.authorization}"
        entry = ServerEntry(url=wanted.server_url, headers=headers)
        return McpTool(label, Connection(entry, self._timeout_s), allowed, owned=True)


class _Wanted(msgspec.Struct):
    """A tool of type mcp as requests have it."""

    server_label: str
    server_url: str | None = None
    headers: dict[str, str] | None = None
    authorization: str | None = None
    allowed_tools: frozenset[str] | AllowedTools | None = None
    require_approval: Any = None
    connector_id: str | None = None


def _allowed(wanted: _Wanted) -> AllowedTools:
    """Raises ValueError for a safeguard that the server would not keep."""
    if wanted.connector_id is not None:
        raise ValueError("connector_id is not supported; name the server by server_url")
    # OpenAI asks for approval by default; a server that the operator chose counts as approved.
    usual = "always" if wanted.server_url is not None else "never"
    if (wanted.require_approval or usual) != "never":
        raise ValueError("approvals are not supported; require_approval must be 'never'")
    named = wanted.allowed_tools
    return named if isinstance(named, AllowedTools) else AllowedTools(named)
