"""Handlers for exceptions of endpoints: a response in OpenAI's form, and a note in the record."""

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from oscine.api.http.errors import APIError, internal, response
from oscine.api.http.record import CLIENT_LEFT, current
from oscine.api.openai.models import speaks_anthropic


def _respond(error: APIError, request: Request) -> Response:
    record = current.get()
    if record is not None:
        record.error = error.code or error.type
    return response(error, request.url.path, anthropic=speaks_anthropic(request))


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return _respond(error, request)


async def _http_exception(request: Request, error: Exception) -> Response:
    """An unknown path, or a wrong method, as reported by the router."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    headers = dict(error.headers or {})
    return _respond(APIError(message, status=error.status_code, code="unknown_url", headers=headers), request)


async def _crash(request: Request, error: Exception) -> Response:
    return _respond(internal(), request)


async def _client_left(request: Request, error: Exception) -> Response:
    """The client left while it sent the body, so this response is never read."""
    return Response(status_code=CLIENT_LEFT)


HANDLERS = {APIError: _api_error, HTTPException: _http_exception, ClientDisconnect: _client_left, Exception: _crash}
