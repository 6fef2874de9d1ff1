"""Sessions with MCP servers: versions are negotiated, tools listed and called. A broken session is replaced.

Versions from 2024 to 2025 begin with `initialize`. The version of 2026 is stateless: each request is complete.
"""

import asyncio
import base64
import contextlib
import itertools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import httpx2
import msgspec

from oscine.extensions.tools.mcp_wire import BrokenError, HttpWire, PipeWire, ServerError, Wire
from oscine.system.json_text import decode_json

T = TypeVar("T")

logger = logging.getLogger(__name__)
logging.getLogger("httpx2").setLevel(logging.WARNING)  # it logs whole addresses, whose queries may hold secrets

_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")  # by `initialize`, the newest last
_STATELESS = "2026-07-28"
_CLIENT = {"name": "oscine", "version": "1"}
_PROBE_S = 10.0  # for a server to say whether it knows the stateless version
_ABANDON_S = 2.0  # for word of a call that is given up
_MAX_PAGES = 100  # of a list of tools
_MAX_LISTED_BYTES = 16 << 20  # of all pages
MAX_TOOLS = 1024  # of those that a conversation may use
_BETWEEN = 1024  # tools that are looked at without a pause
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9a-zA-Z-]+")
_HEADER_VALUE = re.compile(r"(?:[!-~](?:[ -~]*[!-~])?)?")


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
            if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value.replace("\t", " ")):
                # Checked here, because the HTTP client would show the value, also to clients of a shared server.
                raise ValueError(f"the header {name!r} cannot be sent: its value must be ASCII, with nothing around it")

    @property
    def place(self) -> str:
        """For the log: without arguments, paths and queries, which may hold secrets."""
        return self.command or _host(self.url or "")

    async def connect(self) -> Wire:
        """Raises OSError."""
        if self.url is not None:
            return HttpWire(self.url, self.headers)
        assert self.command is not None
        return await PipeWire.open(self.command, self.args, self.env, self.cwd)


def _host(url: str) -> str:
    """Empty if the text is not an HTTP address."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL:
        return ""
    return parsed.host if parsed.scheme in ("http", "https") else ""


# ---- what is read of results: other fields are skipped without being decoded ----


class Hints(msgspec.Struct, omit_defaults=True, rename="camel", gc=False):
    title: str | None = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None


class ListedTool(msgspec.Struct, rename="camel", gc=False):
    name: str
    input_schema: msgspec.Raw
    description: str | None = None
    annotations: Hints | None = None

    @property
    def size(self) -> int:
        """Bytes, about, of what is declared."""
        return len(self.name) + len(self.description or "") + len(self.input_schema)


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool that a conversation may use."""

    name: str
    description: str | None
    input_schema: dict[str, Any]
    annotations: Hints | None
    size: int  # bytes, about


class Resource(msgspec.Struct, rename="camel", gc=False):
    text: str | None = None
    uri: str | None = None
    mime_type: str | None = None


class Block(msgspec.Struct, rename="camel", gc=False):
    """A part of a result. Some servers write null for what a part lacks. Data of images and sounds is not decoded."""

    type: str
    text: str | None = None
    name: str | None = None
    uri: str | None = None
    mime_type: str | None = None
    resource: Resource | None = None


class CallResult(msgspec.Struct, rename="camel"):
    content: list[Block] = []
    structured_content: msgspec.Raw = msgspec.Raw()
    is_error: bool | None = None
    result_type: str = "complete"


class _Page(msgspec.Struct, rename="camel"):
    tools: list[ListedTool]
    next_cursor: str | None = None


class _Versions(msgspec.Struct, rename="camel"):
    protocol_version: str = ""
    supported_versions: list[str] = []


def _decode(raw: msgspec.Raw, kind: type[T]) -> T:
    try:
        return decode_json(bytes(raw), kind)
    except (ValueError, RecursionError) as error:
        raise ServerError(f"its answer is malformed: {error}") from None


# ---- sessions ----


