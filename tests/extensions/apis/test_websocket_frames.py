"""Frames that are broken, too large or late, clients that do not read, and the limit of connections."""

import base64
import contextlib
import json
import logging
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from oscine.api.common import memory
from oscine.api.http import receiving, uvicorn_protocol, websocket, websocket_frames
from oscine.api.http.websocket_frames import FrameCutter
from oscine.types import GenerationOutput, GenerationRequest
from tests.extensions.apis.socket_server import WAIT_S, SocketServer
from tests.waiting import wait_until

MAX_BYTES = 100_000
KEY = base64.b64encode(bytes(16)).decode()
HEAD = (
    "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n\r\n"
).encode()
TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
CREATE = json.dumps({"type": "response.create", "input": "hi", "store": False}).encode()


@pytest.fixture(scope="module")
def server(model_folder: Path) -> Iterator[SocketServer]:
    with SocketServer(model_folder, max_body_bytes=MAX_BYTES) as server:
        yield server


def frame(data: bytes, opcode: int = TEXT, *, fin: bool = True, bits: int = 0, masked: bool = True) -> bytes:
    """As RFC 6455 has it."""
    head = bytes([(0x80 if fin else 0) | bits | opcode])
    mask = 0x80 if masked else 0
    if len(data) < 126:
        head += bytes([mask | len(data)])
    elif len(data) < 1 << 16:
        head += bytes([mask | 126]) + struct.pack("!H", len(data))
    else:
        head += bytes([mask | 127]) + struct.pack("!Q", len(data))
    if not masked:
        return head + data
    key = b"mask"
    return head + key + bytes(b ^ key[i % 4] for i, b in enumerate(data))


