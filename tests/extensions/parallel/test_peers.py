"""An engine that others reach over TCP."""

import asyncio
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from oscine.engine.process.client import EngineClient, EngineDied, EngineError
from oscine.engine.wire import tcp
from oscine.settings.config import EngineOptions, PeerOptions
from tests.engine_process.harness import options, read, request, run, running, serving, tokens
from tests.extensions.cluster.local_placer import guest
from tests.extensions.parallel.watch_clock import TIMEOUT_S, WatchClock
from tests.waiting import until

pytestmark = pytest.mark.long  # each starts engines

SLOW_S = 0.025
ENDLESS = 3000


def peer(folder: Path, host: str = "127.0.0.1", key: str = "", **changes: Any) -> EngineOptions:
    return replace(options(folder, **changes), peers=PeerOptions(host=host, key=key))


def address_of(client: EngineClient) -> str:
    assert client.info is not None
    assert client.info.endpoints is not None
    return client.info.endpoints.requests


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_owner_and_guests_share_an_engine(folder: Path, host: str) -> None:
    async def test() -> None:
        async with serving(peer(folder, host)) as owner, running(guest(address_of(owner))) as other:
            assert owner.info is not None
            assert (owner.info.page_size, owner.info.max_num_seqs) == (64, 8)
            mine, others = await asyncio.gather(
                read(owner.submit(request("a", max_tokens=30))), read(other.submit(request("b", max_tokens=30)))
            )
            assert tokens(mine) == tokens(others)
            assert len(tokens(mine)) == 30

    run(test)


def test_only_the_owner_reaches_an_engine_that_is_alone(folder: Path) -> None:
    async def test() -> None:
        async with serving(options(folder)) as client:
            assert client.info is not None
            assert client.info.endpoints is None
            assert not psutil.Process(client.pid).net_connections("inet")

    run(test)


def test_a_host_of_another_machine_is_refused(folder: Path) -> None:
    async def test() -> None:
        client = EngineClient(peer(folder, "192.0.2.1", key="k" * 32))
        await client.start()
        with pytest.raises(EngineError, match=r"--peer-host 192\.0\.2\.1: Cannot assign requested address"):
            await client.wait_ready()
        await client.stop()

    run(test)


def test_the_seed_of_prefixes_is_hexadecimal() -> None:
    with pytest.raises(ValueError, match="--prefix-seed must be an even number of hexadecimal digits, not 'abc'"):
        PeerOptions(prefix_seed="abc")


def test_strangers_disturb_nobody(folder: Path) -> None:
    async def test() -> None:
        async with serving(peer(folder)) as owner:
            with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
                stranger.set(zmq.LINGER, 1000)
                stranger.connect(address_of(owner))
                for frames in (
                    [b""],
                    [b"GET / HTTP/1.1"],
                    [b"\x81\xa4type\xa5hello", b"more"],
                    [b"", b"", b""],
                    [b"\x82\xa4type\xa6cancel\xaarequest_id\xa1\xff"],
                ):
                    stranger.send_multipart(frames)
            assert len(tokens(await read(owner.submit(request("a"))))) == 8
            assert owner.restarts == 0

    run(test)


FORWARDER = """
import socket, sys, threading
target = ("127.0.0.1", int(sys.argv[1]))
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
def copy(source, sink):
    while data := source.recv(65536):
        sink.sendall(data)
while True:
    one, _ = listener.accept()
    other = socket.create_connection(target)
    for pair in ((one, other), (other, one)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
"""


def test_a_machine_that_falls_silent_is_noticed_on_both_sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forwarder that is stopped closes no connection and lets nothing through, as a machine without power does."""
    monkeypatch.setattr(tcp, "_HEARTBEAT_MS", 100)
    monkeypatch.setattr(tcp, "_HEARTBEAT_TIMEOUT_MS", 1000)

    async def test() -> None:
        async with serving(peer(folder, fake_step_s=SLOW_S)) as owner:
            port = address_of(owner).rpartition(":")[2]
            with subprocess.Popen([sys.executable, "-c", FORWARDER, port], stdout=subprocess.PIPE) as network:
                assert network.stdout is not None
                address = f"tcp://127.0.0.1:{int(await asyncio.to_thread(network.stdout.readline))}"
                async with running(guest(address)) as other:
                    stream = other.submit(request("a", max_tokens=ENDLESS))
                    await anext(stream)
                    network.send_signal(signal.SIGSTOP)
                    with pytest.raises(EngineDied):
                        await read(stream)
                    assert other.restarts == 1
                    await until(lambda: owner.stats.num_running == 0)
                network.kill()

    run(test)


def test_an_engine_that_hangs_is_started_again_though_all_its_requests_are_of_guests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = replace(peer(folder, fake_step_s=SLOW_S), engine_timeout_s=TIMEOUT_S)

    async def test() -> None:
        clock = WatchClock(monkeypatch)
        async with serving(watched) as owner, running(guest(address_of(owner))) as other:
            stream, first = other.submit(request("a", max_tokens=ENDLESS)), owner.pid
            await anext(stream)
            assert first is not None
            await clock.hang(first)
            with pytest.raises(EngineDied):
                await read(stream)
            await until(lambda: owner.restarts == 1)
            await owner.wait_ready()
            assert owner.pid != first

    run(test)


BUSY_S = 3.0


def test_an_engine_in_a_long_step_is_alive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_HEARTBEAT_MS", 50)
    monkeypatch.setattr(tcp, "_HEARTBEAT_TIMEOUT_MS", 2500)  # shorter than the step

    async def test() -> None:
        async with (
            serving(peer(folder, fake_step_s=BUSY_S)) as owner,
            running(guest(address_of(owner))) as other,
        ):
            assert len(tokens(await read(other.submit(request("a", max_tokens=1))))) == 1
            assert other.restarts == 0

    run(test)
