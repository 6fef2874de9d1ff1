"""A TLS listener that counts a connection when it is accepted, and gives its handshake a deadline.

asyncio's own server makes a protocol only after the handshake. A connection that never begins one would not be counted.
"""

import asyncio
import socket
import ssl
from collections.abc import Callable

from oscine.api.http.receiving import ThrottledProtocol
from oscine.api.http.uvicorn_protocol import HEAD_S, LINGER_S, BoundedHttp

_PAUSE_S = 1.0  # before the next attempt, when there are no descriptors left


class TlsListener:
    """The part of asyncio.Server that uvicorn uses: `close` and `wait_closed`."""

    def __init__(
        self, listener: socket.socket, backlog: int, tls: ssl.SSLContext, make: Callable[[], ThrottledProtocol]
    ) -> None:
        """`make` returns the protocol of a new connection."""
        self._listener, self._tls, self._make = listener, tls, make
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False
        listener.setblocking(False)
        listener.listen(backlog)
        self._listen()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Accepts one connection per turn of the event loop. Its handshake begins before another can displace it."""
        try:
            connection, address = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_PAUSE_S, self._listen)
            return
        throttled = self._make()
        http = throttled.target
        assert isinstance(http, BoundedHttp)
        task = self._loop.create_task(self._shake_hands(http, connection))
        self._handshakes.add(task)
        task.add_done_callback(self._handshakes.discard)
        http.accepted(address[:2], task)

    async def _shake_hands(self, http: BoundedHttp, connection: socket.socket) -> None:
        connection.setblocking(False)
        times = {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": LINGER_S}
        try:
            await self._loop.connect_accepted_socket(lambda: http.throttled, connection, ssl=self._tls, **times)
        except OSError:  # ssl.SSLError is an OSError
            pass
        finally:
            if http.transport is None:
                http.abandon()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._handshakes, return_exceptions=True)
