"""Requests that offer to go on in another protocol, which the server does not speak."""

from collections.abc import Awaitable, Callable

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from tests.api.wire_server import FIRST_LINE, Client, answer, serve

pytestmark = pytest.mark.usefixtures("long_waits")

OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: %b\r\nHTTP2-Settings: AAEAAEAA\r\n"
BODY = b"x" * 3000 + b"GET / HTTP/1.1\r\n\r\n"  # of which no part is a request
FRAMED = {
    "length": b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY),
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\nTrailer: t\r\n\r\n" % (len(BODY), BODY),
}


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("framed", FRAMED.values(), ids=FRAMED)
@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
def test_a_request_that_offers_another_protocol_keeps_its_body(protocol: bytes, framed: bytes) -> None:
    """Java's HttpClient offers h2c with the first request of each connection."""
    sent = FIRST_LINE + OFFER % protocol + framed
    plain = FIRST_LINE + b"Content-Length: 2\r\n\r\nhi"

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        for request in (sent, plain, sent[: len(sent) - 2000], sent[len(sent) - 2000 :]):
            writer.write(request)
            if request is sent or request is plain:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                wanted = BODY if request is sent else b"hi"
                assert await reader.readexactly(len(wanted)) == wanted
        await reader.readuntil(b"\r\n\r\n")
        assert await reader.readexactly(len(BODY)) == BODY

    serve(test, echo)


@pytest.mark.parametrize("framed", [*FRAMED.values(), b"Content-Length: 0\r\n\r\n"], ids=[*FRAMED, "empty"])
@pytest.mark.parametrize("piece", [1 << 20, 1000, 7])
def test_requests_behind_such_an_offer_in_one_packet_are_answered(framed: bytes, piece: int) -> None:
    offers = FIRST_LINE + OFFER % b"h2c" + framed
    get = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = offers + get + offers + FIRST_LINE + b"Content-Length: 2\r\n\r\nhi" + get
    body = b"" if b"Length: 0" in framed else BODY

    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        for begin in range(0, len(sent), piece):
            writer.write(sent[begin : begin + piece])
            await writer.drain()
        for wanted in (body, b"", body, b"hi", b""):
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert await reader.readexactly(len(wanted)) == wanted

    serve(test, echo)


def test_a_wrong_body_after_such_an_offer_is_refused() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(FIRST_LINE + OFFER % b"h2c" + b"Transfer-Encoding: chunked\r\n\r\nno chunk\r\n")
        assert b"HTTP/1.1 400 " in await answer(reader)

    serve(test, echo)


def test_requests_without_a_body_may_offer_another_protocol() -> None:
    async def test(connect: Callable[[], Awaitable[Client]], state: ServerState) -> None:
        reader, writer = await connect()
        writer.write(3 * (b"GET / HTTP/1.1\r\nHost: x\r\n" + OFFER % b"h2c" + b"\r\n"))
        for _ in range(3):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")

    serve(test, echo)
