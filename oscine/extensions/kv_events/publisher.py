"""Publishes the events of the prefix cache over ZeroMQ in vLLM's format, for the routers of Dynamo, llm-d and our own.

A message has three frames: topic, number (8 bytes, big-endian, from 0) and MessagePack of [time, events, rank]. Events:

    ["BlockStored", hashes, hash of the page before or nil, token ids of all these pages, page size, nil, medium, nil]
    ["BlockRemoved", hashes, medium]
    ["AllBlocksCleared"]

The medium is "GPU" for the memory of the model, on any device, "CPU" for host memory beside it, and "DISK" for files.
Pages that are stored in one of the last two are told without tokens and without the page before.

Events cover the full-attention group, which decides how long a prefix can be. The first message of an engine's life is
AllBlocksCleared. Messages to a slow subscriber are dropped. It sees a gap in the numbers, and asks the replay socket (a
ROUTER) with an empty frame and the first number that it wants. It gets each kept message as an empty frame, number and
payload. The number -1 with an empty payload comes last.

In a cluster the same socket carries statistics of the engine. They have a topic of their own and two frames, so readers
that take all topics can tell them from events. They count the messages of events before them.

The hash of a page is an integer, made of the first 8 bytes of its digest. All readers take integers of 64 bits. vLLM
now sends bytes by default, which some readers refuse and others cut to their last 8. No heartbeats are sent, as the
ZeroMQ of some readers lacks them; a subscriber may send its own.

Publishing never waits.
"""

import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from msgspec import msgpack

from oscine.engine.core.prefix_index import Medium
from oscine.engine.wire.tcp import bind_tcp, bind_to
from oscine.settings.config import PeerOptions
from oscine.types import EngineStats

STATS_TOPIC = b"oscine-stats"
END = (-1).to_bytes(8, "big", signed=True)  # number after the last message of a replay

_RANK = 0
_MAX_UNSENT = 10_000  # messages to one subscriber; it asks again for those that it missed
KEPT_BYTES = 64 << 20  # of the messages kept for replays, which carry the tokens of long prompts

_encode = msgpack.Encoder().encode


def page_hash(digest: bytes) -> int:
    """The hash in events of the page whose prefix has this digest."""
    return int.from_bytes(digest[:8], "big")


def page_hashes(digests: Sequence[bytes]) -> list[int]:
    """As page_hash() of each."""
    hashes = array("Q", b"".join([digest[:8] for digest in digests]))
    if sys.byteorder == "little":
        hashes.byteswap()
    return hashes.tolist()


