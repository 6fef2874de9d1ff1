"""/v1/models: the names under which models are served, in OpenAI's shape or in Anthropic's."""

import datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from oscine.api.http.body import json_response
from oscine.api.openai.answers import ModelCard, ModelList
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service


def speaks_anthropic(request: Request) -> bool:
    """Whether the client is one of Anthropic's. They send this header on every path."""
    return "anthropic-version" in request.headers


class Models:
    def __init__(self, service: Service) -> None:
        self.service = service

    def _card(self, request: Request, name: str, model: ServedModel) -> Any:
        longest = model.engine.info.max_model_len if model.engine.info else None
        if not speaks_anthropic(request):
            adapter = model.adapter_of(name)
            root, parent = (model.root, None) if adapter is None else (adapter.path, model.names[0])
            return ModelCard(name, "model", self.service.started, "oscine", root, longest, model.state, parent)
        created = datetime.datetime.fromtimestamp(self.service.started, datetime.UTC)
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": created.isoformat(timespec="seconds").replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": longest,
            "max_tokens": longest,
        }

    async def list(self, request: Request) -> Response:
        named = ((name, model) for model in self.service.models for name in (*model.names, *model.engine.adapters))
        cards = [self._card(request, name, model) for name, model in named]
        if speaks_anthropic(request):
            first, last = (cards[0]["id"], cards[-1]["id"]) if cards else (None, None)
            return json_response({"data": cards, "has_more": False, "first_id": first, "last_id": last})
        return json_response(ModelList("list", cards))

    async def retrieve(self, request: Request) -> Response:
        return json_response(self._card(request, *self.service.find(request.path_params["name"])))
