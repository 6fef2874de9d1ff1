"""Protection against web pages of other origins in a browser on the same machine or network.

Such a page can send what a form can, for example a body of text/plain. By DNS rebinding it can even read the answer:
its own host name then resolves to this machine. So a body must be declared as JSON, for which browsers first ask
permission (CORS preflight), or it must not come from a page of another origin. And a server without keys accepts only a
`Host` that a foreign name server cannot resolve.
"""

import ipaddress
import socket
from collections.abc import Collection

from oscine.api.common.asgi import ASGIApp, Receive, Scope, Send
from oscine.api.common.errors import APIError
from oscine.api.common.record import header
from oscine.system.addresses import is_loopback

_JSON = b"application/json"
_LONGEST = 200  # characters of a client's value that an error repeats


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].removesuffix(".")


def _is_json(scope: Scope) -> bool:
    """Whether the body is declared as JSON."""
    return header(scope, b"content-type").partition(b";")[0].strip().lower() == _JSON


class HostCheck:
    """Checks the `Host`: middleware of the endpoints that need a key where the server has keys."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed`: further names; "*" allows any."""
        self.app = app
        name = socket.gethostname().lower()
        short = name.partition(".")[0]
        self._allowed = {name, short, f"{short}.local", *map(_without_port, allowed)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = _without_port(header(scope, b"host").decode("latin-1"))
        allowed = not host or host in self._allowed or "*" in self._allowed  # browsers always send a host
        if not (allowed or is_loopback(host) or _is_address(host)):
            raise APIError(
                f"This server has no API keys and does not answer to the host name {host[:_LONGEST]!r}: "
                f"start it with --allowed-hosts {host[:_LONGEST]}, or with --api-key.",
                status=403,
                type="permission_error",
                code="host_not_allowed",
            )
        await self.app(scope, receive, send)


class OriginCheck:
    """Refuses what a page of another origin sends: middleware of an endpoint that takes forms, or JSON as one.

    Browsers send forms to any server without asking it, and name the page's origin. For a body that is declared as JSON
    they have asked. So such a body may come from any origin: those of proxies and desktop programs differ.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        """`allowed`: origins of --cors-origins."""
        self.app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin").decode("latin-1")
        own = origin.partition("://")[2] == header(scope, b"host").decode("latin-1")
        if origin and not (own or _is_json(scope) or origin in self._allowed or "*" in self._allowed):
            message = f"Pages of {origin[:_LONGEST]!r} may not use this server: see --cors-origins."
            raise APIError(message, status=403, type="permission_error", code="origin_not_allowed")
        await self.app(scope, receive, send)


class JsonCheck:
    """Checks the Content-Type: middleware of an endpoint with a body."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not _is_json(scope):
            given = header(scope, b"content-type")
            what = f"not {given.decode('latin-1')[:_LONGEST]!r}" if given else "but it is missing"
            message = f"The header 'Content-Type' must be application/json, {what}."
            raise APIError(message, status=415, code="unsupported_media_type")
        await self.app(scope, receive, send)
