"""/v1/models: the names under which the one model is served."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

from oscine.api.service import Service


class Models:
    def __init__(self, service: Service) -> None:
        self.service = service

    def _model(self, name: str) -> dict[str, Any]:
        info = self.service.engine.info
        return {
            "id": name,
            "object": "model",
            "created": self.service.started,
            "owned_by": "oscine",
            "root": self.service.model,
            "max_model_len": info.max_model_len if info else None,
        }

    async def list(self, request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.service.names]})

    async def retrieve(self, request: Request) -> JSONResponse:
        return JSONResponse(self._model(self.service.served_name(request.path_params["name"])))