class Wire:
    """Context manager: bytes to and from the server."""

    def __init__(self, server: SocketServer, sent: bytes = HEAD, *, small: bool = False) -> None:
        self.socket = socket.socket()
        if small:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.socket.settimeout(WAIT_S)
        self.socket.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        self.file = self.socket.makefile("rb")
        self.fields: dict[bytes, bytes] = {}  # of the newest head
        self.socket.sendall(sent)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
        self.socket.close()

    def head(self) -> int:
        """Reads a response's head. Returns its status."""
        status = int(self.file.readline().split()[1])
        self.fields = {}
        while line := self.file.readline().strip():
            name, _, value = line.partition(b":")
            self.fields[name.lower()] = value.strip()
        return status

    def frame(self) -> tuple[int, bytes] | None:
        """Opcode and data; None at the end."""
        head = self.file.read(2)
        if len(head) < 2:
            return None
        size = head[1]
        if size == 126:
            (size,) = struct.unpack("!H", self.file.read(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", self.file.read(8))
        return head[0] & 15, self.file.read(size)

    def closed(self) -> int:
        """Reads to the close. Returns its status."""
        while (got := self.frame()) is not None:
            if got[0] == CLOSE:
                return int.from_bytes(got[1][:2], "big")
        return 0

    def response(self) -> dict[str, Any]:
        while True:
            got = self.frame()
            assert got is not None
            event = json.loads(got[1]) if got[0] == TEXT else {"type": ""}
            if event["type"] in ("response.completed", "error"):
                return dict(event)


FRAGMENT = frame(b"", 0, fin=False)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (frame(CREATE, masked=False), 1002),
        (frame(CREATE, bits=0x40), 1002),
        (frame(CREATE, 5), 1002),
        (frame(b"x", 0), 1002),
        (frame(b"x" * 126, PING), 1002),
        (frame(b"x", CLOSE), 1002),
        (frame(b"a", fin=False) + frame(b"b"), 1002),
        (frame(b'{"type": "\xff"}'), 1007),
        (frame(b"\xed\xa0\x80"), 1007),
        (frame(CREATE, BINARY), 1003),
        (frame(b" " * (MAX_BYTES + 1)), 1009),
        (frame(b" " * MAX_BYTES, fin=False) + frame(b"  ", 0), 1009),
        (frame(b" ", fin=False) + FRAGMENT * websocket.MAX_FRAGMENTS, 1009),
        (struct.pack("!BBQ", 0x81, 0xFF, 1 << 62), 1009),
        (frame(struct.pack("!H", 1000), CLOSE), 1000),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "frame",
)
def test_a_broken_frame_ends_its_connection_alone(server: SocketServer, sent: bytes, status: int) -> None:
    server.saying("ok", "ok")
    with server.connect() as other, Wire(server) as wire:
        other.respond(input="hi", store=False)
        assert wire.head() == 101
        wire.socket.sendall(sent)
        assert wire.closed() == status
        other.respond(input="hi", store=False)


@pytest.mark.parametrize("size", [1, 7, 511, 512, 513, 1 << 20])
def test_frames_come_in_any_pieces(server: SocketServer, size: int) -> None:
    """Also directly behind the head, before the server has answered."""
    server.saying("ok", "ok")
    middle = len(CREATE) // 2
    pieces = frame(CREATE[:middle], fin=False) + frame(b"", PING) + frame(CREATE[middle:], 0)
    sent = HEAD + frame(CREATE) + pieces
    with Wire(server, b"") as wire:
        for begin in range(0, len(sent), size):
            wire.socket.sendall(sent[begin : begin + size])
        assert wire.head() == 101
        for _ in range(2):
            assert wire.response()["type"] == "response.completed"


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        (HEAD.replace(b"Version: 13", b"Version: 8"), 400),
        (HEAD.replace(KEY.encode(), b"short"), 400),
        (HEAD.replace(b"Sec-WebSocket-Key", b"X-Key"), 400),
        (HEAD.replace(b"/v1/responses", b"/v1/models"), 200),
        (HEAD.replace(b"/v1/responses", b"/v1/nothing"), 426),
        (HEAD.replace(b"GET", b"DELETE"), 426),
        (HEAD.replace(b"Connection: Upgrade\r\n", b""), 426),
        (HEAD.replace(b"/v1/responses", b"/v1/responses?a=b"), 101),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "head",
)
def test_a_handshake_is_read_exactly(server: SocketServer, changed: bytes, status: int) -> None:
    with Wire(server, changed) as wire:
        assert wire.head() == status


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (frame(b"hi", PING), (PONG, b"hi")),
        (frame(b"\x03\xe8", CLOSE), (CLOSE, b"\x03\xe8")),
        (frame(b"a", bits=0x70), 1002),
        (frame(b"a", masked=False), 1002),
        (FRAGMENT, 1002),
        (frame(b"\xff"), 1007),
    ],
)
def test_frames_sent_with_the_handshake_are_answered_behind_it(
    server: SocketServer, sent: bytes, answer: tuple[int, bytes] | int, caplog: pytest.LogCaptureFixture
) -> None:
    with Wire(server, HEAD + sent) as wire:
        assert wire.head() == 101
        assert answer == (wire.closed() if isinstance(answer, int) else wire.frame())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_handshake_behind_an_unanswered_request_is_an_ordinary_request(server: SocketServer) -> None:
    """The connection is not taken from the request, and the client may try again."""
    with Wire(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" + HEAD) as wire:
        for status in (200, 426):
            assert wire.head() == status
            wire.file.read(int(wire.fields[b"content-length"]))
        wire.socket.sendall(HEAD + frame(b"hi", PING))
        assert wire.head() == 101
        assert wire.frame() == (PONG, b"hi")


def test_a_message_that_does_not_end_is_late(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "BODY_TIMEOUT_S", 0.0)
    for begun in (frame(CREATE)[:-1], frame(CREATE, fin=False)):
        with Wire(server) as wire:
            assert wire.head() == 101
            wire.socket.sendall(begun)
            assert wire.closed() == 1008


def test_messages_that_are_not_complete_are_counted(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MAX_BODIES_BYTES", 250_000)
    begun = frame(b" " * 90_000, fin=False)
    with Wire(server) as first:
        assert first.head() == 101
        first.socket.sendall(begun)
        with Wire(server) as second, Wire(server) as third:
            assert (second.head(), third.head()) == (101, 101)
            second.socket.sendall(begun)
            wait_until(lambda: server.service.bodies._bytes >= 180_000, "two are held")
            third.socket.sendall(begun)
            assert third.closed() == 1013
        wait_until(lambda: server.service.bodies._bytes < 180_000, "one is held")
        server.saying("ok")
        first.socket.sendall(frame(CREATE, 0))
        assert first.response()["type"] == "response.completed"
    wait_until(lambda: server.service.bodies._bytes == 0, "all is given back")


def test_many_small_messages_are_all_answered(server: SocketServer) -> None:
    with Wire(server, HEAD + frame(b"{}") * 3000) as wire:
        assert wire.head() == 101
        for _ in range(3000):
            assert wire.response()["status"] == 400


def test_frames_are_cut_at_any_pieces() -> None:
    sent = [frame(b"", PING), frame(b"x" * 125), frame(b"y" * 126), frame(b"z" * 70_000), frame(b"", masked=False)]
    for size in (1, 13, 14, 15, 127, 65_536, 1 << 20):
        cutter, found, data = FrameCutter(100_000), [], b"".join(sent)
        for begin in range(0, len(data), size):
            cutter.add(data[begin : begin + size])
            while one := cutter.take():
                found.append(one)
        assert found == sent
        assert cutter.num_bytes == 0
    cutter.add(struct.pack("!BBQ", 0x81, 0xFF, 100_001) + b"abc")
    assert len(cutter.take()) == 13


def test_reading_goes_on_in_later_turns(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket_frames, "TURN_S", 0.0)
    server.saying("ok", "ok")
    with Wire(server, HEAD + frame(b"", PING) * 100 + frame(CREATE) * 2) as wire:
        assert wire.head() == 101
        for _ in range(2):
            assert wire.response()["type"] == "response.completed"


PART = 90_000  # bytes of something that is not complete
POST = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Length: {MAX_BYTES}\r\n\r\n".encode()


@pytest.mark.parametrize("kind", ["message", "body"])
def test_a_turn_of_the_loop_receives_few_bytes_however_many_clients_send(
    server: SocketServer, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """All of it is there before the turn begins, and all of it is received in the end."""
    monkeypatch.setattr(receiving, "TURN_BYTES", 1 << 16)
    num_clients, turns = 24, [0]
    part = frame(b" " * MAX_BYTES)[:PART] if kind == "message" else bytes(PART)

    def counted(of: type) -> None:
        whole = of.data_received  # type: ignore[attr-defined]

        def received(protocol: Any, data: bytes) -> None:
            if not turns[-1]:
                server.loop.call_soon(turns.append, 0)
            turns[-1] += len(data)
            whole(protocol, data)

        monkeypatch.setattr(of, "data_received", received)

    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(server, HEAD if kind == "message" else b"")) for _ in range(num_clients)]
        if kind == "message":
            assert {wire.head() for wire in wires} == {101}
        counted(websocket.BoundedWebSocket if kind == "message" else uvicorn_protocol.BoundedHttp)
        sent, stopped = threading.Event(), threading.Event()

        def stop() -> None:
            stopped.set()
            sent.wait(WAIT_S)

        server.loop.call_soon_threadsafe(stop)
        assert stopped.wait(WAIT_S)
        head = b"" if kind == "message" else POST
        for wire in wires:
            wire.socket.sendall(head + part)
        sent.set()
        wait_until(lambda: sum(turns) == num_clients * len(head + part), "all is received")
    assert max(turns) <= receiving.TURN_BYTES + num_clients * receiving.LEAST_BYTES
    wait_until(lambda: server.service.bodies._bytes == 0, "all is given back")


def endless(server: SocketServer) -> None:
    t = server.tokenizer
    word, begun = t.encode("word "), [t.channel, *t.encode("final"), t.message]

    def script(request: GenerationRequest) -> Iterator[GenerationOutput]:
        yield GenerationOutput(request.request_id, begun)
        while request.request_id not in server.engine.cancelled:
            yield GenerationOutput(request.request_id, word)

    server.engine.script = script


def test_a_client_that_does_not_read_is_bounded_and_disturbs_nobody(server: SocketServer) -> None:
    endless(server)
    with Wire(server, HEAD + frame(CREATE), small=True):
        protocol = _stalled(server)
        request = server.engine.requests[-1].request_id
        server.saying("ok")
        with server.connect() as other:
            other.respond(input="hi", store=False)
        assert server.on_loop(protocol.transport.get_write_buffer_size) < 1 << 20
        server.on_loop(lambda: protocol._stall_timer.cancel())
        server.on_loop(protocol.transport.abort)  # as the timer does
        wait_until(lambda: request in server.engine.cancelled, "its response is cancelled")


def test_pings_of_a_client_that_does_not_read_do_not_pile_up(server: SocketServer) -> None:
    with Wire(server, small=True) as wire:
        wire.socket.settimeout(None)
        pings = frame(b"x" * 125, PING) * 1000
        sending = threading.Thread(target=_send_until_closed, args=(wire.socket, pings))
        sending.start()
        protocol = _stalled(server)
        assert server.on_loop(protocol.transport.get_write_buffer_size) < 1 << 20
        server.on_loop(protocol.transport.abort)
        sending.join(WAIT_S)
        assert not sending.is_alive()


def _send_until_closed(to: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        while True:
            to.sendall(data)


def _only(server: SocketServer) -> Any:
    def find() -> Any:
        found = [of for of in server.server.server_state.connections if isinstance(of, websocket.BoundedWebSocket)]
        return found[-1] if found else None

    return server.on_loop(find)


def _stalled(server: SocketServer) -> Any:
    found: list[Any] = []

    def is_stalled() -> bool:
        found[:] = [_only(server)]
        return found[0] is not None and found[0]._stall_timer is not None

    wait_until(is_stalled, "a client has stalled")
    return found[0]


def test_a_stalled_client_loses_its_connection(server: SocketServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(websocket, "STALLED_S", 0.0)
    endless(server)
    before = len(server.engine.requests)
    with Wire(server, HEAD + frame(CREATE), small=True):
        wait_until(lambda: len(server.engine.requests) > before, "it runs")
        request = server.engine.requests[-1].request_id
        wait_until(lambda: request in server.engine.cancelled, "its response is cancelled")


def test_an_idle_connection_gives_way_and_a_busy_one_does_not(model_folder: Path) -> None:
    with SocketServer(model_folder, max_connections=2) as server:
        t = server.tokenizer
        server.engine.script = lambda request: [GenerationOutput(request.request_id, [t.channel])]
        with server.connect() as busy, server.connect() as idle:
            busy.create(input="hi", store=False)
            busy.until("response.in_progress")
            server.saying("ok")
            with server.connect() as third:
                third.respond(input="hi", store=False)
                with pytest.raises(ConnectionClosed):
                    idle.event()
                request = server.engine.requests[0].request_id
                rest = [*t.encode("final"), t.message, *t.encode("Done."), t.return_]
                put = server.engine.streams[request].put
                server.on_loop(lambda: put(GenerationOutput(request, rest, finish_reason="stop")))
                assert busy.events()[-1]["type"] == "response.completed"


def test_a_server_that_stops_closes_its_connections(model_folder: Path) -> None:
    with SocketServer(model_folder) as server:
        client = server.connect()
    with client, pytest.raises(ConnectionClosed) as closed:
        client.event()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012
