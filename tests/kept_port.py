"""A port for programs that must be given a port number, or that restart at the same one."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[int]:
    """A port of 127.0.0.1 that stays bound, so that no other process gets it. Nothing listens on it at first.

    A program that binds with SO_REUSEADDR, as servers do, can listen on it, also after an earlier one has ended.
    """
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))
        yield kept.getsockname()[1]
