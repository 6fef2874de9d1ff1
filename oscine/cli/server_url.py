"""The server that a command asks: a given one, or one that is started for the time of the command."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from oscine.cli.error import USAGE, CommandError
from oscine.settings.config import Config

# For httpx: requests to this machine ignore the proxies of the environment.
_DIRECT = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}


def server_at(url: str | None, config: Config) -> AbstractContextManager[str]:
    """The base URL of the server at `url`, which may lack http:// and end in /v1. Without `url` a server is started."""
    if url:
        with_scheme = url if "://" in url else f"http://{url}"
        return nullcontext(with_scheme.rstrip("/").removesuffix("/v1"))
    from oscine.cli.local_server import local_server

    return local_server(config)


def client_settings(url: str, api_key: str | None) -> dict[str, Any]:
    """Of a client of httpx that waits for answers as long as they take. Raises CommandError for what is not a URL."""
    import httpx

    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise CommandError(f"{url} is not a URL: {error}", USAGE) from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return {"base_url": url, "headers": headers, "timeout": httpx.Timeout(None, connect=10.0), "mounts": _DIRECT}
