"""Liveness, readiness and version of the server. Needs no API key."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse

import oscine
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service


class Health:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def live(self, request: Request) -> JSONResponse:
        """False once all engines have failed for good: then only a new server helps."""
        failed = self.service.failed
        return JSONResponse({"status": "failed" if failed else "live"}, 503 if failed else 200)

    async def ready(self, request: Request) -> JSONResponse:
        """Whether all models can be served; each model's own state is there too."""
        state = self.service.state
        models = {model.names[0]: model.state for model in self.service.models}
        return JSONResponse({"status": state, "models": models}, 200 if state == "ready" else 503)

    async def health(self, request: Request) -> JSONResponse:
        """status is starting, ready, restarting, draining, failed or stopped; error says why an engine last failed."""
        service = self.service
        models = [_report(model) for model in service.models]
        body = {
            "status": service.state,
            "error": next((model["error"] for model in models if model["error"]), None),
            "model": models[0]["model"] if len(models) == 1 else None,
            "uptime_s": round(service.uptime_s, 3),
            "running": sum(model["running"] for model in models),
            "waiting": sum(model["waiting"] for model in models),
            "models": models,
        }
        return JSONResponse(body, 200 if service.state == "ready" else 503)

    async def version(self, request: Request) -> JSONResponse:
        return JSONResponse({"version": oscine.__version__})


def _report(model: ServedModel) -> dict[str, Any]:
    stats = model.engine.stats
    return {
        "names": model.names,
        "status": model.state,
        "error": model.error,
        "model": model.root,
        "running": stats.num_running,
        "waiting": stats.num_waiting,
    }
