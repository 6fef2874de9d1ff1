"""The handler for exceptions of endpoints: a response in the client's form of errors, and a note in the record."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from oscine.api.common.asgi import ClientLeftError
from oscine.api.common.errors import APIError, internal
from oscine.api.common.record import CLIENT_LEFT, current
from oscine.api.http.body import response
from oscine.api.openai.models import speaks_anthropic


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeftError):  # while it sent the body, so this response is never read
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):  # an unknown path, or a wrong method, as reported by the router
        error = _no_websocket(request) if _asks_for_websocket(request) else _unknown(request, error)
    elif isinstance(error, RecursionError):  # decoding left it few levels for what is made of it
        error = APIError("The JSON of the body is nested too deeply.", code="invalid_json")
    elif not isinstance(error, APIError):
        error = internal()
    record = current.get()
    if record is not None:
        record.error = error.code or error.type
    return response(error, request.url.path, anthropic=speaks_anthropic(request))


def _unknown(request: Request, error: HTTPException) -> APIError:
    message = f"{request.method} {request.url.path}: {error.detail}."
    return APIError(message, status=error.status_code, code="unknown_url", headers=dict(error.headers or {}))


def _asks_for_websocket(request: Request) -> bool:
    wanted = request.headers.get("upgrade", "").lower().split(",")
    return "websocket" in (protocol.strip() for protocol in wanted)


def _no_websocket(request: Request) -> APIError:
    """Clients that try a WebSocket first go on with HTTP after this status, on another connection."""
    message = f"{request.method} {request.url.path}: this server speaks no WebSocket; send requests by POST."
    headers = {"Upgrade": "HTTP/1.1", "Connection": "close"}
    return APIError(message, status=426, code="upgrade_required", headers=headers)


HANDLERS = dict.fromkeys((APIError, HTTPException, ClientLeftError, RecursionError, Exception), _respond)
