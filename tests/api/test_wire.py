"""Bounds on connections and heads: the protocol by itself, over real sockets, with short times."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from oscine.api.http import uvicorn_protocol

QUICK_S = 0.1
FIRST_LINE = b"POST / HTTP/1.1\r\nHost: x\r\n"
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def no_reading(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers without a look at the body."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def more_than_any_buffer_holds(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000):
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})


def serve(
    test: Callable[[Callable[[], Awaitable[Client]], ServerState], Awaitable[None]], app: Any = no_reading
) -> None:
    """`test(connect, state)` against the protocol with at most two connections."""

    async def main() -> None:
        config, state = uvicorn.Config(app, log_config=None, lifespan="off"), ServerState()
        kind = uvicorn_protocol.protocol(max_connections=2, probes=["/alive"])
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server:
            await test(lambda: asyncio.open_connection("127.0.0.1", port), state)
            server.close()
            for connection in list(state.connections):
                connection.transport.abort()  # type: ignore[union-attr]
            await asyncio.gather(*state.tasks, return_exceptions=True)

    asyncio.run(asyncio.wait_for(main(), 30))


async def answer(reader: asyncio.StreamReader) -> bytes:
    """To the end of the connection, however that comes."""
    data = b""
    try:
        while more := await reader.read(65536):
            data += more
    except ConnectionResetError:
        pass
    return data


@pytest.mark.parametrize("sent", [b"", b"POST", FIRST_LINE, FIRST_LINE + b"\r\nx" + FIRST_LINE])
def test_a_head_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    """Also the second one of a connection, and that of a client who sends nothing at all."""
    monkeypatch.setattr(uvicorn_protocol, "HEAD_S", QUICK_S)
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", 10.0)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(sent.replace(b"\r\n\r\nx", b"\r\nContent-Length: 1\r\n\r\nx"))
        data = await answer(reader)
        assert b"HTTP/1.1 408 " in data
        assert b"did not arrive within" in data
        writer.close()

    serve(test)


def test_a_head_that_trickles_is_given_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "HEAD_S", 3 * QUICK_S)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        reading = asyncio.create_task(answer(reader))
        for byte in FIRST_LINE + b"X: " + b"y" * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(QUICK_S / 10)
            if reading.done():
                break
        assert b"HTTP/1.1 408 " in await reading
        writer.close()

    serve(test)


@pytest.mark.parametrize("part", [b"x: %s\r\n" % (b"y" * 1000), b"y" * 1000], ids=["many headers", "one header"])
def test_a_head_that_is_too_large_is_refused(part: bytes) -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Z: z\r\nA: " if part[:1] == b"y" else FIRST_LINE)
        for _ in range(100):
            writer.write(part)
        assert b"HTTP/1.1 431 " in await answer(reader)
        writer.close()

    serve(test)


def test_a_body_is_no_part_of_the_head_that_comes_behind_it() -> None:
    bodies: list[int] = []

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message["body"]), message["more_body"]
        bodies.append(size)
        await no_reading(scope, receive, send)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Content-Length: 100000\r\n\r\n")
        while not next((c.cycle for c in state.connections), None):  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        (connection,) = state.connections
        connection.data_received(bytes(100_000) + b"GET / HTTP/1.1\r\n")  # type: ignore[union-attr]
        writer.write(b"Host: x\r\nConnection: close\r\n\r\n")
        assert (await answer(reader)).count(b"HTTP/1.1 200 ") == 2
        assert bodies == [100_000, 0]
        writer.close()

    serve(test, reads)


GET = b"GET %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


async def waits_unless_probed(scope: Scope, receive: Receive, send: Send) -> None:
    while scope["path"] == "/wait" and (await receive())["type"] != "http.disconnect":
        pass
    await no_reading(scope, receive, send)


@pytest.mark.parametrize(
    "sent", [b"", b"P", GET % b"/" + b"GET"], ids=["nothing", "a byte", "the next request's begin"]
)
def test_at_the_limit_a_new_connection_displaces_the_oldest_without_a_request(sent: bytes) -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        first, second = await connect(), await connect()
        for _, writer in (first, second):
            writer.write(sent.replace(b"Connection: close\r\n", b""))
        if len(sent) > 1:
            await first[0].readuntil(b"ok")
        third = await connect()
        third[1].write(GET % b"/")
        assert (await answer(third[0])).endswith(b"ok")
        assert await answer(first[0]) == b""
        second[1].write(b"ET / HTTP/1.1\r\nHost: x\r\n\r\n" if sent[:1] == b"P" else GET % b"/")
        for _, writer in (first, second, third):
            writer.close()

    serve(test)


def test_where_all_connections_have_requests_probes_are_answered_and_others_told() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        busy = [await connect(), await connect()]
        for _, writer in busy:
            writer.write(GET % b"/wait")
        while sum(connection.cycle is not None for connection in state.connections) < 2:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        for path in (b"/alive", b"/alive?x=y", b"/other"):
            reader, writer = await connect()
            writer.write((GET % path).replace(b"Connection: close\r\n", b""))
            said = await answer(reader)
            writer.close()
            assert said.endswith(b"ok") == (path != b"/other")
        assert b"HTTP/1.1 503 " in said
        assert b"Retry-After" in said
        assert b'"code":"overloaded"' in said
        busy[0][1].close()
        while len(state.connections) > 1:
            await asyncio.sleep(0.001)
        reader, writer = await connect()
        writer.write(GET % b"/other")
        assert (await answer(reader)).endswith(b"ok")
        busy[1][1].close()
        writer.close()

    serve(test, waits_unless_probed)


def test_connections_above_the_limit_have_a_limit_of_their_own() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        clients = [await connect() for _ in range(200)]
        for _, writer in clients:
            writer.write(GET % b"/wait" if len(state.connections) < 3 else b"GET /alive")
            await asyncio.sleep(0)
        ends = [asyncio.create_task(answer(reader)) for reader, _ in clients]
        while sum(not end.done() for end in ends) > 2 + 64:
            await asyncio.sleep(0.001)
        assert len(state.connections) <= 2 + 64
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*ends)

    serve(test, waits_unless_probed)


def test_requests_sent_ahead_are_parsed_when_their_turn_comes() -> None:
    """One megabyte of heads would become a hundred megabytes of request objects."""
    number, go = 20_000, asyncio.Event()
    served = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal served
        await go.wait()
        served += 1
        await no_reading(scope, receive, send)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        reading = asyncio.create_task(answer(reader))
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * number)
        while not state.connections:
            await asyncio.sleep(0.001)
        (connection,) = state.connections
        while not connection.flow.full:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        assert len(connection.pipeline) < 32  # type: ignore[union-attr]
        assert len(connection._unparsed) < 1 << 20  # type: ignore[union-attr]
        go.set()
        writer.write(GET % b"/")
        assert (await reading).count(b"HTTP/1.1 200 ") == number + 1
        assert served == number + 1
        writer.close()

    serve(test, app)


def test_a_flood_leaves_turns_of_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks cost ten times as much as they are long."""
    whole, parsed, most = uvicorn_protocol.BoundedHttp._parse_slice, 0, 0
    chunks = b"1\r\na\r\n" * 200_000

    def counted(connection: uvicorn_protocol.BoundedHttp, data: bytes) -> None:
        nonlocal parsed
        parsed += len(data)
        whole(connection, data)

    async def measure() -> None:
        nonlocal parsed, most
        while True:
            parsed, most = 0, max(most, parsed)
            await asyncio.sleep(0)

    async def reads(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await no_reading(scope, receive, send)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        measuring = asyncio.create_task(measure())
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n")
        assert (await answer(reader)).endswith(b"ok")
        writer.close()
        measuring.cancel()
        assert most <= 1 << 16

    monkeypatch.setattr(uvicorn_protocol.BoundedHttp, "_parse_slice", counted)
    serve(test, reads)


def test_a_body_that_goes_on_after_its_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", QUICK_S)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Content-Length: 1000000\r\n\r\nabc")
        assert (await answer(reader)).endswith(b"ok")
        writer.close()

    serve(test)


