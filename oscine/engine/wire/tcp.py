"""ZeroMQ sockets between machines: addresses, keys, and heartbeats that notice the loss of a machine.

The processes of a cluster share a key. With it every connection is encrypted, and both ends prove that they have the
key (CURVE). A connection without the key is refused before any of its messages is read. Two key pairs are derived from
the key: one for sockets that bind, one for sockets that connect.

A machine that is lost closes no connection, so heartbeats ask whether it is there. ZeroMQ's own thread sends and
answers them without the interpreter. So an engine that compiles, or computes a long step, is not taken for dead.
Sockets on one machine need none: the end of a process closes them, and a process that was only stopped may go on.
"""

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from socket import AF_INET6, SOCK_STREAM, getaddrinfo
from threading import Thread
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from oscine.config import listens

_HEARTBEAT_MS = 1000
# From a heartbeat to giving up. Longer than a busy machine delays a thread, or a network drops packets. Together with
# the interval, a loss is noticed within 5 s.
_HEARTBEAT_TIMEOUT_MS = 4000
_LARGEST_MESSAGE = 64 << 20  # bytes per received message; a prompt of 131,072 tokens has less than 1 MB
_GATE = "inproc://zeromq.zap.01"  # endpoint at which ZeroMQ asks whether to accept a connection (RFC 27)
_DOMAIN = b"oscine"


class _Pair(NamedTuple):
    public: bytes
    secret: bytes


class _Keys(NamedTuple):
    """The key pairs, in ZeroMQ's encoding Z85."""

    server: _Pair
    client: _Pair


@cache
def _keys(key: str) -> _Keys:
    def pair(end: bytes) -> _Pair:
        secret = z85.encode(blake2b(key.encode(), digest_size=32, person=end).digest())
        return _Pair(zmq.curve_public(secret), secret)

    return _Keys(pair(b"oscine server"), pair(b"oscine client"))


def expect_heartbeats(socket: zmq.Socket[Any]) -> None:
    """Turns heartbeats on for all later binds and connects of the socket."""
    socket.set(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.set(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)


def connect(socket: zmq.Socket[Any], address: str, key: str = "") -> None:
    """Connects to an endpoint; over TCP with heartbeats. With a key, only to a socket that has the same key.

    Raises ZMQError.
    """
    if address.startswith("tcp:"):
        expect_heartbeats(socket)
        socket.set(zmq.IPV6, "[" in address)
        if key:
            server, client = _keys(key)
            socket.set(zmq.CURVE_SERVERKEY, server.public)
            socket.set(zmq.CURVE_PUBLICKEY, client.public)
            socket.set(zmq.CURVE_SECRETKEY, client.secret)
    socket.connect(address)


def bind_tcp(socket: zmq.Socket[Any], host: str, key: str = "") -> str:
    """Binds a free port of this machine's address `host`. With a key, only sockets with the same key can connect.

    Returns the endpoint for others. Raises ValueError.
    """
    socket.set(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)
    if key:
        _admit_members(socket, key)
    try:
        family, *_, address = getaddrinfo(host, None, type=SOCK_STREAM)[0]
        socket.set(zmq.IPV6, family == AF_INET6)
        socket.bind(f"tcp://[{address[0]}]:*" if family == AF_INET6 else f"tcp://{address[0]}:*")
    except (OSError, zmq.ZMQError) as error:
        raise ValueError(f"--peer-host {host}: {error.strerror}") from None
    port = port_of(socket)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def bind_to(socket: zmq.Socket[Any], endpoint: str, option: str, *, everywhere: bool) -> str:
    """Binds an endpoint that a user gave with `option` if it has a wildcard, else connects to it, as vLLM does.

    A wildcard means this machine's loopback only, unless `everywhere`. Returns the endpoint for others. Raises
    ValueError.
    """
    socket.set(zmq.IPV6, "[" in endpoint)
    attach = socket.bind if listens(endpoint) else socket.connect
    if not everywhere:
        endpoint = endpoint.replace("//*:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
    try:
        attach(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"{option}: {endpoint}: {error.strerror}") from None
    return f"{endpoint.removesuffix(':*')}:{port_of(socket)}" if endpoint.endswith(":*") else endpoint


def port_of(socket: zmq.Socket[Any]) -> str:
    """The port of the socket's last bind."""
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").rpartition(b":")[2].decode()


def _admit_members(socket: zmq.Socket[Any], key: str) -> None:
    """Requires the key for everything that the socket binds from now on."""
    server, client = _keys(key)
    _open_gate(socket.context, lambda public: public == z85.decode(client.public))
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, server.secret)
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no connection without an answer from the gate


def _open_gate(context: zmq.Context[Any], knows: Callable[[bytes], bool]) -> None:
    """Decides which connections the sockets of a context accept, in a thread of its own, until the context ends."""
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    gate = shadow.socket(zmq.REP)
    gate.set(zmq.LINGER, 0)
    try:
        gate.bind(_GATE)
    except zmq.ZMQError:  # another socket of the context has opened it
        gate.close()
        return
    Thread(target=_keep_gate, args=(gate, knows), name="gate", daemon=True).start()


def _keep_gate(gate: zmq.Socket[bytes], knows: Callable[[bytes], bool]) -> None:
    try:
        while True:
            version, number, _, _, _, mechanism, *credentials = gate.recv_multipart()
            known = mechanism == b"CURVE" and len(credentials) == 1 and knows(credentials[0])
            gate.send_multipart((version, number, *((b"200", b"OK") if known else (b"400", b"unknown key")), b"", b""))
    except zmq.ContextTerminated:
        gate.close()
