"""What the addresses and endpoints say that users give."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether an address or a name, without a port, is that of this machine itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def listens(endpoint: str) -> bool:
    """Whether a ZeroMQ endpoint that a user gives is bound; else it is connected. The rule is vLLM's."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
