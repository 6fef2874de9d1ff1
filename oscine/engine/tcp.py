"""ZeroMQ sockets between machines: where they listen, and how the loss of a machine is noticed.

A machine that is lost closes no connection, so somebody has to ask whether it is there. ZeroMQ's own thread asks and
answers, without the interpreter: an engine that compiles, or computes a long step, is not taken for dead. Sockets on
one machine need none of it: the end of a process closes them, and a process that was only stopped may go on.
"""

from socket import AF_INET6, SOCK_STREAM, getaddrinfo
from typing import Any

import zmq

_HEARTBEAT_MS = 1000
# From asking to being given up. Longer than a busy machine keeps a thread from its turn, or a network drops packets;
# with the interval, what is lost is noticed within 5 s.
_HEARTBEAT_TIMEOUT_MS = 4000


def expect_heartbeats(socket: zmq.Socket[Any]) -> None:
    """For all that the socket binds or connects from now on."""
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def bind_tcp(socket: zmq.Socket[Any], host: str) -> str:
    """Binds a free port of this machine's address `host`. Returns the endpoint for others. Raises ValueError."""
    try:
        family, *_, address = getaddrinfo(host, None, type=SOCK_STREAM)[0]
        socket.set(zmq.IPV6, family == AF_INET6)
        socket.bind(f"tcp://[{address[0]}]:*" if family == AF_INET6 else f"tcp://{address[0]}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ValueError(f"--peer-host {host}: {error.strerror}") from None
    port = port_of(socket)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind_to(socket: zmq.Socket[Any], endpoint: str, option: str) -> None:
    """Binds an endpoint that a user gave with `option`, or connects it where it names another machine's port, as vLLM
    does: it binds where there is a wildcard. Raises ValueError."""
    socket.set(zmq.IPV6, "[" in endpoint)
    binds = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
    try:
        (socket.bind if binds else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{option}: {endpoint}: {error.strerror}") from None


def port_of(socket: zmq.Socket[Any]) -> str:
    """That the socket was bound to last."""
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2].decode()
