"""What a connection had is free once it is closed, without a garbage collector: one that runs holds up all streams."""

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from oscine.api.http.receiving import ThrottledProtocol
from oscine.extensions.apis.responses.run import ResponseRun
from oscine.system.collector import paused
from oscine.types import GenerationOutput, GenerationRequest
from tests.extensions.apis.socket_server import WAIT_S, SocketServer
from tests.waiting import wait_until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
MESSAGES = {**CHAT, "model": "fake", "max_tokens": 8}
RESPONSES = {"input": "hi", "store": False}
OF_SERVER = ("oscine.", "uvicorn.", "starlette.", "uvloop.", "websockets.server", "tests.")


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[SocketServer]:
    with SocketServer(model_folder) as server:
        yield server


def alive() -> int:
    """Connections and responses."""
    return sum(issubclass(type(one), ThrottledProtocol | ResponseRun) for one in gc.get_objects())


def only_freed_by_a_collector() -> list[str]:
    """Types of the server's objects that are part of reference cycles."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sorted({type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith(OF_SERVER)})
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def a_socket(server: SocketServer) -> None:
    with server.connect():
        pass


def a_socket_with_a_response(server: SocketServer) -> None:
    server.saying("Yes.")
    with server.connect() as client:
        client.create(input="hi", store=False)
        assert client.events()[-1]["type"] == "response.completed"


def posts(path: str, status: int, **body: object) -> Callable[[SocketServer], None]:
    def post(server: SocketServer) -> None:
        server.saying("Yes.")
        assert server.post(path, body).status_code == status

    return post


def an_engine_that_fails(server: SocketServer) -> None:
    def script(request: GenerationRequest) -> list[GenerationOutput]:
        return [GenerationOutput(request.request_id, finish_reason="error", error="it failed")]

    server.engine.script = script
    assert server.post("/v1/chat/completions", CHAT).status_code == 503


def connected(server: SocketServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def sends(data: bytes, answer: bytes) -> Callable[[SocketServer], None]:
    """A client that sends this, and leaves once it has read the beginning of an answer."""

    def send(server: SocketServer) -> None:
        server.saying(*["Yes."] * 10)  # more than are asked for, as requests of the client before may still run
        with connected(server) as client:
            client.sendall(data)
            assert client.recv(len(answer)) == answer

    return send


def leaves_unanswered(data: bytes) -> Callable[[SocketServer], None]:
    def send(server: SocketServer) -> None:
        with connected(server) as client:
            client.sendall(data)
            wait_until(lambda: alive() > 0, "the connection")

    return send


BODY = b'{"messages": [{"role": "user", "content": "hi"}], "stream": true}'
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
POST = b"%bContent-Length: %d\r\n\r\n%b" % (HEAD, len(BODY), BODY)
OFFER = b"%bConnection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 100\r\n\r\n{" % HEAD
WAYS = {
    "chat": posts("/v1/chat/completions", 200, **CHAT),
    "chat, streamed": posts("/v1/chat/completions", 200, **CHAT, stream=True),
    "a bad request": posts("/v1/chat/completions", 400, messages=[{"role": "user", "content": 5}]),
    "responses": posts("/v1/responses", 200, **RESPONSES),
    "responses, streamed": posts("/v1/responses", 200, **RESPONSES, stream=True),
    "messages": posts("/v1/messages", 200, **MESSAGES),
    "messages, streamed": posts("/v1/messages", 200, **MESSAGES, stream=True),
    "no route": posts("/nowhere", 404),
    "a WebSocket": a_socket,
    "a WebSocket with a response": a_socket_with_a_response,
    "an engine that fails": an_engine_that_fails,
    "a client that leaves": sends(POST, b"HTTP/1.1 200"),
    "two requests in a row": sends(POST + POST, b"HTTP/1.1 200"),
    "half a body behind an offer of HTTP/2": leaves_unanswered(OFFER),
    "no HTTP": sends(b"hello\r\n\r\n", b"HTTP/1.1 400"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_connection_that_is_closed_leaves_nothing(server: SocketServer, way: str) -> None:
    WAYS[way](server)  # what is made once
    gc.collect()
    with paused():
        before = alive()
        for _ in range(3):
            WAYS[way](server)
        wait_until(lambda: alive() <= before, "the end of all connections")
        assert not only_freed_by_a_collector()
