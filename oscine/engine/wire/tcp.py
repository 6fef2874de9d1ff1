"""ZeroMQ sockets between machines: addresses, keys, and heartbeats that notice the loss of a machine.

The processes of a cluster share a key. With it every connection is encrypted, and both ends prove that they have the
key (CURVE). A connection without the key is refused before any of its messages is read. Two key pairs are derived from
the key: one for sockets that bind, one for sockets that connect.

A machine that is lost closes no connection, so heartbeats ask whether it is there. ZeroMQ's own thread sends and
answers them without the interpreter. So an engine that compiles, or computes a long step, is not taken for dead.
Sockets on one machine need none: the end of a process closes them, and a process that was only stopped may go on.
"""

from functools import cache
from hashlib import blake2b
from socket import AF_INET6, SOCK_STREAM, getaddrinfo
from threading import Thread
from typing import Any

import zmq
from zmq.utils import z85

from oscine.system.addresses import listens

_HEARTBEAT_MS = 1000
# From a heartbeat to giving up. Longer than a busy machine delays a thread, or a network drops packets. Together with
# the interval, a loss is noticed within 4 s.
_HEARTBEAT_TIMEOUT_MS = 3000
_LARGEST_MESSAGE = 64 << 20  # bytes per received message; a prompt of 131,072 tokens has less than 1 MB
_GATE = "inproc://zeromq.zap.01"  # endpoint at which ZeroMQ asks whether to accept a connection (RFC 27)
_DOMAIN = b"oscine"
_SERVER, _CLIENT = b"oscine server", b"oscine client"  # ends that bind, and that connect


@cache
def _pair(key: str, end: bytes) -> tuple[bytes, bytes]:
    """The public and the secret key of one end, in ZeroMQ's encoding Z85."""
    secret = z85.encode(blake2b(key.encode(), digest_size=32, person=end).digest())
    return zmq.curve_public(secret), secret


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
            public, secret = _pair(key, _CLIENT)
            socket.set(zmq.CURVE_SERVERKEY, _pair(key, _SERVER)[0])
            socket.set(zmq.CURVE_PUBLICKEY, public)
            socket.set(zmq.CURVE_SECRETKEY, secret)
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
    _open_gate(socket.context, z85.decode(_pair(key, _CLIENT)[0]))
    socket.set(zmq.CURVE_SERVER, 1)
    socket.set(zmq.CURVE_SECRETKEY, _pair(key, _SERVER)[1])
    socket.set(zmq.ZAP_DOMAIN, _DOMAIN)
    socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # no connection without an answer from the gate


def _open_gate(context: zmq.Context[Any], member: bytes) -> None:
    """Accepts connections with this public key for the sockets of a context, in a thread, until the context ends."""
    shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    gate = shadow.socket(zmq.REP)
    gate.set(zmq.LINGER, 0)
    try:
        gate.bind(_GATE)
    except zmq.ZMQError:  # another socket of the context has opened it
        gate.close()
        return
    Thread(target=_keep_gate, args=(gate, member), name="gate", daemon=True).start()


def _keep_gate(gate: zmq.Socket[bytes], member: bytes) -> None:
    try:
        while True:
            version, number, _, _, _, mechanism, *credentials = gate.recv_multipart()
            known = mechanism == b"CURVE" and credentials == [member]
            gate.send_multipart((version, number, *((b"200", b"OK") if known else (b"400", b"unknown key")), b"", b""))
    except zmq.ContextTerminated:
        gate.close()
