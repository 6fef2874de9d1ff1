"""A connection to one life of a process, as a client's to an engine: it ends when that process or its machine does, and
is not used again.

So nothing that was sent to a dead process can reach its successor. Knows no message.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Generic, TypeVar

import zmq
from msgspec import Struct
from zmq.utils.monitor import recv_monitor_message

from oscine.engine.wire.messages import UNREADABLE, encode
from oscine.engine.wire.tcp import connect

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RECONNECT_MS = 50  # how soon a starting process is found


class Link(Generic[T]):
    """One DEALER socket on the running event loop. With patience, waits for a process at `address` however long."""

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
        self._decode, self._on_up, self._on_message, self._on_down = decode, on_up, on_message, on_down
        self._loop = asyncio.get_running_loop()
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
        self._fds = (self._socket.FD, self._monitor.FD)
        self._loop.add_reader(self._fds[0], self._read)
        self._loop.add_reader(self._fds[1], self._read_monitor)
        # A socket's descriptor only signals news once all that was there before has been read.
        self._loop.call_soon(self._read)
        self._loop.call_soon(self._read_monitor)

    def close(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()

    def send(self, message: Struct) -> None:
        """Never waits."""
        self._socket.send(encode(message))
        # Sending may consume the signal that something can be read.
        self._loop.call_soon(self._read)

    def _read(self) -> None:
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
            self._on_message(message)

    def _read_monitor(self) -> None:
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._on_up()
            else:
                self._read()
                if not self._socket.closed:  # by one of the last messages
                    self._on_down()
                return
