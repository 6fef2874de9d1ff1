"""Events of the KV cache as a subscriber of vLLM's would read them, from a real engine process."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from oscine.engine.core.prefix_index import extend_digests, root_of
from oscine.engine.process.client import EngineClient, EngineError
from oscine.extensions.kv_events.publisher import KEPT_BYTES, KVEvents, page_hash
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, PeerOptions
from oscine.types import EngineStats
from tests.engine_process.harness import options, read, request, run, serving, tokens
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines

SEED = "0123456789abcdef"
PAGE = 16
PROMPT = [(7 * i) % 250 for i in range(100)]


# As vLLM's reader declares them, but for the names.
class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list["Stored | Removed | Cleared"]
    data_parallel_rank: int


class Stored(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class Removed(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


decode = msgspec.msgpack.Decoder(Batch).decode


class Follower:
    """The pages that an engine has, by its events."""

    def __init__(self) -> None:
        self.pages: dict[int | bytes, tuple[int | bytes | None, list[int]]] = {}  # hash -> that before it, tokens
        self.numbers: list[int] = []
        self.stats: list[EngineStats] = []

    def take(self, frames: list[bytes]) -> None:
        if frames[0] == b"oscine-stats":
            _, payload = frames
            self.stats.append(msgspec.msgpack.decode(payload, type=EngineStats))
            return
        topic, number, payload = frames
        assert (topic, len(number)) == (b"kv-events", 8)
        self.apply(int.from_bytes(number, "big"), payload)

    def apply(self, number: int, payload: bytes) -> None:
        self.numbers.append(number)
        batch = decode(payload)
        assert batch.data_parallel_rank == 0
        assert abs(batch.ts - time.time()) < 600
        for event in batch.events:
            match event:
                case Stored():
                    self._store(event)
                case Removed():
                    assert event.medium == "GPU"
                    for page in event.block_hashes:
                        del self.pages[page]
                case Cleared():
                    self.pages.clear()

    def _store(self, event: Stored) -> None:
        assert (event.block_size, event.lora_id, event.lora_name, event.medium) == (PAGE, None, None, "GPU")
        assert len(event.token_ids) == PAGE * len(event.block_hashes)
        parent = event.parent_block_hash
        for i, page in enumerate(event.block_hashes):
            self.pages[page] = (parent, event.token_ids[i * PAGE : (i + 1) * PAGE])
            parent = page

    def texts(self) -> set[tuple[int, ...]]:
        """The prefixes that are cached: all tokens up to the end of each page."""
        return {tuple(self._text(page)) for page in self.pages}

    def _text(self, page: int | bytes) -> list[int]:
        parent, tokens = self.pages[page]
        return (self._text(parent) if parent is not None else []) + tokens


@asynccontextmanager
async def following(address: str, *topics: bytes) -> AsyncIterator[Follower]:
    follower = Follower()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        for topic in topics:
            socket.subscribe(topic)
        socket.connect(address)

        async def follow() -> None:
            while True:
                follower.take(await socket.recv_multipart())

        task = asyncio.create_task(follow())
        yield follower
        task.cancel()
        await asyncio.wait((task,))
        if task.done() and not task.cancelled():
            task.result()


def replay(address: str, start: int) -> list[tuple[int, bytes]]:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.RCVTIMEO, 20_000)
        socket.set(zmq.RCVHWM, 0)
        socket.connect(address)
        socket.send_multipart((b"", start.to_bytes(8, "big")))
        found: list[tuple[int, bytes]] = []
        while True:
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == -1:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))


def from_the_beginning(address: str) -> Follower:
    follower = Follower()
    for number, payload in replay(address, 0):
        follower.apply(number, payload)
    return follower


def publishing(folder: Path, executor: str = "fake", **peers: Any) -> EngineOptions:
    return replace(
        options(folder, executor=executor),
        cache=CacheOptions(kv_cache_bytes=1 << 22, page_size=PAGE),
        peers=PeerOptions(**{"host": "127.0.0.1", "kv_events": True, "prefix_seed": SEED, **peers}),
    )


def endpoints(client: EngineClient) -> tuple[str, str, str]:
    assert client.info is not None
    places = client.info.endpoints
    assert places is not None
    assert places.kv_events is not None
    assert places.kv_replay is not None
    return places.requests, places.kv_events, places.kv_replay


def hashes_of(text: list[int]) -> list[int]:
    digests: list[bytes] = []
    extend_digests(digests, text, len(text) // PAGE, page_size=PAGE, root=root_of(SEED))
    return [page_hash(digest) for digest in digests]


def test_the_embedded_model_says_what_it_caches() -> None:
    embedded = replace(publishing(Path(), executor="torch"), model=ModelOptions())

    async def test() -> None:
        async with serving(embedded) as client:
            _, events, again = endpoints(client)
            async with following(events, b"kv-events") as follower:
                await until_connected(client, follower)
                outputs = await read(client.submit(request("a", PROMPT, max_tokens=40, temperature=0.0)))
                text = PROMPT + tokens(outputs)[:-1]  # nothing is computed of the last one
                await until(lambda: hashes_of(text)[-1] in follower.pages)
                known = from_the_beginning(again)
                assert set(hashes_of(text)) <= known.pages.keys()
                assert {tuple(text[:end]) for end in range(PAGE, len(text) + 1, PAGE)} <= known.texts()

    run(test)


async def until_connected(client: EngineClient, follower: Follower) -> None:
    """A subscription takes a moment; each request stores a page, until one is seen."""
    count = 0
    while not follower.numbers:
        await read(client.submit(request(f"probe {count}", [200 + count % 50] * PAGE, max_tokens=2)))
        count += 1
        await asyncio.sleep(0.01)


def test_evictions_are_told_and_what_is_followed_is_what_is_replayed(folder: Path) -> None:
    async def test() -> None:
        async with serving(publishing(folder)) as client:
            _, events, again = endpoints(client)
            async with following(events, b"kv-events") as follower:
                await until_connected(client, follower)
                afresh = from_the_beginning(again)
                await until(lambda: follower.numbers[-1] == afresh.numbers[-1])
                follower.pages = afresh.pages.copy()
                for i in range(12):
                    prompt = [(i * j + j) % 250 for j in range(3500)]
                    await read(client.submit(request(f"r{i}", prompt, max_tokens=20)))
                messages = replay(again, 0)
                assert [number for number, _ in messages] == list(range(len(messages)))
                assert decode(messages[0][1]).events == [Cleared()]
                afresh = from_the_beginning(again)
                await until(lambda: follower.numbers[-1] == afresh.numbers[-1])
                assert follower.numbers == afresh.numbers[follower.numbers[0] :]
                assert follower.pages == afresh.pages
                assert any(isinstance(e, Removed) for _, payload in messages for e in decode(payload).events)
                assert 0 < len(afresh.pages) <= client.stats.full_pages_total
                assert [n for n, _ in replay(again, 3)] == afresh.numbers[3:]
                assert replay(again, len(messages)) == []

    run(test)


def test_statistics_come_beside_the_events(folder: Path) -> None:
    async def test() -> None:
        async with serving(replace(publishing(folder), fake_step_s=0.01)) as client:
            _, events, _ = endpoints(client)
            async with following(events, b"") as follower:
                await until(lambda: len(follower.stats) >= 2)  # nothing runs, and they come
                assert follower.stats[-1].num_running == 0
                await read(client.submit(request("a", PROMPT, max_tokens=60)))
                await until(lambda: follower.stats[-1].generated_tokens == 60)
                assert follower.stats[-1] == client.stats
                assert any(stats.num_running == 1 for stats in follower.stats)
                assert follower.numbers
                await until(lambda: follower.stats[-1].kv_event_messages == follower.numbers[-1] + 1)

    run(test)


def test_a_new_engine_begins_with_number_zero_and_an_empty_cache(folder: Path) -> None:
    async def test() -> None:
        async with serving(publishing(folder)) as client:
            await read(client.submit(request("a", PROMPT)))
            before = endpoints(client)
            assert len(replay(before[2], 0)) > 1
            assert client.pid is not None
            os.kill(client.pid, signal.SIGKILL)
            await until(lambda: client.state == "restarting")
            await client.wait_ready()
            [(number, payload)] = replay(endpoints(client)[2], 0)
            assert number == 0
            assert decode(payload).events == [Cleared()]

    run(test)


def test_fixed_endpoints_for_readers_beside_a_single_server(folder: Path, tmp_path: Path) -> None:
    """As --kv-events-config has them: no cluster, so no statistics, and nobody else may send requests."""
    here = {name: f"ipc://{tmp_path}/{name}" for name in ("events", "replay")}
    peers: dict[str, Any] = {"host": None, "kv_events_endpoint": here["events"], "kv_replay_endpoint": here["replay"]}

    async def test() -> None:
        async with serving(publishing(folder, **peers, kv_events_topic="kv@pod@model", kv_events_kept=3)) as client:
            assert client.info is not None
            assert client.info.endpoints is None
            await read(client.submit(request("a", PROMPT, max_tokens=100)))
            kept = replay(here["replay"], 0)
            assert len(kept) == 3
            assert kept[0][0] > 3
            with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
                socket.subscribe(b"")
                socket.connect(here["events"])
                reading = asyncio.ensure_future(socket.recv_multipart())
                count = 0
                while not reading.done():
                    await read(client.submit(request(f"r{count}", [count] * 40)))
                    count += 1
                assert (await reading)[0] == b"kv@pod@model"

    run(test)


@pytest.mark.parametrize("name", ["kv_events_endpoint", "kv_replay_endpoint"])
def test_an_endpoint_that_cannot_be_had_is_named(folder: Path, name: str) -> None:
    async def test() -> None:
        client = EngineClient(publishing(folder, **{name: "tcp://*:http"}, kv_events_open=True))
        await client.start()
        with pytest.raises(EngineError, match=r"--kv-events-config: tcp://\*:http: Invalid argument"):
            await client.wait_ready()
        await client.stop()

    run(test)


def test_strangers_at_the_replay_socket_disturb_nobody(folder: Path) -> None:
    async def test() -> None:
        async with serving(publishing(folder)) as client:
            _, _, again = endpoints(client)
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 1000)
                stranger.connect(again)
                for frames in ([b"x"], [b"", b"1"], [b"", b"", b"\0" * 8], [b"", b"\xff" * 8]):
                    stranger.send_multipart(frames)
            assert len(replay(again, 0)) == 1

    run(test)


@contextmanager
def publisher() -> Iterator[KVEvents]:
    events = KVEvents(PeerOptions(host="127.0.0.1", kv_events=True), PAGE)
    try:
        yield events
    finally:
        events.close()


def test_events_of_a_step_are_one_message_in_the_order_in_which_they_were() -> None:
    digests = [bytes([i]) * 16 for i in range(6)]
    text = list(range(6 * PAGE))
    with publisher() as events:
        assert events.replay_endpoint is not None
        events.removed([digests[5]])
        events.removed([digests[4]])
        events.stored(digests, text, [0, 1, 3, 5])
        events.removed([digests[0]])
        events.removed([])
        events.flush()
        events.flush()
        _, (number, payload) = replay(events.replay_endpoint, 0)
    h = [page_hash(digest) for digest in digests]
    assert number == 1
    assert decode(payload).events == [
        Removed([h[5], h[4]], "GPU"),
        Stored([h[0], h[1]], None, text[: 2 * PAGE], PAGE, None, "GPU", None),
        Stored([h[3]], h[2], text[3 * PAGE : 4 * PAGE], PAGE, None, "GPU", None),
        Stored([h[5]], h[4], text[5 * PAGE :], PAGE, None, "GPU", None),
        Removed([h[0]], "GPU"),
    ]
    assert h[1] == 0x0101010101010101


def test_what_is_kept_for_replays_is_bounded_in_bytes() -> None:
    text = [200_000] * (16_384 * PAGE)
    with publisher() as events:
        assert events.replay_endpoint is not None
        for i in range(60):
            events.stored([bytes([i]) * 16] * 16_384, text, list(range(16_384)))
            events.flush()
        kept = replay(events.replay_endpoint, 0)
    sizes = [len(payload) for _, payload in kept]
    assert [number for number, _ in kept] == list(range(61 - len(kept), 61))
    assert sum(sizes) <= KEPT_BYTES < sum(sizes) + max(sizes)
