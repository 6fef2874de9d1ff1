"""Every endpoint, one line each: the router, the check of keys and /openapi.json are made from this table.

Knows which path leads where and what travels over it; not how an endpoint does its work.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from oscine.api.chat_completions import ChatCompletions
from oscine.api.completions import Completions
from oscine.api.health import Health
from oscine.api.models import Models
from oscine.api.schemas import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from oscine.api.service import Service
from oscine.api.tokenize import Tokenize


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    path: str  # as Starlette writes it: /v1/models/{name:path}
    handler: Callable[..., Any]  # an ASGI application, or an async function of a Request
    summary: str
    body: type | None = None  # the msgspec struct of the request's JSON; None: there is no body
    answer: type | str = "application/json"  # the msgspec struct of the answer's JSON, or a media type
    open: bool = False  # whether it needs no API key


GET, POST, DELETE = (partial(Operation, method) for method in ("GET", "POST", "DELETE"))


def endpoints(service: Service) -> list[Operation]:
    """The first that matches serves: a path with a parameter comes after the paths that it would cover."""
    health, models, tokenize = Health(service), Models(service), Tokenize(service)
    return [
        POST("/v1/chat/completions", ChatCompletions(service), "Answer a conversation", ChatCompletionRequest),
        POST("/v1/completions", Completions(service), "Continue a text", CompletionRequest),
        GET("/v1/models", models.list, "The names of the served model"),
        GET("/v1/models/{name:path}", models.retrieve, "One name of the served model"),
        POST("/tokenize", tokenize.tokenize, "The tokens of a text or a conversation", TokenizeRequest),
        POST("/detokenize", tokenize.detokenize, "The text of tokens", DetokenizeRequest),
        GET("/health", health.health, "State of the server and its engine", open=True),
        GET("/v1/health/live", health.live, "Whether the server lives", open=True),
        GET("/v1/health/ready", health.ready, "Whether requests can be served now", open=True),
        GET("/version", health.version, "Version of Oscine", open=True),
        GET("/metrics", service.metrics.endpoint, "Metrics for Prometheus", answer="text/plain", open=True),
    ]
