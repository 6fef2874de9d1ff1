"""What all endpoints share: the models by their names, and the keys, tools and metrics of the server."""

import asyncio
import datetime
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

from oscine.api.common.asgi import Receive
from oscine.api.common.errors import invalid, not_found
from oscine.api.common.keys import ApiKeys
from oscine.api.common.memory import Bodies
from oscine.api.common.record import current
from oscine.api.serving.reasoning_memory import ReasoningMemory
from oscine.api.serving.served_model import Demand, ModelState, ServedModel, ServedModels
from oscine.api.serving.tools import ServerTools
from oscine.api.telemetry.energy import EnergyCollector
from oscine.api.telemetry.engine_metrics import EngineCollector
from oscine.api.telemetry.metrics import Metrics
from oscine.api.telemetry.traces import tracing_of
from oscine.engine.process.client import Engine, EngineError
from oscine.settings.config import Config, EngineOptions
from oscine.system.grammar_sandbox.pool import sandbox
from oscine.types import EngineInfo

logger = logging.getLogger(__name__)

_FOUND_S = 1.0  # from a request's finding its model to its being admitted, at most
_WORST_FIRST: tuple[ModelState, ...] = (
    *("failed", "stopped", "unloaded", "starting", "restarting", "draining", "asleep", "ready"),
)


class ServiceApi:
    """What the service calls of an API (oscine.api.interface.Api)."""

    async def open(self) -> None:
        """Before the models start. Raises ValueError for what cannot be used."""

    async def started(self) -> None:
        """When each model is ready or has failed."""

    async def drain(self) -> None:
        """Before running requests get their time to finish."""

    async def stop(self) -> None:
        """Before the models stop."""

    async def close(self) -> None:
        """After the models have stopped."""

    @property
    def is_quiet(self) -> bool:
        """Whether no large requests are held."""
        return True


