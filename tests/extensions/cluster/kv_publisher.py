"""A publisher of KV events as vLLM describes it, that can lose messages and start again at the same address."""

import time
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from oscine.types import EngineStats

END = (-1).to_bytes(8, "big", signed=True)


def bind(socket: zmq.asyncio.Socket, address: str) -> None:
    """Once whoever was there before is gone."""
    end_s = time.monotonic() + 30
    while True:
        try:
            socket.bind(address)
            return
        except zmq.ZMQError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.01)


class Publisher:
    """One life: numbers begin at 0. `kept` messages can be given again; 0 is none."""

    def __init__(self, context: zmq.asyncio.Context, *, kept: int = 1000, ports: tuple[int, int] | None = None) -> None:
        self._events = context.socket(zmq.PUB)
        self._replay = context.socket(zmq.ROUTER)
        for socket in (self._events, self._replay):
            socket.set(zmq.LINGER, 0)
        if ports is None:
            bound = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (self._events, self._replay)]
            ports = (bound[0], bound[1])
        else:
            for socket, port in zip((self._events, self._replay), ports, strict=True):
                bind(socket, f"tcp://127.0.0.1:{port}")
        self.ports = ports
        self._kept = kept
        self._messages: list[bytes] = []
        self.replays = 0  # times that it was asked

    @property
    def events_address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[0]}"

    @property
    def replay_address(self) -> str:
        return f"tcp://127.0.0.1:{self.ports[1]}"

    async def publish(self, *events: list[Any], lose: bool = False) -> None:
        payload = msgspec.msgpack.encode([time.time(), list(events), None])
        number = len(self._messages)
        self._messages.append(payload)
        if not lose:
            await self._events.send_multipart([b"kv-events", number.to_bytes(8, "big"), payload])

    async def store(self, *pages: bytes, lose: bool = False) -> None:
        await self.publish(["BlockStored", list(pages), None, [1, 2, 3], 16, None, "GPU"], lose=lose)

    async def remove(self, *pages: bytes, lose: bool = False) -> None:
        await self.publish(["BlockRemoved", list(pages), "GPU"], lose=lose)

    async def report(self, stats: EngineStats) -> None:
        await self._events.send_multipart([b"oscine-stats", msgspec.msgpack.encode(stats)])

    async def serve(self) -> None:
        """Answers those who missed something; runs until it is cancelled."""
        while True:
            client, empty, start = await self._replay.recv_multipart()
            self.replays += 1
            first = max(int.from_bytes(start, "big"), len(self._messages) - self._kept)
            for number in range(first, len(self._messages)):
                await self._replay.send_multipart([client, empty, number.to_bytes(8, "big"), self._messages[number]])
            await self._replay.send_multipart([client, empty, END, b""])

    def close(self) -> None:
        self._events.close()
        self._replay.close()
