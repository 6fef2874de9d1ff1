"""Names of hosts: which ones mean this machine alone."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Of an address or a name, without a port."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost" or host.lower().endswith(".localhost")
