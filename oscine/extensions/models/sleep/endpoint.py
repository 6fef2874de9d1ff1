"""/sleep, /wake_up and /is_sleeping, as vLLM has them."""

from collections.abc import Awaitable
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from oscine.api.common.errors import APIError, invalid, unavailable
from oscine.api.http.body import json_response
from oscine.api.serving.served_model import Demand, ServedModel
from oscine.api.serving.service import Service
from oscine.engine.process.client import EngineClient, EngineError
from oscine.extensions.models.sleep.schemas import Sleeping

_LEVELS, _MODES = ("1",), ("wait", "abort")


class SleepsOnDemand(Demand, Protocol):
    async def rest(self, model: ServedModel) -> None:
        """The model leaves the memory of the device."""
        ...


class SleepEndpoints:
    def __init__(self, service: Service, demand: SleepsOnDemand | None = None) -> None:
        self.service, self._demand = service, demand

    async def sleep(self, request: Request) -> Response:
        """Returns when the memory is free. Requests that run get `--drain-s` seconds; with `mode=abort`, none.
        Those of a model on demand end first, without a limit.

        Raises APIError: 400 for another level, 409 if the model is starting or changing already.
        """
        given = request.query_params
        if given.get("level", "1") not in _LEVELS:
            raise invalid("level", "it must be 1: weights in host memory, without the KV cache")
        if (mode := given.get("mode", "wait")) not in _MODES:
            raise invalid("mode", f"it must be one of {', '.join(_MODES)}")
        if (model := self._on_demand(request)) is not None and self._demand is not None:
            if mode == "abort":
                raise invalid("mode", "it must be wait for a model on demand, whose requests end first")
            await self._demand.rest(model)
            return json_response(Sleeping(is_sleeping=True))
        model, engine = self._engine(request)
        if engine.state != "asleep":
            model.draining = True  # new requests are refused from now on
            try:
                await model.drain(self.service.config.server.drain_s if mode == "wait" else 0.0)
                await _turned(engine.sleep())
            finally:
                model.draining = self.service.draining
        return json_response(Sleeping(is_sleeping=True))

    async def wake_up(self, request: Request) -> Response:
        """Returns when requests can be served. Raises APIError 503 if the GPU has too little memory."""
        if request.query_params.get("tags") is not None:
            raise invalid("tags", "weights and KV cache wake up together")
        if (model := self._on_demand(request)) is not None and self._demand is not None:
            async with self._demand.use(model, request.receive):
                return json_response(Sleeping(is_sleeping=False))
        _, engine = self._engine(request)
        if engine.state == "asleep":
            await _turned(engine.wake())
        return json_response(Sleeping(is_sleeping=False))

    async def is_sleeping(self, request: Request) -> Response:
        _, model = self.service.find(request.query_params.get("model"))
        return json_response(Sleeping(model.engine.state in ("asleep", "unloaded")))

    def _on_demand(self, request: Request) -> ServedModel | None:
        _, model = self.service.find(request.query_params.get("model"))
        return model if model.on_demand else None

    def _engine(self, request: Request) -> tuple[ServedModel, EngineClient]:
        """Raises APIError for an engine that cannot sleep, or not now."""
        _, model = self.service.find(request.query_params.get("model"))
        engine = model.engine
        if not (model.options.sleep_mode and isinstance(engine, EngineClient)):
            raise APIError("This server was started without --enable-sleep-mode.", code="unsupported")
        if model.state not in ("ready", "asleep"):
            raise APIError(f"The model is {model.state}.", status=409, code=model.state)
        return model, engine


async def _turned(change: Awaitable[None]) -> None:
    try:
        await change
    except EngineError as error:
        raise unavailable(f"It has not worked: {error}.", code="unavailable") from None
