"""Whether the server lives, serves, and which version it is. Needs no API key."""

from starlette.requests import Request
from starlette.responses import JSONResponse

import oscine
from oscine.api.service import Service


class Health:
    def __init__(self, service: Service) -> None:
        self.service = service

    async def live(self, request: Request) -> JSONResponse:
        """Not any more once the engine has failed for good: then only a new server helps."""
        failed = self.service.state == "failed"
        return JSONResponse({"status": "failed" if failed else "live"}, 503 if failed else 200)

    async def ready(self, request: Request) -> JSONResponse:
        state = self.service.state
        return JSONResponse({"status": state}, 200 if state == "ready" else 503)

    async def health(self, request: Request) -> JSONResponse:
        """status is starting, ready, restarting, draining, failed or stopped; error says why the engine last failed."""
        service = self.service
        stats = service.engine.stats
        body = {
            "status": service.state,
            "error": service.engine.error,
            "model": service.model,
            "uptime_s": round(service.uptime_s, 3),
            "running": stats.num_running,
            "waiting": stats.num_waiting,
        }
        return JSONResponse(body, 200 if service.state == "ready" else 503)

    async def version(self, request: Request) -> JSONResponse:
        return JSONResponse({"version": oscine.__version__})
