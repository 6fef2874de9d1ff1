"""Attacks by WebSocket. Each returns what it did, and raises Broken for what it found broken itself."""

import asyncio
import base64
import json
import os
import random
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.serving.promises import Broken, require, wait
from benchmarks.serving.server import Server
from benchmarks.serving.siege.clients import HEALTHY, HOSTILE, ask, shown
from benchmarks.serving.siege.shapes import BODY_BYTES, CHAT, chat

IDLE, BUSY, SLOW, UNFINISHED, BROKEN = 1000, 64, 48, 160, 400
MAX_CONNECTIONS = 1400
TURNS = 3  # of each busy connection
WAIT_S = 60.0
_LEFT_S = 30.0
_TEXT, _CLOSE, _PING = 1, 8, 9
_REFUSED = {0, 1000, 1002, 1003, 1007, 1008, 1009, 1013}  # statuses of a close; 0: none


def _frame(data: bytes, opcode: int = _TEXT, *, fin: bool = True, key: bytes = bytes(4)) -> bytes:
    """A client's frame. The key is zeros unless it matters, as then the data stays as it is."""
    head = bytes([(0x80 if fin else 0) | opcode])
    if len(data) < 126:
        head += bytes([0x80 | len(data)])
    elif len(data) < 1 << 16:
        head += struct.pack("!BH", 0x80 | 126, len(data))
    else:
        head += struct.pack("!BQ", 0x80 | 127, len(data))
    masked = bytes(b ^ key[i % 4] for i, b in enumerate(data)) if any(key) else data
    return head + key + masked


