"""Every endpoint of the nucleus, one line each, and those of the APIs.

The router, the check of keys and /openapi.json are made from this table.
"""

from oscine.api.health import Health
from oscine.api.interface import Api
from oscine.api.openai import answers
from oscine.api.openai.chat_completions import ChatCompletions
from oscine.api.openai.completions import Completions
from oscine.api.openai.models import Models
from oscine.api.openai.tokenization import Tokenize
from oscine.api.openapi import GET, POST, PROBE, QUESTION, Description, Operation
from oscine.api.serving.schemas import DetokenizeRequest, TokenizeRequest
from oscine.api.serving.service import Service

CHAT = {"messages": QUESTION, "max_completion_tokens": 200}
TEXT = {"prompt": "Once upon a time", "max_tokens": 16}


def apis_of(service: Service) -> list[Api]:
    return [api for api in service.apis.values() if isinstance(api, Api)]


def endpoints(service: Service) -> list[Operation]:
    """The first that matches serves: a path with a parameter comes after the paths that it would cover."""
    health, models, tokenize = Health(service), Models(service), Tokenize(service)
    chat, text = ChatCompletions(service), Completions(service)
    dead, unready, unwell = ({"503": kind} for kind in (answers.Status, answers.Readiness, answers.HealthReport))
    table = [
        POST("/v1/chat/completions", chat, "Answer a conversation", answer=answers.ChatCompletion, example=CHAT),
        POST("/v1/completions", text, "Continue a text", answer=answers.Completion, example=TEXT),
        *(operation for api in apis_of(service) for operation in api.operations),
        GET("/v1/models", models.list, "List models", answer=answers.ModelList),
        GET("/v1/models/{name:path}", models.retrieve, "One model", answer=answers.ModelCard),
        POST(
            "/tokenize",
            tokenize.tokenize,
            "The tokens of a text or messages",
            body=TokenizeRequest,
            answer=answers.Tokens,
            example={"messages": QUESTION},
        ),
        POST(
            "/detokenize",
            tokenize.detokenize,
            "The text of tokens",
            body=DetokenizeRequest,
            answer=answers.Text,
            example={"tokens": [72, 105]},
        ),
        PROBE("/health", health.health, "State of server and engines", answer=answers.HealthReport, other=unwell),
        PROBE("/v1/health/live", health.live, "Whether the server is alive", answer=answers.Status, other=dead),
        PROBE(
            "/v1/health/ready", health.ready, "Whether all models are ready", answer=answers.Readiness, other=unready
        ),
        PROBE("/version", health.version, "Version of Oscine", answer=answers.Version),
        PROBE("/metrics", health.metrics, "Metrics for Prometheus", answer="text/plain"),
    ]
    description = Description(table, keys=bool(service.keys), admin_keys=service.keys.for_admin)
    table.append(PROBE("/openapi.json", description.document, "This description"))
    table.append(PROBE("/docs", description.page, "This description as a page", answer="text/html"))
    return table