class KVEvents:
    """Collects events while a step is made and committed, and publishes them on flush. Called by one thread."""

    def __init__(self, options: PeerOptions, page_size: int) -> None:
        """Raises ValueError for an endpoint that cannot be bound."""
        self._page_size = page_size
        self._topic = options.kv_events_topic.encode()
        self._with_stats = options.host is not None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, _MAX_UNSENT)
        self._socket.set(zmq.LINGER, 0)
        self._replay = _Replay(self._context, options.kv_events_kept)
        try:
            self.endpoint = _bind(self._socket, options.kv_events_endpoint, options)
            self.replay_endpoint = self._replay.listen(options)
        except ValueError:
            self.close()
            raise
        self._num_sent = 0
        self._events: list[list[Any]] = [["AllBlocksCleared"]]
        self.flush()

    def stored(self, digests: list[bytes], token_ids: list[int], places: Sequence[int]) -> None:
        """The prefix cache has learnt these pages, in order, of the prefix with these digests and tokens."""
        size = self._page_size
        for first, end in _runs(places):
            hashes = page_hashes(digests[first:end])
            parent = page_hash(digests[first - 1]) if first else None
            tokens = token_ids[first * size : end * size]
            self._events.append(["BlockStored", hashes, parent, tokens, size, None, "GPU", None])

    def offloaded(self, digests: list[bytes], medium: Medium) -> None:
        """Pages are in another medium as well; their tokens and the pages before them are not told again."""
        if digests:
            hashes = page_hashes(digests)
            self._events.append(["BlockStored", hashes, None, [], self._page_size, None, medium, None])

    def removed(self, digests: list[bytes], medium: Medium = "GPU") -> None:
        """A medium has lost pages."""
        if not digests:
            return
        if self._events and self._events[-1][::2] == ["BlockRemoved", medium]:
            self._events[-1][1].extend(page_hashes(digests))
        else:
            self._events.append(["BlockRemoved", page_hashes(digests), medium])

    def flush(self) -> None:
        """Publishes what has been collected."""
        if self._events:
            payload = _encode((time.time(), self._events, _RANK))
            number = self._num_sent.to_bytes(8, "big")
            self._num_sent += 1
            self._events = []
            self._replay.keep(number, payload)
            self._send(self._topic, number, payload)

    def publish_stats(self, stats: EngineStats) -> None:
        """Adds how many messages of events were sent before: a subscriber may have missed the last ones."""
        stats.kv_event_messages = self._num_sent
        if self._with_stats:
            self._send(STATS_TOPIC, _encode(stats))

    def _send(self, *frames: bytes) -> None:
        """Takes a third of the time of send_multipart, in the middle of a step."""
        for frame in frames[:-1]:
            self._socket.send(frame, zmq.SNDMORE)
        self._socket.send(frames[-1])

    def close(self) -> None:
        self._socket.close()
        self._replay.close()


class _Replay:
    """Sends messages again, from a thread of its own. It answers during a long step, and no step waits for it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], num_kept: int) -> None:
        self._context = context
        self._num_kept = num_kept
        self._kept: deque[tuple[bytes, bytes]] = deque()  # number, payload
        self._kept_bytes = 0
        self._lock = threading.Lock()  # over these two
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)  # bounded by what is kept
        self._socket.set(zmq.LINGER, 0)
        self._thread: threading.Thread | None = None

    def listen(self, options: PeerOptions) -> str | None:
        if options.host is None and options.kv_replay_endpoint is None:
            return None
        endpoint = _bind(self._socket, options.kv_replay_endpoint, options)
        self._thread = threading.Thread(target=self._serve, name="kv-events-replay", daemon=True)
        self._thread.start()
        return endpoint

    def keep(self, number: bytes, payload: bytes) -> None:
        with self._lock:
            self._kept.append((number, payload))
            self._kept_bytes += len(payload)
            while len(self._kept) > self._num_kept or self._kept_bytes > KEPT_BYTES:
                self._kept_bytes -= len(self._kept.popleft()[1])

    def close(self) -> None:
        """Ends the context too: that is how the thread learns of it."""
        if self._thread is None:
            self._socket.close()
        self._context.term()

    def _serve(self) -> None:
        try:
            while True:
                client, *frames = self._socket.recv_multipart()
                if len(frames) == 2 and len(frames[1]) == 8:  # other frames come from a stranger
                    self._give_again(client, frames[1])
        except zmq.ContextTerminated:
            self._socket.close()

    def _give_again(self, client: bytes, first: bytes) -> None:
        with self._lock:
            kept = list(self._kept)
        for number, payload in kept:
            if number >= first:
                self._socket.send_multipart((client, b"", number, payload))
        self._socket.send_multipart((client, b"", END, b""))


def _bind(socket: zmq.Socket[Any], endpoint: str | None, options: PeerOptions) -> str:
    """Binds a given endpoint without a key, or a free port of the host with the key. Returns the endpoint."""
    if endpoint is None:
        assert options.host is not None
        return bind_tcp(socket, options.host, options.key)
    return bind_to(socket, endpoint, "--kv-events-config", everywhere=options.kv_events_open)


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of neighbours among ascending numbers: the first of each, and the one after its last."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1:
            yield pages[start], pages[i - 1] + 1
            start = i
