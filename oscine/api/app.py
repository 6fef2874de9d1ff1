"""The ASGI application: the table of endpoints as a router, and what every request passes through.

Knows no endpoint by name, nor the server that runs them.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Route
from starlette.types import ASGIApp

from oscine.api.errors import APIError, handle_api_error, handle_crash, handle_http_exception
from oscine.api.limits import ApiKeys
from oscine.api.metrics import HttpMetrics
from oscine.api.request_id import RequestIds
from oscine.api.routes import Operation, endpoints
from oscine.api.service import Service


def create_app(service: Service) -> ASGIApp:
    """The service is started and stopped by whoever runs the application."""
    keys = service.config.server.api_keys
    guard = [Middleware(ApiKeys, keys)] if keys else []
    handlers = {APIError: handle_api_error, HTTPException: handle_http_exception, Exception: handle_crash}
    routes = [_route(operation, guard) for operation in endpoints(service)]
    app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
    # Around Starlette, not within it: what it answers to a crash passes through no middleware of its own.
    return RequestIds(HttpMetrics(app, service.metrics))


def _route(operation: Operation, guard: list[Middleware]) -> Route:
    middleware = [] if operation.open else guard
    return Route(operation.path, operation.handler, methods=[operation.method], middleware=middleware)
