"""Connections without the cluster's key, and hostile requests, which must not make a step fail."""

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from oscine.engine.process.client import EngineClient
from oscine.engine.wire import tcp
from oscine.engine.wire.messages import (
    Hello,
    Met,
    Outputs,
    Prefill,
    PrefillRefused,
    Ready,
    Submit,
    ToClient,
    decode_to_client,
    encode,
)
from oscine.settings.config import EngineOptions, PeerOptions
from oscine.types import Endpoints, GenerationRequest, PrefillSource, SamplingParams

from .harness import PATIENCE_S, options, read, request, run, serving, tokens

pytestmark = pytest.mark.long  # each starts engines

KEY, OTHER = "k" * 32, "o" * 32
REFUSED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


def peer(folder: Path, executor: str = "fake", **peers: Any) -> EngineOptions:
    return replace(options(folder, executor), peers=PeerOptions(**{"host": "127.0.0.1", "key": KEY, **peers}))


def endpoints(client: EngineClient) -> Endpoints:
    assert client.info is not None
    assert client.info.endpoints is not None
    return client.info.endpoints


@contextmanager
def connection(address: str, key: str, kind: int = zmq.DEALER) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.set(zmq.LINGER, 0)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        monitor = socket.get_monitor_socket(REFUSED)
        tcp.connect(socket, address, key)
        try:
            yield socket
        finally:
            socket.disable_monitor()
            monitor.close()


def hear(socket: zmq.Socket[bytes], *wanted: type) -> ToClient:
    """The next message of one of these kinds; messages with statistics only are skipped."""
    while socket.poll(1000 * PATIENCE_S):
        message = decode_to_client(socket.recv())
        if isinstance(message, wanted) and getattr(message, "outputs", True):
            return message
    raise AssertionError("it says nothing")


def wait_refused(socket: zmq.Socket[bytes]) -> None:
    assert socket.get_monitor_socket(REFUSED).poll(1000 * PATIENCE_S)


@pytest.mark.needs("kv_events")
@pytest.mark.parametrize("key", ["", OTHER])
def test_strangers_are_neither_heard_nor_told_anything(folder: Path, key: str) -> None:
    async def test() -> None:
        async with serving(peer(folder, kv_events=True)) as owner:
            places = endpoints(owner)
            assert places.kv_events is not None
            assert places.kv_replay is not None
            said: list[tuple[str, int, list[list[bytes]]]] = [
                (places.requests, zmq.DEALER, [[encode(Hello())], [encode(Submit(request("stranger")))]]),
                (places.kv_events, zmq.SUB, []),
                (places.kv_replay, zmq.DEALER, [[b"", bytes(8)]]),
            ]
            for address, kind, messages in said:
                with connection(address, key, kind) as socket:
                    for message in messages:
                        socket.send_multipart(message)
                    await asyncio.to_thread(wait_refused, socket)
                    assert len(tokens(await read(owner.submit(request("a", list(range(200))))))) == 8
                    assert not socket.poll(0)
            assert owner.stats.requests == len(said)
            assert owner.restarts == 0

    run(test)


@pytest.mark.needs("kv_events")
def test_members_are_heard_and_told(folder: Path) -> None:
    async def test() -> None:
        async with serving(peer(folder, kv_events=True)) as owner:
            places = endpoints(owner)
            assert places.kv_events is not None
            assert places.kv_replay is not None
            with connection(places.requests, KEY) as socket:
                socket.send(encode(Hello()))
                await asyncio.to_thread(hear, socket, Ready)
                socket.send(encode(Submit(request("member"))))
                heard = await asyncio.to_thread(hear, socket, Outputs)
                assert isinstance(heard, Outputs)
                assert heard.outputs[0].request_id == "member"
            with connection(places.kv_replay, KEY) as socket:
                socket.send_multipart([b"", bytes(8)])
                assert await asyncio.to_thread(socket.poll, 1000 * PATIENCE_S)
            with connection(places.kv_events, KEY, zmq.SUB) as socket:
                assert await asyncio.to_thread(socket.poll, 1000 * PATIENCE_S)  # statistics, each second

    run(test)


def test_an_address_of_a_network_needs_a_key() -> None:
    with pytest.raises(ValueError, match=r"--peer-host must be .* unless OSCINE_CLUSTER_KEY is set, not 192\.0\.2\.1"):
        PeerOptions(host="192.0.2.1")
    with pytest.raises(ValueError, match="OSCINE_CLUSTER_KEY must have 32 characters or more"):
        PeerOptions(host="192.0.2.1", key="short")
    assert KEY not in repr(PeerOptions(host="192.0.2.1", key=KEY))


