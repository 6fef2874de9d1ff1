"""Limits of file descriptors: of this process, and of those for connections of clients."""

import resource

_MOST = 1 << 20  # Linux's default maximum; a hard limit may be infinite
_RESERVED = 256  # for the engine, the store, tools, logs and files


def raise_descriptor_limit() -> int:
    """Raises the soft limit, often 1,024, to the hard one. Returns the limit that applies now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connection_limit(wanted: int, descriptors: int) -> int:
    """The number of connections a server may hold, at most `wanted`: other parts of it need descriptors too."""
    return max(1, min(wanted, descriptors - min(_RESERVED, descriptors // 2)))