def test_a_body_that_ends_in_time_leaves_the_connection_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "LINGER_S", 5.0)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        for _ in range(2):
            writer.write(FIRST_LINE + b"Content-Length: 4\r\n\r\nab")
            await reader.readuntil(b"ok")
            writer.write(b"cd")
            await asyncio.sleep(0.01)
        writer.close()

    serve(test)


def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_protocol, "STALLED_S", QUICK_S)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        while not state.connections:
            await asyncio.sleep(0.001)
        while state.connections:
            await asyncio.sleep(0.001)
        writer.close()

    serve(test, more_than_any_buffer_holds)


@pytest.mark.parametrize(
    "data", [b"\x00\x01\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", b"\r\n\r\nGET\r\n"]
)
def test_what_is_no_request_is_refused_in_the_shape_of_all_errors(data: bytes) -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(data)
        refused = await answer(reader)
        assert b"HTTP/1.1 400 " in refused
        assert b'{"error":{"message":' in refused
        writer.close()

    serve(test)


def test_a_request_that_is_answered_hears_that_the_client_left_also_with_others_behind_it() -> None:
    """uvicorn tells the newest request alone, and the answer of an older one would be written to a closed transport."""
    ends: list[str] = []

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        await no_reading(scope, receive, send)
        ends.append(scope["path"])

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(3)) + b"\x00garbage\r\n")
        await answer(reader)
        writer.close()
        while not ends:
            await asyncio.sleep(0.001)
        assert ends == ["/0"]

    serve(test, waits)
