"""Weights from another machine before the hub, over real sockets: each machine is a loopback address and a folder."""

import hashlib
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from oscine.checkpoint.download import Blob, fetch_blobs
from oscine.engine.wire.tcp import connect
from oscine.extensions.replicas import weights
from oscine.extensions.replicas.weights import Holders, WeightPeers
from tests.cli.local_hub import LocalHub, local_hub
from tests.waiting import wait_until

NAME, FILE, KEY = "owner/name", "model.safetensors", "0123456789abcdef" * 4
CONTENT = random.Random(7).randbytes(9 << 20)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = 5 << 20  # bytes, more than one piece
# A machine that downloads from the hub until it is killed. Says where it sends from.
FIRST = f"""
import sys
from pathlib import Path
from oscine.checkpoint.download import Blob, fetch_blobs
from oscine.extensions.replicas.weights import Holders, WeightPeers
peers = WeightPeers("127.0.0.1", {KEY!r}, Holders())
print(peers.address, flush=True)
fetch_blobs([Blob({FILE!r}, sys.argv[1], {len(CONTENT)}, {SHA256!r}, Path(sys.argv[2]))], peers)
"""


@pytest.fixture
def hub() -> Iterator[LocalHub]:
    with local_hub() as server:
        server.repositories[NAME] = {FILE: CONTENT}
        yield server


def blob_of(hub: LocalHub, folder: Path) -> Blob:
    folder.mkdir(exist_ok=True)
    return Blob(FILE, f"{hub.url}/{NAME}/resolve/main/{FILE}", len(CONTENT), SHA256, folder / SHA256)


def is_half(blob: Blob) -> bool:
    return blob.partial.exists() and blob.partial.stat().st_size >= HALF


def test_three_machines_that_start_together_download_once(hub: LocalHub, tmp_path: Path) -> None:
    """The hub stops in the middle until all have what the first one has got so far."""
    hub.stalls_after, hub.trickle_s, directory = HALF, 1.0, Holders()
    blobs = [blob_of(hub, tmp_path / str(number)) for number in range(3)]

    def fetch(number: int) -> None:
        with closing(WeightPeers(f"127.0.0.{number + 1}", KEY, directory)) as peers:
            fetch_blobs([blobs[number]], peers)
            wait_until(lambda: all(blob.path.exists() for blob in blobs), "the other machines")

    with ThreadPoolExecutor() as threads:
        running: list[Future[None]] = [threads.submit(fetch, number) for number in range(3)]
        try:
            wait_until(lambda: all(map(is_half, blobs)), "half of the file on each machine")
        finally:
            hub.end_stalls()
        for one in running:
            one.result()
    assert hub.resumed_at(FILE) >= HALF, "where the connection broke"
    assert all(blob.path.read_bytes() == CONTENT for blob in blobs)


def test_another_machine_goes_on_where_a_killed_one_was(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "_ANSWER_S", 0.5)
    hub.stalls_after, hub.trickle_s, directory = HALF, 1.0, Holders()
    first, second = (blob_of(hub, tmp_path / name) for name in ("first", "second"))
    command = [sys.executable, "-c", FIRST, first.url, str(first.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        assert directory.find(SHA256, process.stdout.readline().strip()) == ""
        with ThreadPoolExecutor() as threads, closing(WeightPeers("127.0.0.2", KEY, directory)) as peers:
            running = threads.submit(fetch_blobs, [second], peers)
            wait_until(lambda: is_half(second), "half of the file")
            process.send_signal(signal.SIGKILL)
            hub.end_stalls()
            running.result()
    assert second.path.read_bytes() == CONTENT
    assert hub.resumed_at(FILE) >= HALF

    # The killed process has left half of the file and no lock: the next one of its machine needs no hub for the rest.
    with (
        closing(WeightPeers("127.0.0.2", KEY, directory)) as later,
        closing(WeightPeers("127.0.0.1", KEY, directory)) as peers,
    ):
        later.share([second])
        fetch_blobs([first], peers)
    assert first.path.read_bytes() == CONTENT
    assert len(hub.ranges(FILE)) == 2


@pytest.mark.parametrize(("key", "content"), [(KEY, b"x" * len(CONTENT)), ("another " * 8, CONTENT)])
def test_damaged_files_and_those_of_strangers_come_from_the_hub(
    key: str, content: bytes, hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without the cluster's key gets nothing, and damage is found by the hash."""
    monkeypatch.setattr(weights, "_ANSWER_S", 0.5)
    directory = Holders()
    there, here = blob_of(hub, tmp_path / "there"), blob_of(hub, tmp_path / "here")
    there.path.write_bytes(content)
    with (
        closing(WeightPeers("127.0.0.1", KEY, directory)) as holder,
        closing(WeightPeers("127.0.0.2", key, directory)) as peers,
    ):
        holder.share([there])
        fetch_blobs([here], peers)
    assert here.path.read_bytes() == CONTENT
    assert hub.ranges(FILE) == [""]


def test_bytes_of_a_process_that_died_may_be_damaged(hub: LocalHub, tmp_path: Path) -> None:
    blob = blob_of(hub, tmp_path / "here")
    blob.partial.write_bytes(b"x" * HALF)
    with closing(WeightPeers("127.0.0.1", KEY, Holders())) as peers:
        fetch_blobs([blob], peers)
    assert blob.path.read_bytes() == CONTENT
    assert hub.ranges(FILE) == [f"bytes={HALF}-", ""]


def test_only_shared_files_are_sent(hub: LocalHub, tmp_path: Path) -> None:
    secret, shared = tmp_path / "secret", blob_of(hub, tmp_path / "here")
    for path in (secret, shared.path):
        path.write_bytes(CONTENT)
    with (
        closing(WeightPeers("127.0.0.1", KEY, Holders())) as holder,
        zmq.Context() as context,
        context.socket(zmq.REQ) as socket,
    ):
        holder.share([shared])
        connect(socket, holder.address, KEY)

        def ask(*question: str) -> list[bytes]:
            socket.send_multipart([part.encode() for part in question])
            assert socket.poll(10_000), "an answer"
            return socket.recv_multipart()

        assert ask(SHA256, str(HALF)) == [b"part", CONTENT[HALF : HALF + (4 << 20)]]
        for name in (str(secret), f"../{secret.name}", "0" * 64):
            assert ask(name, "0") == [b"absent", b""]
        for question in ((SHA256,), (SHA256, "first"), (SHA256, "0", "1")):
            assert ask(*question) == [b"absent", b""]
        assert ask(SHA256, str(len(CONTENT) - 1)) == [b"part", CONTENT[-1:]]


def test_each_machine_reads_from_an_earlier_one() -> None:
    directory = Holders()
    found = [directory.find("file", f"tcp://10.0.0.{n}:5000") for n in range(7)]
    assert found == ["", *(f"tcp://10.0.0.{(n - 1) // 2}:5000" for n in range(1, 7))]
    assert directory.find("file", "tcp://10.0.0.3:5000", lost="tcp://10.0.0.1:5000") == "tcp://10.0.0.0:5000"
    assert directory.find("file", "tcp://10.0.0.0:6000") == "", "another process of the machine takes its place"
    directory.hold(["file"], "tcp://10.0.0.6:5000")
    assert directory.find("file", "tcp://10.0.0.0:6000") == "tcp://10.0.0.6:5000", "which has the whole file"