class Service:
    """Any number of models, which may come and go while it runs. Belongs to one event loop.

    Raises ValueError, in one line, for a file of keys or for traces that cannot be had.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.metrics = Metrics()
        self.metrics.watch(EngineCollector(lambda: self.models))
        energy = EnergyCollector(lambda: (gpu for model in self.models for gpu in model.engine.gpus))
        self.metrics.watch(energy, energy.refresh)
        self.keys = ApiKeys(config.server)
        if config.server.seed is not None:
            random.seed(config.server.seed)
        self.tracing = tracing_of(config.server)
        self.reasoning = ReasoningMemory()
        self.tools = ServerTools(config.tools)
        self.bodies = Bodies()
        self.apis: dict[str, ServiceApi] = {}
        self.draining = False
        self.started = int(time.time())
        self.served = ServedModels()
        self.demand: Demand | None = None  # loads models when requests name them
        self._retiring: set[asyncio.Task[None]] = set()  # of replaced models

    def add(self, engine: Engine, options: EngineOptions, names: Sequence[str] = ()) -> ServedModel:
        """One more model, known from now on; of a service that has started, the caller starts it.

        `options`: of its engine. `names`: for clients, if not the model's own. Raises ValueError for
        a name that another has.
        """
        model = self._made(engine, options, names)
        self.served.add(model)
        return model

    def remove(self, model: ServedModel) -> Coroutine[Any, Any, None]:
        """Its names are unknown at once, and free; await until its requests have ended and its engine has stopped."""
        self.served.let_go(model)
        return self._retire(model)

    async def replace(
        self, old: ServedModel, engine: Engine, options: EngineOptions, names: Sequence[str] = ()
    ) -> ServedModel:
        """One model in the place of another as soon as it is ready, so that no request is refused.

        Returns when it is ready; the old one drains afterwards. Raises as the start of a model does, and nothing has
        changed.
        """
        new = self._made(engine, options, names)
        try:
            await new.start()
            self.served.replace(old, new)
            new.draining = self.draining
        except BaseException:
            await new.stop()
            raise
        leaving = asyncio.create_task(self._retire(old, _FOUND_S))
        self._retiring.add(leaving)
        leaving.add_done_callback(self._retiring.discard)
        return new

    def _made(self, engine: Engine, options: EngineOptions, names: Sequence[str]) -> ServedModel:
        apart = self.config.server.cache_salt_by_key
        model = ServedModel(engine, options, names, self.metrics, cache_salt_by_key=apart)
        model.draining = self.draining
        return model

    async def _retire(self, model: ServedModel, after_s: float = 0.0) -> None:
        """`after_s`: for requests that have found the model and are not admitted yet."""
        await asyncio.sleep(after_s)
        await model.drain(self.config.server.drain_s)
        await model.stop()
        self.served.forget(model)

    @property
    def models(self) -> list[ServedModel]:
        """In the order in which they came."""
        return self.served.models

    @property
    def names(self) -> list[str]:
        return self.served.names

    async def start(self, on_ready: Callable[[EngineInfo], None] = lambda info: None) -> None:
        """Returns when each model is ready or has failed. `on_ready` is called with each ready one.

        Raises an error of the server itself or of an API, and the first model's error if all have failed.
        """
        models = self.models  # a caller that adds others starts them
        for api in self._apis:
            await api.open()
        await self.tools.start()
        sandbox().start()

        async def start(model: ServedModel) -> None:
            on_ready(await model.start())

        ends = await asyncio.gather(*map(start, models), return_exceptions=True)
        errors = [end for end in ends if end is not None]
        if models and len(errors) == len(models):
            raise errors[0]
        for model, error in zip(models, ends, strict=True):
            if error is not None:
                trace = None if isinstance(error, EngineError | ValueError) else error
                logger.error("%s cannot be served: %s", model.names[0], error, exc_info=trace)
        for api in self._apis:
            await api.started()

    @property
    def _apis(self) -> list[ServiceApi]:
        """The last one first: it may use the others."""
        return [*reversed(self.apis.values())]

    async def stop(self) -> None:
        for api in self._apis:
            await api.stop()
        for task in self._retiring:
            task.cancel()
        await asyncio.gather(*(model.stop() for model in self.served.all))
        await self.tools.stop()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.stop)
        for api in self._apis:
            await api.close()

    async def drain(self) -> None:
        """Refuses new requests, lets running ones finish within drain_s seconds, then cancels the rest."""
        for api in self._apis:
            await api.drain()
        self.draining = True
        await asyncio.gather(*(model.drain(self.config.server.drain_s) for model in self.served.all))

    @property
    def is_quiet(self) -> bool:
        """Whether no large requests are held."""
        return self.bodies.are_few and all(api.is_quiet for api in self.apis.values())

    @property
    def state(self) -> ModelState:
        """The state of the worst model; ready if all are."""
        if self.draining:
            return "draining"
        states: list[ModelState] = ["ready" if model.is_served else model.state for model in self.models]
        return min(states, key=_WORST_FIRST.index, default="starting" if self.demand is None else "ready")

    @property
    def failed(self) -> bool:
        """Whether no model will ever be ready."""
        models = self.models
        has_failed = all(model.state == "failed" and not model.on_demand for model in models)
        return bool(models) and not self.draining and has_failed

    @property
    def date(self) -> str:
        """The date in prompts. It is the same all day, so that prompts keep their common prefix."""
        return self.config.server.date or datetime.datetime.now(datetime.UTC).date().isoformat()

    def using(self, model: ServedModel, receive: Receive | None = None) -> AbstractAsyncContextManager[None]:
        """The model stays in memory until the context ends: Demand.use, where models are loaded on demand."""
        return nullcontext() if self.demand is None else self.demand.use(model, receive)

    def find(self, name: str | None) -> tuple[str, ServedModel]:
        """The name to answer with, and its model. Without a name: the only model. Names may be in Ollama's spelling.

        Raises APIError: 404 for a name that is not served, 400 if a name is needed.
        """
        record = current.get()
        model = self.served.find(name)
        if record is not None:
            record.model = name or (model.names[0] if model is not None else None)
        if model is not None:
            return name or model.names[0], model
        there = f"this server has {', '.join(self.names) or 'none'}"
        if name is None:
            raise invalid("model", f"it is required: {there}")
        raise not_found(f"The model '{name}' does not exist; {there}.", "model_not_found", "model")