SOURCE = PrefillSource("r", "tcp://127.0.0.1:1", 1, 1.0)
BAD: dict[str, tuple[str, GenerationRequest]] = (
    {
        name: (error, replace(request(name), **changes))
        for name, error, changes in [
            ("past the vocabulary", "prompt_token_ids", {"prompt_token_ids": [1, 320]}),
            ("negative", "prompt_token_ids", {"prompt_token_ids": [-1, 2]}),
            ("of 64 bits", "prompt_token_ids", {"prompt_token_ids": [1 << 62]}),
            ("no prompt", "the prompt has 0 tokens", {"prompt_token_ids": []}),
            ("long prompt", "the prompt has 100000 tokens", {"prompt_token_ids": [1] * 100_000}),
            ("generated", "generated_token_ids", {"generated_token_ids": [1 << 40]}),
            ("r" * 1000, "request_id must have 1 to 512 characters", {}),
            ("\0prefill 1", "request_id must have 1 to 512 characters", {}),
            (
                "no port",
                r"prefill\.address must be tcp://HOST:PORT",
                {"prefill": replace(SOURCE, address="tcp://there")},
            ),
            ("no address", r"prefill\.address", {"prefill": replace(SOURCE, address="ipc:///tmp/x")}),
            ("forever", r"prefill\.timeout_s", {"prefill": replace(SOURCE, timeout_s=math.inf)}),
            ("never", r"prefill\.timeout_s", {"prefill": replace(SOURCE, timeout_s=math.nan)}),
            ("long salt", "cache_salt has a length of 5000", {"cache_salt": "s" * 5000}),
            ("less than nothing", r"prefill\.min_tokens", {"prefill": replace(SOURCE, min_tokens=-1)}),
        ]
    }
    | {
        f"{field} {value}": (field, request(f"{field} {value}", **{field: value}))
        for field, value in [
            ("max_tokens", -1),
            ("min_tokens", -1),
            ("temperature", math.nan),
            ("temperature", -1.0),
            ("temperature", math.inf),
            ("top_p", 1.5),
            ("top_k", -5),
            ("min_p", math.nan),
            ("presence_penalty", math.inf),
            ("frequency_penalty", 1e300),
            ("repetition_penalty", 0.0),
            ("seed", 1 << 63),
            ("logprobs", 10**6),
            ("logprobs", -1),
            ("prompt_logprobs", 10**6),
            ("logit_bias", {10**6: 1.0}),
            ("logit_bias", {-1: 1.0}),
            ("logit_bias", {1: math.nan}),
            ("logit_bias", {1: math.inf}),
            ("stop_token_ids", (-1,)),
            ("stop_token_ids", (1 << 60,)),
        ]
    }
    | {
        f"long {field}": (f"{field} has a length of", request(f"long {field}", **{field: " " * (1 + (4 << 20))}))
        for field in ("grammar", "headers")
    }
)


def test_what_an_engine_cannot_run_is_refused_alone(folder: Path) -> None:
    """The API sends no such request; another process of a cluster might."""

    async def test() -> None:
        async with serving(options(folder, "torch")) as client:
            going_on = client.submit(request("good", max_tokens=200, stop_token_ids=()))
            for error, bad in BAD.values():
                (last,) = await read(client.submit(bad))
                assert last.finish_reason == "error"
                assert error.replace("\\", "") in (last.error or ""), bad.request_id
            assert len(tokens(await read(going_on))) == 200
            assert client.restarts == 0

    run(test)


def test_every_field_of_sampling_is_checked() -> None:
    """A new field needs a check in oscine.engine.wire.checks."""
    refused = {error.partition(" ")[0] for error, _ in BAD.values()}
    assert set(SamplingParams.__slots__) <= refused


@pytest.mark.parametrize("ids", [[320] * 64, [-1] * 64, [1 << 62] * 64, [1] * 10**6], ids=["past", "-1", "big", "many"])
@pytest.mark.needs("disaggregation")
def test_a_prompt_of_another_engine_that_cannot_be_is_refused(folder: Path, ids: list[int]) -> None:
    async def test() -> None:
        async with serving(peer(folder, kv_transfer=True)) as owner:
            with connection(endpoints(owner).requests, KEY) as socket:
                socket.send(encode(Prefill("a", ids, 5.0, 0)))
                heard = await asyncio.to_thread(hear, socket, PrefillRefused, Met)
                assert isinstance(heard, PrefillRefused)
            assert len(tokens(await read(owner.submit(request("b"))))) == 8
            assert owner.restarts == 0

    run(test)
