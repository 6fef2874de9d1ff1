"""KV pages of one node, read by another one through NIXL, as engines do.

    python -m tests.nodes.pages serve PAGES          prints its endpoint, and lets others read until it is killed
    python -m tests.nodes.pages read PAGES ENDPOINT  reads lines of standard input: each reads all pages once
    python -m tests.nodes.pages receive              raw TCP beside it: prints its port, takes all bytes
    python -m tests.nodes.pages send ADDRESS PORT BYTES

Each answer is one line of JSON.
"""

import json
import socket
import sys
import time
from typing import Any

import numpy as np
from msgspec import msgpack

from oscine.engine.wire.endpoint import KVEndpoint
from oscine.extensions.disaggregation.nixl import KVTransfer, NixlTransfer
from oscine.extensions.disaggregation.transport import way
from oscine.kv_group import KVGroup
from oscine.types import PageMoves, RankMemory, Region

GROUP = KVGroup(None, tuple(range(12)), 64, 8, 16, "bfloat16")
_LOOK_S = 0.0002
_CHUNK = 1 << 20


def _memory(num_pages: int, seed: int | None) -> np.ndarray:
    """[pages, bytes of a page]. Without a seed: zeros."""
    shape = (num_pages, GROUP.page_bytes)
    return np.zeros(shape, np.uint8) if seed is None else np.random.default_rng(seed).integers(1, 255, shape, np.uint8)


def _transfer(memory: np.ndarray) -> KVTransfer:
    region = Region(memory.ctypes.data, len(memory), memory.strides[0])
    return KVTransfer("m", [GROUP], RankMemory(b"", "DRAM", 0, [region]), owner=memory)


def serve(num_pages: int) -> None:
    transfer = _transfer(_memory(num_pages, seed=1))
    transfer.attend(True)
    print(msgpack.encode(KVEndpoint("m", [GROUP], transfer.memories, transfer.transport)).hex(), flush=True)
    sys.stdin.read()


def read(num_pages: int, endpoint: KVEndpoint) -> None:
    memory, expected = _memory(num_pages, seed=None), _memory(num_pages, seed=1)
    transfer = _transfer(memory)
    peer = transfer.connect(endpoint.model, endpoint.groups, endpoint.ranks)
    order = np.random.default_rng(2).permutation(num_pages).tolist()
    for _ in sys.stdin:
        memory[:] = 0
        begun_s = time.monotonic()
        moved = transfer.start(peer, [PageMoves(0, order, list(range(num_pages)))])
        found = _end(moved, begun_s) | {"way": way(transfer.transport, endpoint.transport)}
        print(json.dumps(found | {"equal": bool((memory == expected[order]).all())}), flush=True)
        if moved.state == "failed":
            transfer.disconnect(peer)


def _end(moved: NixlTransfer, begun_s: float) -> dict[str, Any]:
    while moved.state == "running":
        time.sleep(_LOOK_S)
    seconds = time.monotonic() - begun_s
    return {"state": moved.state, "error": moved.error, "bytes": moved.num_bytes, "seconds": seconds}


def receive() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        print(server.getsockname()[1], flush=True)
        one, _ = server.accept()
        buffer = bytearray(_CHUNK)
        while one.recv_into(buffer):
            pass
        one.sendall(b"1")


def send(address: str, port: int, num_bytes: int) -> None:
    data = bytes(_CHUNK)
    with socket.create_connection((address, port)) as one:
        begun_s = time.monotonic()
        for _ in range(num_bytes // _CHUNK):
            one.sendall(data)
        one.shutdown(socket.SHUT_WR)
        one.recv(1)
        print(json.dumps({"bytes": num_bytes, "seconds": time.monotonic() - begun_s}))


def main(what: str, *arguments: str) -> None:
    match what:
        case "serve":
            serve(int(arguments[0]))
        case "read":
            read(int(arguments[0]), msgpack.decode(bytes.fromhex(arguments[1]), type=KVEndpoint))
        case "receive":
            receive()
        case "send":
            send(arguments[0], int(arguments[1]), int(arguments[2]))


if __name__ == "__main__":
    main(*sys.argv[1:])