class _Socket:
    """Context manager: a connection after its handshake."""

    def __init__(self, server: Server, key: bytes = HOSTILE) -> None:
        self._server, self._key = server, key

    async def __aenter__(self) -> "_Socket":
        self.reader, self.writer = await asyncio.open_connection(self._server.host, self._server.port, limit=1 << 16)
        nonce = base64.b64encode(os.urandom(16))
        lines = [b"GET /v1/responses HTTP/1.1", b"Host: localhost", b"Upgrade: websocket", b"Connection: Upgrade"]
        lines += [b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: " + nonce, self._key, b"", b""]
        self.writer.write(b"\r\n".join(lines))
        head = await self.reader.readuntil(b"\r\n\r\n")
        require(b" 101 " in head.partition(b"\r\n")[0], f"no WebSocket: {head[:200]!r}")
        return self

    async def __aexit__(self, *error: object) -> None:
        self.writer.transport.abort()

    def create(self, **body: Any) -> None:
        event = {"type": "response.create", "store": False, "input": "Tell me something.", **body}
        self.writer.write(_frame(json.dumps(event).encode(), key=os.urandom(4)))

    async def frame(self) -> tuple[int, bytes]:
        """Opcode and data; raises IncompleteReadError at the end."""
        head = await self.reader.readexactly(2)
        size = head[1]
        if size >= 126:
            size = int.from_bytes(await self.reader.readexactly(2 if size == 126 else 8), "big")
        return head[0] & 15, await self.reader.readexactly(size)

    async def last(self) -> dict[str, Any]:
        """The last event of a response."""
        async with asyncio.timeout(WAIT_S):
            while True:
                opcode, data = await self.frame()
                require(opcode != _CLOSE, f"a connection was closed: {data!r}")
                if opcode == _TEXT and b'"type":"response.' in data and b'"status":"in_progress"' not in data:
                    event = json.loads(data)
                    if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
                        return dict(event["response"])
                require(not data.startswith(b'{"type":"error"'), f"an error: {data[:300]!r}")

    async def closed(self) -> int:
        """The status of the close; 0 without one."""
        try:
            async with asyncio.timeout(WAIT_S):
                while True:
                    opcode, data = await self.frame()
                    if opcode == _CLOSE:
                        return int.from_bytes(data[:2], "big")
        except (OSError, asyncio.IncompleteReadError):
            return 0
        except TimeoutError:
            raise Broken("a connection with a broken frame stays open") from None


def _answers(server: Server) -> None:
    status, answer = ask(server, HEALTHY, CHAT, chat())
    require(status == 200, f"{status} {answer} for a small request beside WebSockets")


def idle_sockets(server: Server) -> str:
    async def run() -> float:
        sockets = [_Socket(server) for _ in range(IDLE)]
        for begin in range(0, IDLE, 50):
            await asyncio.gather(*(one.__aenter__() for one in sockets[begin : begin + 50]))
        await asyncio.to_thread(_answers, server)
        held = await asyncio.to_thread(server.metric, "oscine:http_connections")
        sockets[0].create(max_output_tokens=8)
        sockets[-1].create(max_output_tokens=8)
        await asyncio.gather(sockets[0].last(), sockets[-1].last())
        for one in sockets:
            await one.__aexit__()
        return held

    held = asyncio.run(run())
    require(held >= IDLE, f"{held:.0f} of {IDLE} idle WebSockets are open")
    return f"{IDLE} idle, and all may ask"


def busy_sockets(server: Server) -> str:
    """Each continues its own conversation, and gets the same text as the others."""

    async def one(texts: Counter[str]) -> None:
        async with _Socket(server) as socket:
            previous = None
            for _ in range(TURNS):
                socket.create(max_output_tokens=64, previous_response_id=previous)
                made = await socket.last()
                previous = made["id"]
                texts[json.dumps([item.get("content") for item in made["output"]])] += 1

    async def run() -> Counter[str]:
        texts: Counter[str] = Counter()
        await asyncio.gather(*(one(texts) for _ in range(BUSY)))
        return texts

    texts = asyncio.run(run())
    require(sum(texts.values()) == BUSY * TURNS, f"{sum(texts.values())} responses of {BUSY * TURNS}")
    require(min(texts.values()) >= BUSY, "the same requests got different texts")
    return f"{BUSY} busy, {BUSY * TURNS} responses"


def slow_sockets(server: Server) -> str:
    """They ask for much and read nothing; then they leave, and their work ends."""
    alone = server.metric("oscine:http_requests_in_progress")

    async def run() -> None:
        sockets = [_Socket(server) for _ in range(SLOW)]
        await asyncio.gather(*(one.__aenter__() for one in sockets))
        for one in sockets:
            one.writer.transport.pause_reading()  # type: ignore[attr-defined]
            for lane in range(8):
                one.create(max_output_tokens=4000, stream_id=f"lane {lane}")
            one.writer.write(_frame(b"x" * 125, _PING) * 2000)
        await asyncio.sleep(3)
        await asyncio.to_thread(_answers, server)
        for one in sockets:
            await one.__aexit__()

    asyncio.run(run())
    ended = wait(lambda: server.metric("oscine:http_requests_in_progress") <= alone, _LEFT_S)
    require(ended, "what slow readers asked for goes on after they left")
    return f"{SLOW} that read nothing"


def unfinished_messages(server: Server) -> str:
    """Messages that lack their last byte, more of them than the server may hold."""
    part = _frame(b" " * (BODY_BYTES - 100))[:-1]

    async def run() -> None:
        sockets = [_Socket(server) for _ in range(UNFINISHED)]
        await asyncio.gather(*(one.__aenter__() for one in sockets))
        for one in sockets:
            one.writer.write(part)
        await asyncio.gather(*(one.writer.drain() for one in sockets), return_exceptions=True)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(_answers, server)
        for one in sockets:
            await one.__aexit__()

    asyncio.run(run())
    return f"{UNFINISHED} of {BODY_BYTES >> 20} MiB"


def broken_frames(seed: int) -> Callable[[Server], str]:
    """Random bytes, and requests with some bytes changed: each connection is closed or goes on, and no other is."""

    def hostile(random_: random.Random) -> bytes:
        event = json.dumps({"type": "response.create", "input": "hi", "store": False, "max_output_tokens": 8}).encode()
        kind = random_.randrange(6)
        if kind == 0:
            return random_.randbytes(random_.randrange(1, 400))
        if kind == 1:
            sent = bytearray(_frame(event) * 3)
            for _ in range(random_.randrange(1, 6)):
                sent[random_.randrange(len(sent))] = random_.randrange(256)
            return bytes(sent)
        if kind == 2:  # a length that never comes
            return struct.pack("!BBQ", 0x81, 0xFF, random_.randrange(1 << 62))
        if kind == 3:  # fragments without an end
            return _frame(b"", fin=False) + _frame(b"", 0, fin=False) * random_.randrange(1, 30_000)
        if kind == 4:
            return _frame(random_.randbytes(random_.randrange(200)))
        return _frame(b'{"type":' + b"[" * random_.randrange(100_000))

    async def one(server: Server, sent: bytes) -> int:
        async with _Socket(server) as socket:
            try:
                socket.writer.write(sent + _frame(struct.pack("!H", 1000), _CLOSE))
                socket.writer.write_eof()
            except OSError:
                return 0
            return await socket.closed()

    def run(server: Server) -> str:
        random_ = random.Random(seed)
        made = [hostile(random_) for _ in range(BROKEN)]

        async def attack() -> Counter[str]:
            statuses: Counter[str] = Counter()
            async with _Socket(server, HEALTHY) as healthy:
                for begin in range(0, BROKEN, 25):
                    for status in await asyncio.gather(*(one(server, sent) for sent in made[begin : begin + 25])):
                        require(status in _REFUSED, f"a connection was closed with {status}")
                        statuses[str(status)] += 1
                    healthy.create(max_output_tokens=8)
                    await healthy.last()
            return statuses

        return f"{BROKEN} connections ({shown(asyncio.run(attack()))})"

    return run
