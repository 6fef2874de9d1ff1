"""What a page in a browser may not do: send a body as a form does, or reach a server without keys by its own name.

A page of another origin can send what a form can, such as text/plain, and by DNS rebinding even read the answer, under
a name of its own that leads to this machine. So bodies must be declared as JSON, which browsers ask about before, and
the `Host` must be one that no stranger's name server answers for.
"""

import ipaddress
import socket
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from oscine.api.errors import APIError
from oscine.api.record import header

_JSON = b"application/json"
_LONGEST = 200  # characters of what a client chose, in an error


def is_loopback(host: str) -> bool:
    """Of an address or a name, without a port."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _own_names() -> set[str]:
    name = socket.gethostname().lower()
    return {name, name.partition(".")[0], f"{name.partition('.')[0]}.local"}


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


class HostCheck:
    """Middleware of an endpoint that needs no key only because the server has none."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed` are further names; "*" is any."""
        self.app = app
        self._allowed = _own_names() | {name.lower() for name in allowed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _without_port(header(scope, b"host").decode("latin-1"))
        if not self._allows(host):
            raise APIError(
                f"This server asks for no API key and is not known as {host[:_LONGEST]!r}: "
                f"start it with --allowed-hosts {host[:_LONGEST]}, or with --api-key.",
                status=403,
                type="permission_error",
                code="host_not_allowed",
            )
        await self.app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        """No browser leaves it empty."""
        return not host or host in self._allowed or "*" in self._allowed or is_loopback(host) or _is_address(host)


class JsonCheck:
    """Middleware of an endpoint with a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = header(scope, b"content-type")
        if given.partition(b";")[0].strip().lower() != _JSON:
            what = f"not {given.decode('latin-1')[:_LONGEST]!r}" if given else "and there is none"
            raise APIError(
                f"The header 'Content-Type' must be application/json, {what}.",
                status=415,
                code="unsupported_media_type",
            )
        await self.app(scope, receive, send)
