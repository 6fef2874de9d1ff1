"""/v1/models: the names under which models are served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from oscine.api.served_model import ServedModel
from oscine.api.service import Service


class Models:
    def __init__(self, service: Service) -> None:
        self.service = service

    def _card(self, name: str, model: ServedModel) -> dict[str, Any]:
        info = model.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "oscine",
            "root": model.root,
            "max_model_len": info.max_model_len if info else None,
        }

    async def list(self, request: Request) -> JSONResponse:
        cards = [self._card(name, model) for model in self.service.models for name in model.names]
        return JSONResponse({"object": "list", "data": cards})

    async def retrieve(self, request: Request) -> JSONResponse:
        return JSONResponse(self._card(*self.service.find(request.path_params["name"])))