class Session:
    """A wire on which requests of one version can be sent."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._version = _STATELESS
        self._ids = itertools.count(1)
        self._abandoned: set[asyncio.Task[None]] = set()  # says so to the server
        self.users = 0  # requests in progress
        self.retired = False  # to be closed after the last of them

    async def negotiate(self, patience_s: float) -> None:
        """Raises ServerError, OSError or HTTPError."""
        try:
            async with asyncio.timeout(min(_PROBE_S, patience_s / 2)):
                known = _decode(await self.request("server/discover", {}), _Versions)
            if _STATELESS in known.supported_versions:
                return
        except BrokenError:
            raise
        except (ServerError, TimeoutError):  # an older server
            pass
        self._version = ""  # not yet known
        wanted = {"protocolVersion": _VERSIONS[-1], "capabilities": {}, "clientInfo": _CLIENT}
        chosen = _decode(await self.request("initialize", wanted), _Versions).protocol_version
        if chosen not in _VERSIONS:
            raise ServerError(f"it speaks the version {chosen!r} of the protocol, which is not supported")
        self._version = chosen
        await self._wire.tell({"method": "notifications/initialized"}, self._headers("notifications/initialized"))

    async def request(
        self, method: str, params: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> msgspec.Raw:
        """The result. `headers`: for HTTP. Raises ServerError, OSError or HTTPError."""
        if self._version == _STATELESS:
            about = {"protocolVersion": _STATELESS, "clientInfo": _CLIENT, "clientCapabilities": {}}
            meta = {f"io.modelcontextprotocol/{name}": value for name, value in about.items()}
            params = {**params, "_meta": meta}
        message = {"id": next(self._ids), "method": method, "params": params}
        try:
            return await self._wire.ask(message, self._headers(method) | dict(headers or {}))
        except asyncio.CancelledError:
            if self._version and method == "tools/call":
                task = asyncio.ensure_future(self._abandon(message["id"]))
                self._abandoned.add(task)
                task.add_done_callback(self._abandoned.discard)
            raise

    async def _abandon(self, request_id: object) -> None:
        method = "notifications/cancelled"
        with contextlib.suppress(Exception):  # a broken wire is found by the next request
            async with asyncio.timeout(_ABANDON_S):
                await self._wire.tell({"method": method, "params": {"requestId": request_id}}, self._headers(method))

    def _headers(self, method: str) -> dict[str, str]:
        if self._version == _STATELESS:
            return {"Mcp-Protocol-Version": _STATELESS, "Mcp-Method": method}
        return {"Mcp-Protocol-Version": self._version} if self._version else {}

    @property
    def ended(self) -> bool:
        return self._wire.ended

    async def tools(self, permits: Callable[[ListedTool], bool], room: int, turn: asyncio.Lock) -> list[OfferedTool]:
        """The tools that are permitted. Raises ServerError if they take more than `room` bytes, and as `request`.

        A page may become a hundred thousand objects. `turn` is held meanwhile, so that few pages are at a time.
        """
        found: list[OfferedTool] = []
        read, cursor = 0, None
        for _ in range(_MAX_PAGES):
            raw = await self.request("tools/list", {} if cursor is None else {"cursor": cursor})
            read += len(raw)
            if read > _MAX_LISTED_BYTES:
                raise ServerError(f"its list of tools is longer than {_MAX_LISTED_BYTES >> 20} MiB")
            async with turn:
                page = _decode(raw, _Page)
                for i, tool in enumerate(page.tools):
                    if i % _BETWEEN == 0:
                        await asyncio.sleep(0)
                    if permits(tool):
                        room -= tool.size
                        if len(found) == MAX_TOOLS or room < 0:
                            raise ServerError("its tools take too much room; choose some with 'allowed_tools'")
                        found.append(_offered(tool))
                        await asyncio.sleep(0)
            cursor = page.next_cursor
            del page
            if cursor is None:
                return found
        raise ServerError(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call(self, tool: OfferedTool, arguments: dict[str, Any]) -> CallResult:
        """Raises as `request`."""
        headers = {}
        if self._version == _STATELESS:
            headers = {"Mcp-Name": _header(tool.name)} | _mirrored(tool.input_schema, arguments)
        result = _decode(
            await self.request("tools/call", {"name": tool.name, "arguments": arguments}, headers), CallResult
        )
        if result.result_type != "complete":
            raise ServerError(f"its answer of type {result.result_type!r} is not supported")
        return result

    async def close(self) -> None:
        if self._abandoned:
            await asyncio.wait(self._abandoned)
        await self._wire.close()


def _offered(tool: ListedTool) -> OfferedTool:
    schema = _decode(tool.input_schema, dict[str, Any])
    return OfferedTool(tool.name, tool.description, schema, tool.annotations, tool.size)


def _header(value: str) -> str:
    """As a header's value, in the protocol's form where it cannot stand as it is."""
    if _HEADER_VALUE.fullmatch(value) and not value.startswith("=?base64?"):
        return value
    return f"=?base64?{base64.b64encode(value.encode()).decode()}?="


def _mirrored(schema: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, str]:
    """Headers that repeat arguments, which the schema marks by `x-mcp-header`."""
    found: dict[str, str] = {}
    properties = schema.get("properties")
    for name, about in properties.items() if isinstance(properties, dict) else ():
        value = arguments.get(name)
        if not isinstance(about, dict) or value is None:
            continue
        token = about.get("x-mcp-header")
        if isinstance(value, dict):
            found |= _mirrored(about, value)
        elif isinstance(token, str) and _HEADER_NAME.fullmatch(token) and isinstance(value, str | int | float):
            said = str(value).lower() if isinstance(value, bool) else str(value)
            found[f"Mcp-Param-{token}"] = _header(said)
    return found


class Connection:
    """A session with one server, opened when it is needed, and again when it is broken."""

    def __init__(self, entry: ServerEntry, timeout_s: float, turn: asyncio.Lock | None = None) -> None:
        """`turn`: of all connections that share it, one at a time goes through a list of tools."""
        self._entry = entry
        self._turn = turn or asyncio.Lock()
        self.timeout_s = timeout_s  # for an answer; the first one waits for the session too
        self._opening: asyncio.Task[Session] | None = None
        self._closing: set[asyncio.Task[Any]] = set()

    async def list_tools(self, permits: Callable[[ListedTool], bool], room: int) -> list[OfferedTool]:
        """The permitted tools, which take at most `room` bytes. Raises ServerError."""
        deadline_s = self._deadline_s()
        before = self._opening
        try:
            return await self._list(permits, room, deadline_s)
        except ServerError:
            if before is None or before is self._opening:
                raise
        return await self._list(permits, room, deadline_s)  # it had broken since it was last used

    async def _list(self, permits: Callable[[ListedTool], bool], room: int, deadline_s: float) -> list[OfferedTool]:
        return await self._use(lambda session: session.tools(permits, room, self._turn), deadline_s)

    async def call(self, tool: OfferedTool, arguments: dict[str, Any]) -> CallResult:
        """Raises ServerError."""
        return await self._use(lambda session: session.call(tool, arguments), self._deadline_s())

    async def close(self) -> None:
        if (opening := self._opening) is not None:
            self._retire(opening)
            opening.cancel()
            await asyncio.wait((opening,))
        while self._closing:
            await asyncio.wait(self._closing)

    def _deadline_s(self) -> float:
        return asyncio.get_running_loop().time() + self.timeout_s

    def _session(self) -> "asyncio.Task[Session]":
        """The one in use, or a new one if that has failed or ended."""
        opening = self._opening
        if opening is not None and opening.done() and (not _succeeded(opening) or opening.result().ended):
            self._retire(opening)
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
        return self._opening

    async def _use(self, request: Callable[[Session], Awaitable[T]], deadline_s: float) -> T:
        opening = self._session()
        try:
            async with asyncio.timeout_at(deadline_s):
                session = await asyncio.shield(opening)
                return await self._ask(session, request)
        except TimeoutError:
            raise ServerError(f"no answer within {self.timeout_s:g} seconds") from None
        except Exception as error:
            if isinstance(error, BrokenError) or not isinstance(error, ServerError):
                self._retire(opening)
            raise ServerError(str(error) or type(error).__name__) from None

    async def _ask(self, session: Session, request: Callable[[Session], Awaitable[T]]) -> T:
        session.users += 1
        try:
            return await request(session)
        finally:
            session.users -= 1
            if session.retired and not session.users:
                self._later(session)

    async def _open(self) -> Session:
        try:
            async with asyncio.timeout(self.timeout_s):
                session = Session(await self._entry.connect())
                try:
                    await session.negotiate(self.timeout_s)
                except BaseException:
                    self._later(session)
                    raise
        except Exception as error:
            reason = f"no answer within {self.timeout_s:g} seconds" if isinstance(error, TimeoutError) else str(error)
            failure = ServerError(reason or type(error).__name__)
            logger.info("the connection to an MCP server failed: %s: %s", self._entry.place, failure)
            raise failure from None
        return session

    def _retire(self, opening: "asyncio.Task[Session]") -> None:
        """The next request opens another session. This one is closed after its last request."""
        if self._opening is not opening:
            return
        if opening.done() and _succeeded(opening):
            session = opening.result()
            session.retired = True
            if not session.users:
                self._later(session)
        self._opening = None

    def _later(self, session: Session) -> None:
        """Closes it, and lets no request wait for that."""
        task = asyncio.ensure_future(session.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


def _succeeded(opening: "asyncio.Task[Session]") -> bool:
    return not opening.cancelled() and opening.exception() is None
