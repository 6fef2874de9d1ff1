"""Connections share what a turn of the event loop receives."""

import asyncio
import socket
from contextlib import ExitStack

import pytest
import uvloop

from oscine.api.http import receiving
from oscine.api.http.receiving import ReadThrottle, ThrottledProtocol

NUM_ENDLESS = 23
SIZE = 1 << 18  # bytes that the client sends, after which it is done
TURN, READ, LEAST = 1 << 16, 1 << 13, 1 << 8  # bytes: less than the kernel keeps of one connection


class Counted(asyncio.Protocol):
    num_bytes = 0

    def data_received(self, data: bytes) -> None:
        self.num_bytes += len(data)


def send(to: socket.socket, size: int) -> int:
    """What the kernel takes of it now."""
    try:
        return to.send(bytes(size))
    except BlockingIOError:
        return 0


async def received(stack: ExitStack, sizes: list[int], num_turns: int) -> list[list[int]]:
    """The bytes that were received of each connection, after each of the turns. `sizes`: bytes that are sent."""
    throttle, targets, clients = ReadThrottle(), [Counted() for _ in sizes], list[socket.socket]()
    for target in targets:
        client, server = socket.socketpair()
        stack.enter_context(client)
        client.setblocking(False)
        server.setblocking(False)
        clients.append(client)
        protocol = ThrottledProtocol(target, throttle)
        transport, _ = await asyncio.get_running_loop().connect_accepted_socket(lambda of=protocol: of, server)
        stack.callback(transport.abort)
    left, turns = [*sizes], list[list[int]]()
    for _ in range(num_turns):
        for index, client in enumerate(clients):
            left[index] -= send(client, min(left[index], 1 << 20)) if left[index] else 0
        await asyncio.sleep(0)
        turns.append([target.num_bytes for target in targets])
    return turns


def turns_of(sizes: list[int], num_turns: int, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    monkeypatch.setattr(receiving, "TURN_BYTES", TURN)
    monkeypatch.setattr(receiving, "READ_BYTES", READ)
    monkeypatch.setattr(receiving, "LEAST_BYTES", LEAST)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
        return runner.run(received(stack, sizes, num_turns))


def test_a_client_among_endless_senders_gets_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    shares_per_turn, num_connections = TURN // READ, NUM_ENDLESS + 1
    most = 2 * (SIZE // READ) * -(-num_connections // shares_per_turn)
    turns = turns_of([1 << 40] * NUM_ENDLESS + [SIZE], most, monkeypatch)
    done = next((turn for turn in turns if turn[-1] == SIZE), None)
    assert done is not None, f"{turns[-1][-1]} bytes of the client after {most} turns"
    assert max(done[:-1]) <= SIZE + 2 * TURN
    assert min(done[:-1]) >= SIZE - 2 * TURN


def test_one_connection_alone_has_whole_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    num_turns = 20
    ((*_, whole),) = [[turn[0] for turn in turns_of([1 << 40], num_turns, monkeypatch)]]
    assert whole >= TURN * (num_turns - 2)
