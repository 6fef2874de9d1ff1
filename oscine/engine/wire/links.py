"""Connections to one life of a process, as a client's to an engine: each ends when that process or its machine does.

A link is not used again after its end. So nothing that was sent to a dead process can reach its successor.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Generic, TypeVar

import zmq
from msgspec import Struct
from zmq.utils.monitor import recv_monitor_message

from oscine.engine.wire.messages import UNREADABLE, FromPeer, Meet, ToClient, decode_to_client, encode
from oscine.engine.wire.tcp import connect

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RECONNECT_MS = 50  # how soon a starting process is found


class _Dealer(Generic[T]):
    """One DEALER socket, and what its monitor says of the connection. Never waits."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        key: str,
        decode: Callable[[bytes], T],
        *,
        patient: bool,
    ) -> None:
        """Raises ZMQError for an invalid address, and if there are too many sockets."""
        self._decode = decode
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        # Unbounded: what the other end may send is bounded by the requests that it takes.
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, _RECONNECT_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        with ExitStack() as undo:
            undo.callback(self._socket.close)
            self._monitor = self._socket.get_monitor_socket(events if patient else events | zmq.EVENT_CONNECT_RETRIED)
            undo.callback(self._monitor.close)
            connect(self._socket, address, key)
            undo.pop_all()
        self.fds = (self._socket.FD, self._monitor.FD)

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def send(self, message: Struct) -> None:
        self._socket.send(encode(message))

    def messages(self) -> Iterator[T]:
        """All that has arrived, until the socket is closed."""
        while not self._socket.closed:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(data)
            except UNREADABLE as error:  # perhaps from another version
                logger.warning("a message that cannot be read: %s", error)
                continue
            yield message

    def changes(self) -> Iterator[bool]:
        """Whether the connection has come up or is lost, for each change since the last call."""
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            yield event == zmq.EVENT_HANDSHAKE_SUCCEEDED


class Link(Generic[T]):
    """A connection on the running event loop. With patience, waits for a process at `address` however long."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        decode: Callable[[bytes], T],
        on_up: Callable[[], None],
        on_message: Callable[[T], None],
        on_down: Callable[[], None],
        *,
        key: str = "",
        patient: bool = True,
    ) -> None:
        """`key`: see oscine.engine.wire.tcp. `patient`: else a process that cannot be reached counts as one that ended.

        Raises ZMQError for an invalid address, and if there are too many sockets.
        `on_up` and `on_down` are called at most once each; every message comes before `on_down`.
        """
        self._on_up, self._on_message, self._on_down = on_up, on_message, on_down
        import asyncio  # an engine has links too, and no event loop

        self._loop = asyncio.get_running_loop()
        self._dealer = _Dealer(context, address, key, decode, patient=patient)
        for fd, read in zip(self._dealer.fds, (self._read, self._read_changes), strict=True):
            self._loop.add_reader(fd, read)
            # A socket's descriptor only signals news once all that was there before has been read.
            self._loop.call_soon(read)

    def close(self) -> None:
        for fd in self._dealer.fds:
            self._loop.remove_reader(fd)
        self._dealer.close()

    def send(self, message: Struct) -> None:
        """Never waits."""
        self._dealer.send(message)
        # Sending may consume the signal that something can be read.
        self._loop.call_soon(self._read)

    def _read(self) -> None:
        for message in self._dealer.messages():
            self._on_message(message)

    def _read_changes(self) -> None:
        for is_up in self._dealer.changes():
            if is_up:
                self._on_up()
                continue
            self._read()
            if not self._dealer.closed:  # by one of the last messages
                self._on_down()
            return


class PeerLinks:
    """Connections of an engine process to other engines, read without an event loop.

    Each is made when it is first sent to, with Meet as the first message. An engine that is not there counts as one
    that ended.
    """

    def __init__(self, key: str = "") -> None:
        """`key`: see oscine.engine.wire.tcp."""
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealers: dict[str, _Dealer[ToClient]] = {}
        self._unusable: list[str] = []  # invalid addresses that are not reported yet

    def send(self, address: str, message: FromPeer) -> None:
        try:
            if address not in self._dealers:
                self._dealers[address] = _Dealer(self._context, address, self._key, decode_to_client, patient=False)
                self._dealers[address].send(Meet())
            self._dealers[address].send(message)
        except zmq.ZMQError:
            self._unusable.append(address)

    def receive(self) -> Iterator[tuple[str, ToClient | None]]:
        """All that has arrived, by address; None: the connection is lost, and a next one will be a new one."""
        while self._unusable:
            yield self._unusable.pop(), None
        for address, dealer in list(self._dealers.items()):
            is_lost = not all(dealer.changes())  # asked first: what it said before its end is still to be read
            for message in dealer.messages():
                yield address, message
            if is_lost:
                dealer.close()
                del self._dealers[address]
                yield address, None
