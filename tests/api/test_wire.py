"""Bounds on connections and heads: the protocol by itself, over real sockets, on a clock that the tests advance."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from oscine.api.http import uvicorn_protocol
from oscine.api.http.uvicorn_protocol import BoundedHttp
from tests.api.wire_server import FIRST_LINE, LONG_S, Client, answer, no_reading, serve
from tests.clock import pass_time
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("long_waits")


async def connection_of(state: ServerState) -> BoundedHttp:
    """The only connection of the server; waits until it is open."""
    await until(lambda: bool(state.connections), "a connection")
    (connection,) = state.connections
    assert isinstance(connection, BoundedHttp)
    return connection


def answers_after(go: asyncio.Event) -> Any:
    """The same, once the event is set."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await go.wait()
        await no_reading(scope, receive, send)

    return app


async def more_than_any_buffer_holds(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for _ in range(2000):
        await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})


@pytest.mark.parametrize("sent", [b"", b"POST", FIRST_LINE, FIRST_LINE + b"\r\nx" + FIRST_LINE])
def test_a_head_that_never_ends_is_given_up(sent: bytes) -> None:
    """Also the second one of a connection, and that of a client who sends nothing at all."""

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(sent.replace(b"\r\n\r\nx", b"\r\nContent-Length: 1\r\n\r\nx"))
        connection = await connection_of(state)
        if b"\r\n\r\n" in sent:
            await reader.readuntil(b"ok")
        await until(lambda: connection._reader.head_timer is not None, "the start of a head")
        pass_time(LONG_S)
        data = await answer(reader)
        assert b"HTTP/1.1 408 " in data
        assert b"did not arrive within" in data

    serve(test)


def test_a_late_head_does_not_end_the_request_before_it() -> None:
    go = asyncio.Event()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nGET /")
        connection = await connection_of(state)
        await until(lambda: connection._reader.in_message and connection._reader.head_timer is not None, "a head")
        pass_time(LONG_S)
        await until(lambda: connection.refusal is not None, "the end of the time")
        go.set()
        data = await answer(reader)
        assert data.index(b"HTTP/1.1 200 ") < data.index(b"HTTP/1.1 408 ")

    serve(test, answers_after(go))


def test_a_server_that_leaves_ends_a_connection_with_its_next_answer() -> None:
    leaving = asyncio.Event()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"connection:" not in await reader.readuntil(b"ok")
        leaving.set()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        data = await answer(reader)
        assert data.endswith(b"ok")
        assert b"connection: close\r\n" in data

    serve(test, is_leaving=leaving.is_set)


def test_a_head_that_trickles_is_given_up_all_the_same() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        connection = await connection_of(state)
        for number, byte in enumerate(FIRST_LINE[:10], 1):
            writer.write(bytes([byte]))
            await until(lambda number=number: connection._reader._head_bytes == number, "another byte")  # type: ignore[misc]
            pass_time(LONG_S / 10)
        assert b"HTTP/1.1 408 " in await answer(reader)

    serve(test)


@pytest.mark.parametrize("part", [b"x: %s\r\n" % (b"y" * 1000), b"y" * 1000], ids=["many headers", "one header"])
def test_a_head_that_is_too_large_is_refused(part: bytes) -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Z: z\r\nA: " if part[:1] == b"y" else FIRST_LINE)
        for _ in range(100):
            writer.write(part)
        assert b"HTTP/1.1 431 " in await answer(reader)

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
        connection = await connection_of(state)
        await until(lambda: connection.cycle is not None, "a request")
        connection.data_received(bytes(100_000) + b"GET / HTTP/1.1\r\n")
        writer.write(b"Host: x\r\nConnection: close\r\n\r\n")
        assert (await answer(reader)).count(b"HTTP/1.1 200 ") == 2
        assert bodies == [100_000, 0]

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

    serve(test)


