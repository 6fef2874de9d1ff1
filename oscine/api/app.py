"""The ASGI application: which path leads where, and what every request passes through.

Knows the endpoints, not the server that runs them.
"""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp

from oscine.api.chat_completions import ChatCompletions
from oscine.api.completions import Completions
from oscine.api.errors import APIError, handle_api_error, handle_crash, handle_http_exception
from oscine.api.health import Health
from oscine.api.limits import ApiKeys
from oscine.api.metrics import HttpMetrics
from oscine.api.models import Models
from oscine.api.request_id import RequestIds
from oscine.api.service import Service
from oscine.api.tokenize import Tokenize


def create_app(service: Service) -> ASGIApp:
    """The service is started and stopped by whoever runs the application."""
    health, models, tokenize = Health(service), Models(service), Tokenize(service)
    routes = [
        Route("/v1/chat/completions", ChatCompletions(service), methods=["POST"]),
        Route("/v1/completions", Completions(service), methods=["POST"]),
        Route("/v1/models", models.list),
        Route("/v1/models/{name:path}", models.retrieve),
        Route("/tokenize", tokenize.tokenize, methods=["POST"]),
        Route("/detokenize", tokenize.detokenize, methods=["POST"]),
        Route("/health", health.health),
        Route("/v1/health/live", health.live),
        Route("/v1/health/ready", health.ready),
        Route("/version", health.version),
        Route("/metrics", service.metrics.endpoint),
    ]
    handlers = {APIError: handle_api_error, HTTPException: handle_http_exception, Exception: handle_crash}
    app: ASGIApp = Starlette(routes=routes, exception_handlers=handlers)
    if service.config.server.api_keys:
        app = ApiKeys(app, service.config.server.api_keys)
    # Around Starlette, not within it: what it answers to a crash passes through no middleware of its own.
    return RequestIds(HttpMetrics(app, service.metrics))
