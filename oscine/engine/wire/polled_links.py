"""Connections of an engine process to other engines: one DEALER socket each, looked at without ever waiting.

A connection ends with the other engine's process, or with its machine, and is not used again: nothing that was sent to
a dead engine can reach its successor. An engine that is not there is as good as one that ended.
"""

from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from oscine.engine.wire.messages import UNREADABLE, FromPeer, Meet, ToClient, decode_to_client, encode
from oscine.engine.wire.tcp import connect


class PeerLinks:
    """See oscine.engine.peers.remote_prefill.Links."""

    def __init__(self, key: str = "") -> None:
        """`key`: see oscine.engine.wire.tcp."""
        self._key = key
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._links: dict[str, _Link] = {}
        self._unusable: list[str] = []  # invalid addresses that are not reported yet

    def send(self, address: str, message: FromPeer) -> None:
        try:
            if address not in self._links:
                self._links[address] = _Link(self._context, address, self._key)
            self._links[address].send(message)
        except zmq.ZMQError:
            self._unusable.append(address)

    def receive(self) -> Iterator[tuple[str, ToClient | None]]:
        while self._unusable:
            yield self._unusable.pop(), None
        for address, link in list(self._links.items()):
            is_lost = link.is_lost()  # asked first: what it said before its end is still to be read
            for message in link.receive():
                yield address, message
            if is_lost:
                link.close()
                del self._links[address]
                yield address, None


class _Link:
    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, key: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, 0)  # an answer for each question
        self._socket.set(zmq.SNDHWM, 0)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED)
        connect(self._socket, address, key)
        self.send(Meet())

    def send(self, message: FromPeer) -> None:
        self._socket.send(encode(message))

    def receive(self) -> Iterator[ToClient]:
        while True:
            try:
                data = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                yield decode_to_client(data)
            except UNREADABLE:
                continue  # of another version, perhaps; who waits for it will not wait for ever

    def is_lost(self) -> bool:
        try:
            recv_monitor_message(self._monitor, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()
