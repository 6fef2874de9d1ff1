"""The address of a server that a command asks."""

from typing import Any

# For httpx: requests to this machine ignore the proxies of the environment.
DIRECT: dict[str, Any] = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}


def server_url(text: str) -> str:
    """The base URL of a server, given with or without a scheme (http), with or without /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")
