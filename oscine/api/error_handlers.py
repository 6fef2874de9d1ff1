"""The handler for exceptions of endpoints: a response in the client's form of errors, and a note in the record."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from oscine.api.http.asgi import ClientLeftError
from oscine.api.http.body import response
from oscine.api.http.errors import APIError, internal
from oscine.api.http.record import CLIENT_LEFT, current
from oscine.api.openai.models import speaks_anthropic


async def _respond(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeftError):  # while it sent the body, so this response is never read
        return Response(status_code=CLIENT_LEFT)
    if isinstance(error, HTTPException):  # an unknown path, or a wrong method, as reported by the router
        message = f"{request.method} {request.url.path}: {error.detail}."
        headers = dict(error.headers or {})
        error = APIError(message, status=error.status_code, code="unknown_url", headers=headers)
    elif isinstance(error, RecursionError):  # decoding left it few levels for what is made of it
        error = APIError("The JSON of the body is nested too deeply.", code="invalid_json")
    elif not isinstance(error, APIError):
        error = internal()
    record = current.get()
    if record is not None:
        record.error = error.code or error.type
    return response(error, request.url.path, anthropic=speaks_anthropic(request))


HANDLERS = dict.fromkeys((APIError, HTTPException, ClientLeftError, RecursionError, Exception), _respond)
