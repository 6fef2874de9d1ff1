"""Liveness, readiness, version and metrics of the server. Needs no API key."""

import time

from starlette.requests import Request
from starlette.responses import Response

import oscine
from oscine.api.http.body import json_response
from oscine.api.openai import answers
from oscine.api.serving.served_model import ServedModel
from oscine.api.serving.service import Service


class Health:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def live(self, request: Request) -> Response:
        """503 once all engines have failed for good, when only a new server helps."""
        failed = self.service.failed
        return json_response(answers.Status("failed" if failed else "live"), 503 if failed else 200)

    async def ready(self, request: Request) -> Response:
        """Whether all models are ready, and the state of each."""
        state = self.service.state
        models = {model.names[0]: model.state for model in self.service.models}
        return json_response(answers.Readiness(state, models), 200 if state == "ready" else 503)

    async def health(self, request: Request) -> Response:
        """status is starting, ready, restarting, draining, failed or stopped; error says why an engine last failed."""
        service = self.service
        models = [_report(model) for model in service.models]
        report = answers.HealthReport(
            status=service.state,
            error=next((model.error for model in models if model.error), None),
            model=models[0].model if len(models) == 1 else None,
            uptime_s=round(time.time() - service.started, 3),
            running=sum(model.running for model in models),
            waiting=sum(model.waiting for model in models),
            models=models,
        )
        return json_response(report, 200 if service.state == "ready" else 503)

    async def version(self, request: Request) -> Response:
        return json_response(answers.Version(oscine.__version__))

    async def metrics(self, request: Request) -> Response:
        body, content_type = await self.service.metrics.encoded(request.headers.get("accept", ""))
        return Response(body, media_type=content_type)


def _report(model: ServedModel) -> answers.ModelReport:
    stats = model.engine.stats
    return answers.ModelReport(
        [*model.names], model.state, model.error, model.root, stats.num_running, stats.num_waiting
    )