def test_where_all_connections_have_requests_probes_are_answered_and_others_told() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        busy = [await connect(), await connect()]
        for _, writer in busy:
            writer.write(GET % b"/wait")
        await until(lambda: sum(c.cycle is not None for c in state.connections) == 2, "two requests")  # type: ignore[union-attr]
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
        await until(lambda: len(state.connections) == 1, "one connection")
        reader, writer = await connect()
        writer.write(GET % b"/other")
        assert (await answer(reader)).endswith(b"ok")

    serve(test, waits_unless_probed)


UPGRADE = b"GET /socket HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nHELLO"


@pytest.mark.parametrize("behind", [FIRST_LINE + b"Content-Length: 5\r\n\r\nHELLO", UPGRADE], ids=["POST", "WebSocket"])
def test_a_probe_above_the_limit_gets_nothing_of_the_requests_behind_it(behind: bytes) -> None:
    go, bodies = asyncio.Event(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/wait":
            await waits_to_be_left(scope, receive, send)
            return
        await go.wait()
        bodies.append((scope["path"], (await receive())["body"]))
        await no_reading(scope, receive, send)

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        for _ in range(2):
            (await connect())[1].write(GET % b"/wait")
        await until(lambda: sum(c.cycle is not None for c in state.connections) == 2, "two requests")  # type: ignore[union-attr]
        others = set(state.connections)
        reader, writer = await connect()
        alive = b"GET /alive HTTP/1.1\r\nHost: x\r\n\r\n"
        writer.write(alive + behind + alive)
        await until(lambda: len(state.connections) == 3, "the third connection")
        (connection,) = state.connections - others
        assert isinstance(connection, BoundedHttp)
        await until(lambda: connection.refusal is not None, "the refusal")
        assert not connection.pipeline
        assert connection.websocket is None
        go.set()
        assert (await answer(reader)).count(b"HTTP/1.1 ") == 1
        assert bodies == [("/alive", b"")]

    serve(test, app)


def test_what_is_read_behind_bad_bytes_has_a_bound() -> None:
    go = asyncio.Event()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n\0 is no request\r\n\r\n" + bytes(1 << 20))
        connection = await connection_of(state)
        await until(lambda: connection.flow.full, "more than is kept")
        assert connection.flow.read_paused
        assert len(connection._reader.unparsed) < 1 << 20
        go.set()
        await until(lambda: not state.connections, "the end of the connection")

    serve(test, answers_after(go))


def test_connections_above_the_limit_have_a_limit_of_their_own() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        clients = [await connect() for _ in range(200)]
        for _, writer in clients:
            writer.write(GET % b"/wait" if len(state.connections) < 3 else b"GET /alive")
            await asyncio.sleep(0)
        ends = [asyncio.create_task(answer(reader)) for reader, _ in clients]
        await until(lambda: sum(not end.done() for end in ends) <= 2 + 64, "the end of those above")
        assert len(state.connections) <= 2 + 64
        for _, writer in clients:
            writer.close()
        await asyncio.gather(*ends)

    serve(test, waits_unless_probed)


@pytest.mark.long
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
        connection = await connection_of(state)
        await until(lambda: connection.flow.full, "more than is kept")
        assert len(connection.pipeline) < 32
        assert len(connection._reader.unparsed) < 1 << 20
        go.set()
        writer.write(GET % b"/")
        assert (await reading).count(b"HTTP/1.1 200 ") == number + 1
        assert served == number + 1

    serve(test, app)


def test_a_flood_leaves_turns_of_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small chunks cost ten times as much as they are long."""
    whole, parsed, most = uvicorn_protocol._RequestReader._parse_slice, 0, 0
    chunks = b"1\r\na\r\n" * 200_000

    def counted(reader: uvicorn_protocol._RequestReader, data: bytes) -> None:
        nonlocal parsed
        parsed += len(data)
        whole(reader, data)

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

    monkeypatch.setattr(uvicorn_protocol._RequestReader, "_parse_slice", counted)
    serve(test, reads)


def test_a_body_that_goes_on_after_its_answer_ends_the_connection() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Content-Length: 1000000\r\n\r\nabc")
        connection = await connection_of(state)
        await reader.readuntil(b"ok")
        await until(lambda: connection._linger_timer is not None, "the end of the answer")
        pass_time(LONG_S)
        assert await answer(reader) == b""

    serve(test)


def test_a_body_that_ends_in_time_leaves_the_connection_open() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        connection = await connection_of(state)
        for _ in range(3):
            writer.write(FIRST_LINE + b"Content-Length: 4\r\n\r\nab")
            await reader.readuntil(b"ok")
            await until(lambda: connection._linger_timer is not None, "the end of the answer")
            writer.write(b"cd")
            await until(lambda: connection._linger_timer is None, "the end of the body")
            pass_time(LONG_S)
        assert not reader.at_eof()
        assert state.connections == {connection}

    serve(test)


def test_a_client_that_does_not_read_is_dropped() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        _, writer = await connect()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        connection = await connection_of(state)
        await until(lambda: connection.flow.stall_timer is not None, "a full buffer")
        pass_time(LONG_S)
        await until(lambda: not state.connections, "the end of the connection")

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
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(3)))
        connection = await connection_of(state)
        await until(lambda: len(connection.pipeline) == 2, "the requests behind it")
        connection.transport.abort()
        await answer(reader)
        writer.close()
        await until(lambda: bool(ends), "the end of the request")
        assert ends == ["/0"]

    serve(test, waits)


async def waits_to_be_left(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_a_client_that_ends_its_sending_side_is_answered(version: bytes) -> None:
    """Interim responses before the answer show whether it is still there. HTTP/1.0 has none."""
    go = asyncio.Event()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE.replace(b"1.1", version) + b"Content-Length: 2\r\n\r\nhi")
        writer.write_eof()
        connection = await connection_of(state)
        for _ in range(3):
            before = connection._probe_timer
            pass_time(LONG_S)
            await until(lambda: connection._probe_timer not in (None, before), "a probe")  # noqa: B023
        go.set()
        data = await answer(reader)
        probes = data.count(b"HTTP/1.1 100 Continue\r\n\r\n")
        assert (probes > 2) if version == b"1.1" else (probes == 0)
        assert data[25 * probes :].startswith(b"HTTP/1.1 200 ")
        assert data.endswith(b"ok")

    serve(test, answers_after(go))


def test_all_requests_before_the_end_of_the_sending_side_are_answered() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write((FIRST_LINE + b"Content-Length: 0\r\n\r\n") * 100)
        writer.write_eof()
        assert (await answer(reader)).count(b"HTTP/1.1 200 ") == 100

    serve(test)


def test_a_request_is_answered_though_the_next_one_ends_in_its_head() -> None:
    go = asyncio.Event()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + b"Content-Length: 0\r\n\r\n" + FIRST_LINE)
        writer.write_eof()
        connection = await connection_of(state)
        await until(lambda: connection.at_end, "the end of what the client sends")
        go.set()
        assert (await answer(reader)).endswith(b"ok")

    serve(test, answers_after(go))


@pytest.mark.parametrize(
    "sent", [b"", FIRST_LINE, FIRST_LINE + b"X: " + b"y" * 50_000, FIRST_LINE + b"Content-Length: 9\r\n\r\n{"]
)
def test_a_request_that_cannot_become_whole_ends_the_connection(sent: bytes) -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(sent)
        writer.write_eof()
        assert await answer(reader) == b""

    serve(test, waits_to_be_left)


def test_a_client_that_has_left_altogether_is_noticed() -> None:
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await waits_to_be_left(scope, receive, send)
        ended.set()

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        _, writer = await connect()
        writer.write(GET % b"/")
        connection = await connection_of(state)
        await until(lambda: connection._running is not None, "the request")
        writer.close()
        while not ended.is_set():
            await asyncio.sleep(0)
            pass_time(uvicorn_protocol.LAST_PROBE_S)

    serve(test, app)
