"""The end of a wire that many clients connect to: of an engine process, and of a cluster's router."""

import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import zmq
from msgspec import Struct

from oscine.engine.wire.messages import UNREADABLE, encode
from oscine.engine.wire.tcp import bind_tcp, expect_heartbeats

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Clients(Generic[T]):
    """One ROUTER socket. A client whose connection is gone is noticed when it is next sent to."""

    def __init__(self, decode: Callable[[bytes], T], *, linger_ms: int = 0) -> None:
        self._decode = decode
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone raises
        # Unbounded: the requests that are admitted bound what is sent and received.
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.set(zmq.LINGER, linger_ms)

    def listen(self, host: str, key: str) -> str:
        """Listens for clients of other machines too, over TCP: see oscine.engine.wire.tcp. Returns the endpoint.

        Raises ValueError.
        """
        expect_heartbeats(self.socket)
        return bind_tcp(self.socket, host, key)

    def send(self, client: bytes, message: Struct) -> bool:
        """False when the client is gone."""
        try:
            self.socket.send_multipart((client, encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        return True

    def receive(self) -> Iterator[tuple[bytes, T]]:
        """All that has arrived."""
        while not self.socket.closed and int(self.socket.get(zmq.EVENTS)) & zmq.POLLIN:
            client, *frames = self.socket.recv_multipart()
            try:
                message = self._decode(b"".join(frames))
            except UNREADABLE as error:  # of another version, or a program that found the port by chance
                logger.debug("a message that cannot be read: %s", error)
                continue
            yield client, message

    def close(self) -> None:
        """Returns when everything is sent, or the time to linger is over."""
        self.socket.close()
        self._context.term()
