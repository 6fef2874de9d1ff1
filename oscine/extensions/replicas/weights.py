"""Weights from another machine of the cluster before the hub: each machine sends the files that it has to others.

    machine 1 <--- the hub          machines 2 and 3 <--- machine 1          machines 4 and 5 <--- machine 2 ...

One machine downloads a file from the hub, and others read from it what has arrived so far. The hub names each file by
the hash of its content, so every machine checks what it was sent. Messages go over ZeroMQ with the cluster's key:

    file and offset    -->
                       <-- `part` and bytes, `later` (no more bytes yet) and a depth, or `absent`

The depth is the number of machines between the sender and the hub. Where the hub stops, no machine gets a new byte. The
one nearest to the hub then gives up first and asks the hub itself, and the others go on to read from it.
"""

import logging
import threading
import time
from collections.abc import Generator
from contextlib import suppress
from typing import Protocol

import zmq

from oscine.checkpoint.download import Blob
from oscine.engine.wire.tcp import bind_tcp, connect, expect_heartbeats

logger = logging.getLogger(__name__)

_PIECE = 4 << 20  # bytes
_ANSWER_S = 20.0  # a machine that has not answered for so long is lost; more than a busy one needs
_LATER_S = 0.1  # between two questions for bytes that are not there yet
_STALL_S = 30.0  # without a new byte, for each machine up to the hub: it may be cut off from there
_DEEPEST = 8  # more count as so many, which also ends a wait of machines for each other
_PART, _LATER, _ABSENT = b"part", b"later", b"absent"


class Holders:
    """Which machines have a file, or are downloading it, in an order in which each one reads from an earlier one."""

    def __init__(self) -> None:
        self._addresses: dict[str, dict[str, str]] = {}  # hash of a file -> host -> address

    def hold(self, files: list[str], address: str) -> None:
        """A machine has these files. It comes first, as it waits for no other one."""
        for file in files:
            others = self._addresses.get(file, {})
            others.pop(_host(address), None)
            self._addresses[file] = {_host(address): address, **others}

    def find(self, file: str, address: str, lost: str = "") -> str:
        """The address from which the process at `address` shall read; empty if it shall ask the hub.

        `address` counts as one that has the file from now on. `lost`: an address that did not answer.
        """
        known = self._addresses.setdefault(file, {})
        if lost and known.get(_host(lost)) == lost:
            del known[_host(lost)]
        known[_host(address)] = address
        position = [*known].index(_host(address))
        return [*known.values()][(position - 1) // 2] if position else ""


class Directory(Protocol):
    """The cluster's Holders, from any process and thread. Where it is away, `find` says the hub."""

    def hold(self, files: list[str], address: str) -> None: ...

    def find(self, file: str, address: str, lost: str = "") -> str: ...


class WeightPeers:
    """Implements oscine.checkpoint.download.Peers. Sends files of this machine until it is closed."""

    def __init__(self, host: str, key: str, directory: Directory, stop: threading.Event | None = None) -> None:
        """`host`: an address of this machine; the port is a free one. `key`: of the cluster. Raises ValueError.

        `stop`: set by `close`, for what else has to end then.
        """
        self._key, self._directory, self.stop = key, directory, stop or threading.Event()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._shared: dict[str, Blob] = {}  # by hash; only these files are sent
        self._depths: dict[str, int] = {}  # of files that come from another machine, by hash
        socket = self._context.socket(zmq.REP)
        socket.set(zmq.LINGER, 0)
        expect_heartbeats(socket)
        try:
            self.address = bind_tcp(socket, host, key)
        except ValueError:
            socket.close()
            raise
        self._sending = threading.Thread(target=self._send, args=(socket,), name="weights", daemon=True)
        self._sending.start()

    def close(self) -> None:
        """Ends downloads too, those from the hub included. Blocks until no other machine is read from."""
        self.stop.set()
        self._context.term()
        self._sending.join()

    # ---- files of this machine ----

    def share(self, blobs: list[Blob]) -> None:
        self._shared |= {blob.sha256: blob for blob in blobs}
        if here := [blob.sha256 for blob in blobs if blob.path.exists()]:
            self._directory.hold(here, self.address)

    def _send(self, socket: "zmq.Socket[bytes]") -> None:
        with socket, suppress(zmq.ContextTerminated):
            while True:
                socket.send_multipart(self._answer(socket.recv_multipart()), copy=False)

    def _answer(self, question: list[bytes]) -> tuple[bytes, bytes]:
        try:
            file, start = question
            blob, offset = self._shared[file.decode()], int(start)
            return self._part(blob, offset)
        except (ValueError, KeyError):
            return _ABSENT, b""
        except OSError as error:
            logger.warning("a file of weights cannot be sent: %s", error)
            return _ABSENT, b""

    def _part(self, blob: Blob, offset: int) -> tuple[bytes, bytes]:
        for path in (blob.partial, blob.path):  # in this order: it may be renamed in between
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(offset)
                data = file.read(_PIECE)
                return (_PART, data) if data else (_LATER, str(self._depths.get(blob.sha256, 0)).encode())
        return _ABSENT, b""

    # ---- files of other machines ----

    def pieces(self, blob: Blob, start: int) -> Generator[bytes]:
        lost = ""
        while start < blob.size and (address := self._directory.find(blob.sha256, self.address, lost)):
            logger.info("%s: read from %s", blob.name, address)
            try:
                for piece in self._read(address, blob, start):
                    start += len(piece)
                    yield piece
            except (_LostError, zmq.ZMQError, ValueError) as error:
                if self.stop.is_set():
                    raise ValueError("the download was ended") from None
                logger.warning("%s is no longer read from %s: %s", blob.name, address, error)
                lost = address
            finally:
                self._depths.pop(blob.sha256, None)

    def _read(self, address: str, blob: Blob, start: int) -> Generator[bytes]:
        """Ends with the file. Raises _LostError and ZMQError, and ValueError for a wrong message."""
        with self._context.socket(zmq.REQ) as socket:
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVTIMEO, int(_ANSWER_S * 1000))
            connect(socket, address, self._key)
            depth, moved_s = 0, time.monotonic()
            while start < blob.size:
                self._depths[blob.sha256] = depth + 1
                state, data = self._ask(socket, blob, start)
                if state == _PART:
                    start, moved_s = start + len(data), time.monotonic()
                elif (now := min(int(data), _DEEPEST)) != depth:  # it reads from elsewhere now
                    depth, moved_s = now, time.monotonic()
                elif time.monotonic() > moved_s + _STALL_S * (depth + 1):
                    raise _LostError("it gets no new bytes")
                yield data if state == _PART else b""
                if state == _LATER:
                    self.stop.wait(_LATER_S)

    def _ask(self, socket: "zmq.Socket[bytes]", blob: Blob, start: int) -> tuple[bytes, bytes]:
        """A part, or `later`."""
        socket.send_multipart((blob.sha256.encode(), str(start).encode()))
        try:
            state, data = socket.recv_multipart()
        except zmq.Again:
            raise _LostError(f"no answer for {_ANSWER_S:.0f} s") from None
        if state == _ABSENT:
            raise _LostError("it does not have the file")
        return state, data


class _LostError(Exception):
    """Another machine is of no more use. Its text says why."""


def _host(address: str) -> str:
    return address.rpartition(":")[0]
