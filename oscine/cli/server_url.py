"""The address of a server that a command asks."""

from typing import Any

# For httpx: no proxy of the environment stands between a command and this machine.
DIRECT: dict[str, Any] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}


def server_url(text: str) -> str:
    """As people give it: with or without a scheme (http), with or without /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")
