"""How many files and sockets this process may have open, and how many of them connections of clients may take."""

import resource

_MOST = 1 << 20  # what Linux gives a process unless it is told otherwise; a hard limit may be infinite
_RESERVED = 256  # for the engine, the store, tools, logs and files


def raise_descriptor_limit() -> int:
    """Lifts the soft limit, often 1,024, to the hard one. Returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def connection_limit(wanted: int, descriptors: int) -> int:
    """How many connections a server may hold that is to hold `wanted`: the rest needs descriptors too."""
    return max(1, min(wanted, descriptors - min(_RESERVED, descriptors // 2)))
