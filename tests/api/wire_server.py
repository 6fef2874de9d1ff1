"""A server of the protocol by itself, over real sockets."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from oscine.api.http import uvicorn_protocol
from tests.clock import run

LONG_S = 3600.0  # of each wait of the protocol: far above the delays of a busy machine
FIRST_LINE = b"POST / HTTP/1.1\r\nHost: x\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def no_reading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def serve(
    test: Callable[[Callable[[], Awaitable[Client]], ServerState], Awaitable[None]],
    app: Any = no_reading,
    is_leaving: Callable[[], bool] = lambda: False,
) -> None:
    """`test(connect, state)` against the protocol with at most two connections."""

    async def main() -> None:
        config, state = (
            uvicorn.Config(app, log_config=None, lifespan="off", ws="none", timeout_keep_alive=3600),
            ServerState(),
        )
        kind = uvicorn_protocol.protocol(2, probes=["/alive"], websockets=["/socket"], is_leaving=is_leaving)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        writers = []

        async def connect() -> Client:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writers.append(writer)
            return reader, writer

        async with server:
            try:
                await test(connect, state)
            finally:
                server.close()
                for transport in [*(c.transport for c in state.connections), *(w.transport for w in writers)]:  # type: ignore[union-attr]
                    transport.abort()
                for task in state.tasks:
                    task.cancel()
                await asyncio.gather(*state.tasks, *(w.wait_closed() for w in writers), return_exceptions=True)

    run(main())


async def answer(reader: asyncio.StreamReader) -> bytes:
    """To the end of the connection, however that comes."""
    data = b""
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        pass
    return data
