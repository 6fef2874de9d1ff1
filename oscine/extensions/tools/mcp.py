"""MCP tool servers: commands that the operator runs, and addresses that the operator or a request names.

Both kinds are read with the same bounds. The failure of a server is reported to the model as a text.
"""

import asyncio
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from oscine.chat.messages import FunctionTool, ToolNamespace
from oscine.chat.toolbox import McpCall, McpListing, Tool, ToolResult, bounded
from oscine.chat.tools import NAME, NAMESPACE, TRAINED
from oscine.extensions.tools.mcp_session import Block, CallResult, Connection, ListedTool, OfferedTool, ServerEntry
from oscine.extensions.tools.mcp_wire import ServerError
from oscine.system.json_text import decode_json
from oscine.system.model_files import shown
from oscine.system.yaml_text import parse_yaml

_LONGEST = 32_768  # characters of a result, for the model
_LONGEST_NAME = 64
_WHOLE = 1 << 18  # bytes of structured content that are decoded, of which the model gets at most _LONGEST
_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")
_TAKEN = {NAMESPACE, *TRAINED, "assistant", "user", "system", "developer", "tool", "all"}


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
        if self.tool_names is not None and tool.name not in self.tool_names:
            return False
        return not self.read_only or (tool.annotations is not None and tool.annotations.read_only_hint is True)


class McpTool(Tool):
    """One server's tools in one conversation."""

    def __init__(self, label: str, connection: Connection, allowed: AllowedTools, *, owned: bool) -> None:
        """`owned`: the connection is this conversation's alone, and ends with it."""
        self._label = label
        self._connection = connection
        self._allowed = allowed
        self._owned = owned
        self._tools: dict[str, OfferedTool] = {}  # by the name that the model knows
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
            listed = await self._connection.list_tools(self._allowed.permits, self.room)
        except ServerError as error:
            self.listing = McpListing(self._label, (), f"The MCP server failed: {error}.")
            return
        self.size = sum(tool.size for tool in listed)
        self._tools = named(listed)
        functions = (
            FunctionTool(name, tool.description or "", tool.input_schema) for name, tool in self._tools.items()
        )
        self.namespace = ToolNamespace(self._label, "", tuple(functions))
        self.listing = McpListing(self._label, tuple(map(_described, listed)))

    async def __aexit__(self, *exc_info: object) -> None:
        if self._owned:
            await self._connection.close()

    async def call(self, recipient: str, content: str) -> ToolResult:
        called = recipient.partition(".")[2]
        tool = self._tools.get(called)
        missing = f"Error: there is no tool {recipient}"
        text, is_error = (missing, True) if tool is None else await self._answer(tool, content)
        output, error = (None, text) if is_error else (text, None)
        details = McpCall(self._label, called if tool is None else tool.name, content, output, error)
        return ToolResult(text or "[no output]", details, is_error)

    async def _answer(self, tool: OfferedTool, content: str) -> tuple[str, bool]:
        """What the tool says, and whether it is an error."""
        try:
            arguments = decode_json(content.strip() or "{}", dict[str, Any])
        except (ValueError, RecursionError) as error:
            return f"Error: the arguments are no JSON object: {error}", True
        try:
            result = await self._connection.call(tool, arguments)
        except ServerError as error:
            return f"Error: the MCP server failed: {error}", True
        return bounded(_text(result), _LONGEST), result.is_error is True


def named(tools: Iterable[OfferedTool]) -> dict[str, OfferedTool]:
    """By names that the model can say, which differ. A tool that a server lists again is left out."""
    found: dict[str, OfferedTool] = {}
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            continue
        seen.add(tool.name)
        clean = _NOT_IN_NAMES.sub("_", tool.name) or "_"
        ends = ("" if i == 1 else f"_{i}" for i in itertools.count(1))
        names = (clean[: _LONGEST_NAME - len(end)] + end for end in ends)
        found[next(name for name in names if name not in found)] = tool
    return found


def _described(tool: OfferedTool) -> dict[str, Any]:
    hints = tool.annotations and msgspec.to_builtins(tool.annotations)
    about = {"name": tool.name, "description": tool.description}
    return about | {"input_schema": tool.input_schema, "annotations": hints}


def _text(result: CallResult) -> str:
    structured = bytes(result.structured_content)
    if not result.content and structured not in (b"", b"null"):
        return _json_text(structured)
    return "\n".join(map(_said, result.content))


def _said(block: Block) -> str:
    if block.type == "text":
        return block.text or ""
    if block.type == "resource_link":
        return f"[{block.name or 'link'}: {block.uri or 'no address'}]"
    if block.type == "resource" and block.resource is not None and block.resource.text is not None:
        return block.resource.text
    found = block.resource or block
    facts = shown(", ".join(filter(None, (found.uri, found.mime_type))))
    return f"[{shown(block.type)}: {facts or 'of an unknown kind'}; not shown, as this model reads text only]"


def _json_text(raw: bytes) -> str:
    """The JSON with plain characters instead of escapes. A text that is cut anyway stays as the server wrote it."""
    if len(raw) > _WHOLE:
        return raw.decode(errors="replace")
    try:
        return json.dumps(decode_json(raw, object), ensure_ascii=False)
    except (ValueError, RecursionError) as error:
        return f"[structured content that cannot be read: {error}]"


class Servers:
    """The MCP servers of the operator, whose connections all conversations share, and those that requests name."""

    def __init__(self, path: str | None, allow_urls: bool, timeout_s: float) -> None:
        entries = read_servers(path) if path is not None else {}
        self._turn = asyncio.Lock()
        self._shared = {label: Connection(entry, timeout_s, self._turn) for label, entry in entries.items()}
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
        return McpTool(label, Connection(entry, self._timeout_s, self._turn), allowed, owned=True)


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
