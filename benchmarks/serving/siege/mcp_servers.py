"""MCP servers over HTTP that answer too much, too slowly, or without end."""

import asyncio
import contextlib
import json
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from typing import Any

Answer = Callable[[dict[str, Any]], AsyncIterator[bytes]]  # from a message to a response, in pieces
_HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: "
JSON, EVENTS = _HEAD + b"application/json\r\n", _HEAD + b"text/event-stream\r\n\r\n"
DRIP_S = 0.05


def tool(name: str, properties: int = 1) -> dict[str, Any]:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(properties)}}
    return {"name": name, "description": "A tool.", "inputSchema": schema}


def result(message: dict[str, Any], value: Any) -> bytes:
    return _result(message, json.dumps(value).encode())


def _result(message: dict[str, Any], value: bytes) -> bytes:
    return b'{"jsonrpc": "2.0", "id": %s, "result": %s}' % (json.dumps(message["id"]).encode(), value)


def text(value: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": value}]}


async def ordinary(message: dict[str, Any]) -> AsyncIterator[bytes]:
    """A server of the year 2025 with one tool, which answers at once."""
    method = message.get("method")
    if method == "server/discover":
        yield b"HTTP/1.1 404 Not Found\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
        return
    values = {
        "initialize": {
            "protocolVersion": "2025-11-25",
            "capabilities": {},
            "serverInfo": {"name": "s", "version": "1"},
        },
        "tools/list": {"tools": [tool("take")]},
        "tools/call": text("taken"),
    }
    yield JSON + b"\r\n" + (result(message, values[method]) if method in values else b"")


def _instead(method: str) -> Callable[[Answer], Answer]:
    """An ordinary server, but for one method."""

    def make(hostile: Answer) -> Answer:
        return lambda message: (hostile if message.get("method") == method else ordinary)(message)

    return make


listing, calling = _instead("tools/list"), _instead("tools/call")


async def _endlessly(head: bytes, piece: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    yield head
    while True:
        yield piece
        await asyncio.sleep(pause_s)


async def gzip_bomb(message: dict[str, Any]) -> AsyncIterator[bytes]:
    """1 MiB that becomes 1 GiB."""
    packer = zlib.compressobj(9, wbits=31)
    first, more = (packer.compress(bytes(1 << 20)) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    yield JSON + b"Content-Encoding: gzip\r\n\r\n" + first
    for _ in range(16):
        yield more * 64


async def many_tools(message: dict[str, Any]) -> AsyncIterator[bytes]:
    yield JSON + b"\r\n" + _result(message, _tools())


async def small_tools(message: dict[str, Any]) -> AsyncIterator[bytes]:
    """As many as a message may hold."""
    yield JSON + b"\r\n" + _result(message, _tools(small=True))


@cache
def _tools(*, small: bool = False) -> bytes:
    tools = [{"name": f"{i}", "inputSchema": {}} if small else tool(f"t{i}") for i in range(100_000)]
    return json.dumps({"tools": tools}).encode()


async def wide_schema(message: dict[str, Any]) -> AsyncIterator[bytes]:
    yield JSON + b"\r\n" + result(message, {"tools": [tool("wide", 20_000)]})


async def full_schemas(message: dict[str, Any]) -> AsyncIterator[bytes]:
    """As much as a conversation may declare."""
    yield JSON + b"\r\n" + result(message, {"tools": [tool(f"t{i}", 100) for i in range(90)]})


async def endless_pages(message: dict[str, Any]) -> AsyncIterator[bytes]:
    yield JSON + b"\r\n" + result(message, {"tools": [], "nextCursor": "x" * 1000})


async def many_blocks(message: dict[str, Any]) -> AsyncIterator[bytes]:
    yield JSON + b"\r\n" + result(message, {"content": [{"type": "text", "text": ""}] * 120_000})


async def many_values(message: dict[str, Any]) -> AsyncIterator[bytes]:
    body = b"[" + b"[]," * 1_200_000 + b"[]]"
    yield JSON + b"\r\n" + b'{"jsonrpc":"2.0","id":1,"result":{"content":[],"structuredContent":{"a":%s}}}' % body


def _endless(head: bytes, piece: bytes, pause_s: float = 0.0) -> Answer:
    return lambda message: _endlessly(head, piece, pause_s)


def _event(message: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n\n"


_PROGRESS = {"method": "notifications/progress", "params": {"progressToken": 1, "progress": 1}}
_LOG = {"method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}}
_SAMPLING = {"id": 7, "method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
HOSTILE: dict[str, Answer] = {  # instead of an ordinary answer, for `listing` or `calling`
    "gzip bomb": gzip_bomb,
    "100,000 tools": many_tools,
    "100,000 small tools": small_tools,
    "a schema of 20,000 properties": wide_schema,
    "as many schemas as allowed": full_schemas,
    "endless pages": endless_pages,
    "an endless body": _endless(JSON + b"\r\n", b" " * 65_536),
    "an endless event": _endless(EVENTS, b"data: " + b"x" * 65_536 + b"\n"),
    "endless comments": _endless(EVENTS, b":\n" * 32_768),
    "empty lines": _endless(EVENTS, b"\r\n" * 32_768),
    "a flood of progress": _endless(EVENTS, _event(_PROGRESS) * 500),
    "a flood of logs": _endless(EVENTS, _event(_LOG) * 60),
    "a flood of requests": _endless(EVENTS, _event(_SAMPLING)),
    "a slow drip": _endless(JSON + b"\r\n", b" ", DRIP_S),
    "silence": _endless(b"", b"", DRIP_S),
}


async def _serve(answer: Answer, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        size = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        message = json.loads(await reader.readexactly(size) or b'{"method": ""}')
        async for piece in answer(message):
            writer.write(piece)
            await writer.drain()
    writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """The address of a server that answers so."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await _serve(answer, reader, writer)
        except asyncio.CancelledError:
            writer.transport.abort()
        finally:
            tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@contextlib.contextmanager
def serving_in_thread(answer: Answer) -> Iterator[str]:
    """The same, beside a caller that waits."""
    loop, told, urls = asyncio.new_event_loop(), threading.Event(), list[str]()

    async def run() -> None:
        async with serving(answer) as url:
            urls.append(url)
            told.set()
            await asyncio.Event().wait()

    main = loop.create_task(run())

    def serve() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(main)

    thread = threading.Thread(target=serve)
    thread.start()
    told.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(main.cancel)
        thread.join()
        loop.close()
