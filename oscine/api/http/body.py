"""The bodies of requests, bounded in size and in time; bodies of answers as JSON, errors in the form of each API."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from oscine.api.common.asgi import ClientLeftError
from oscine.api.common.errors import ANTHROPIC_PATH, TEXT_PATHS, APIError

BODY_TIMEOUT_S = 60.0
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # that some clients write before UTF-8


async def read_body(request: Request, limit: int, timeout_s: float = BODY_TIMEOUT_S) -> bytes:
    """The whole body without a byte order mark, sent with a length or in chunks.

    Raises APIError 413 above `limit` bytes, and 408 if it is late. Raises ClientLeftError if the client disconnects
    meanwhile.
    """
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > limit:
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except ClientDisconnect:
        raise ClientLeftError from None
    except TimeoutError:
        headers = {"Connection": "close"}
        raise APIError(f"The body did not arrive within {timeout_s:g} s.", status=408, headers=headers) from None
    return b"".join(chunks).removeprefix(_BYTE_ORDER_MARK)


def _too_large(limit: int) -> APIError:
    return APIError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large")


def json_response(answer: Any, status: int = 200) -> Response:
    """`answer` is a struct, or plain objects."""
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def response(error: APIError, path: str = "", *, anthropic: bool = False) -> Response:
    """`path`: of the request. `anthropic`: the client reads Anthropic's shape on any path."""
    body, status = error.body(), error.status
    if anthropic or _is_below(path, ANTHROPIC_PATH):
        body, status = error.anthropic_body(), error.anthropic_status
    elif any(_is_below(path, root) for root in TEXT_PATHS):
        body = error.text_body()
    return Response(body, status, error.headers, media_type="application/json")


def _is_below(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}/")
