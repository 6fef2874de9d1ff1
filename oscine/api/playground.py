"""The playground: one static page at `/` and its files, read once at start and served from memory.

The page itself is in oscine/web, and talks to the API as any client does.
"""

import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from oscine.api.interface import Front

FOLDER = Path(__file__).parents[1] / "web"
PREFIX = "/playground/"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
_PAGE = "index.html"
_PATHS = sorted(path for path in FOLDER.rglob("*") if path.suffix in _TYPES and path.name != _PAGE)
_FILES = [path.relative_to(FOLDER).as_posix() for path in _PATHS]

# Nothing is loaded from elsewhere, nothing is sent elsewhere, and no text can become a script.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # kept, and asked for again with its ETag: a new version shows at once
}


class _File:
    def __init__(self, name: str) -> None:
        path = FOLDER / name
        self._body = path.read_bytes()
        etag = f'"{hashlib.sha256(self._body).hexdigest()[:32]}"'
        self._headers = {**_HEADERS, "ETag": etag, "Content-Type": _TYPES[path.suffix]}

    async def get(self, request: Request) -> Response:
        given = re.findall(r'"[^"]*"|\*', request.headers.get("if-none-match", ""))
        if self._headers["ETag"] in given or "*" in given:
            return Response(status_code=304, headers=self._headers)
        return Response(self._body, headers=self._headers)


class _Front(_File):
    """The page for browsers, which accept HTML. Other clients get the same answer as without a playground."""

    def __init__(self, other: Front) -> None:
        super().__init__(_PAGE)
        self._headers["Vary"] = "Accept"
        self._other = other

    async def get(self, request: Request) -> Response:
        return await (super().get if "text/html" in request.headers.get("accept", "") else self._other)(request)


async def running(request: Request) -> Response:
    """The answer to a client that asks for no page, where no API has another."""
    return Response("Oscine is running", media_type="text/plain")


@cache
def playground_routes(other: Front) -> tuple[Route, ...]:
    return (Route("/", _Front(other).get), *(Route(PREFIX + name, _File(name).get) for name in _FILES))
