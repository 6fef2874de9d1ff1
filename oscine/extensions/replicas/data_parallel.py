"""Several engines of this machine as one, behind one API process: `oscine serve --data-parallel-size N`.

Each engine is a process of its own, on a GPU of its own or with its part of the CPU. Requests are placed as in a
cluster, by cached prefix and load, and go on elsewhere when an engine dies. No Ray, and no port that others can use.
"""

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

from oscine.api.serving.service import Service
from oscine.engine.build import with_prefix_seed
from oscine.engine.process.client import EngineClient, EngineState
from oscine.executor.start.parts import GROUP
from oscine.extensions.replicas.client.dispatcher import MigrationLimits
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.client.followed_models import as_one
from oscine.extensions.replicas.client.metrics import ClusterMetrics
from oscine.extensions.replicas.client.reports import Reports
from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.spec.deployment import ModelSpec, QueueLimits, RoleSpec
from oscine.extensions.replicas.spec.snapshot import STATE_OF_ENGINE, ReplicaReport
from oscine.settings.config import Config, EngineOptions, PeerOptions
from oscine.settings.devices import engines_of
from oscine.system.extensions import part
from oscine.types import AdapterInfo, EngineStats

logger = logging.getLogger(__name__)

_FOREVER_S = 1e9  # requests wait as long as they would in the queue of a single engine


class DataParallelEngine(ClusterEngine):
    """Owns engine processes, named 0, 1, ... Ready while one of them is; failed when all have failed."""

    def __init__(
        self, options: Sequence[EngineOptions], model: str, max_waiting: int = 2048, *, share_experts: bool = False
    ) -> None:
        """`max_waiting`: requests that may wait while all engines have enough to do. `share_experts`: each engine has a
        part of the experts, computes it for the tokens of all, and so they live and end together.
        """
        members = part(GROUP)(len(options)).members if share_experts else [None] * len(options)
        key = secrets.token_hex(32)
        seed = with_prefix_seed(options[0]).peers.prefix_seed or secrets.token_hex(16)
        peers = PeerOptions(host="127.0.0.1", key=key, kv_events=True, prefix_seed=seed)
        self.engines = {
            str(i): EngineClient(replace(one, peers=peers), member)
            for i, (one, member) in enumerate(zip(options, members, strict=True))
        }
        self.router = Router(key)
        queue = QueueLimits(max_waiting, max_wait_s=_FOREVER_S)
        self.router.reconfigure([ModelSpec((model,), (RoleSpec(),), start_timeout_s=_FOREVER_S, queue=queue)])
        # Each of the engines may be lost once before a request counts as the cause.
        limits = MigrationLimits(max_losses=max(4, len(options)))
        super().__init__(self.router, model, prefix_seed=seed, limits=limits)
        self._own_reports = Reports()
        self._following: list[asyncio.Task[None]] = []

    @property
    def restarts(self) -> int:
        return sum(engine.restarts for engine in self.engines.values())

    @property
    def gpus(self) -> tuple[str, ...]:
        return tuple(gpu for engine in self.engines.values() for gpu in engine.gpus)

    @property
    def stats(self) -> EngineStats:
        for name, engine in self.engines.items():
            self._own_reports.take(name, engine.stats)
        return self._own_reports.total()

    @property
    def adapters(self) -> Mapping[str, AdapterInfo]:
        """Those that all engines have which are ready."""
        ready = [engine for engine in self.engines.values() if engine.state == "ready"]
        if not ready:
            return {}
        return {name: info for name, info in ready[0].adapters.items() if all(name in one.adapters for one in ready)}

    async def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> AdapterInfo:
        """Into all engines, or into none. Waits for those that start, as the group is ready with the first of them."""
        engines = list(self.engines.values())

        async def load(one: EngineClient) -> AdapterInfo:
            await one.wait_ready()
            return await one.load_adapter(name, path, in_place=in_place)

        found = await asyncio.gather(*map(load, engines), return_exceptions=True)
        failed = next((one for one in found if isinstance(one, BaseException)), None)
        if failed is None:
            return next(one for one in found if isinstance(one, AdapterInfo))
        for engine, info in zip(engines, found, strict=True):
            if isinstance(info, AdapterInfo) and not in_place:
                engine.forget_adapter(name)
                engine.drop_adapter(info.identity)
        raise failed

    def forget_adapter(self, name: str) -> AdapterInfo:
        first, *others = [one for one in self.engines.values() if name in one.adapters]
        for engine in others:
            engine.forget_adapter(name)
        return first.forget_adapter(name)

    def drop_adapter(self, identity: str) -> None:
        for engine in self.engines.values():
            engine.drop_adapter(identity)

    async def start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines.values()))
        self._following = [asyncio.create_task(self._follow(name)) for name in self.engines]
        await super().start()

    async def stop(self) -> None:
        await super().stop()
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
        await self.router.close()

    async def _follow(self, name: str) -> None:
        """Keeps the router told of where an engine is and in which state."""
        engine = self.engines[name]
        while True:
            self._look()
            enlisting = asyncio.create_task(self.router.enlist(name, self._report(engine)))
            try:
                await engine.changed()
            finally:
                enlisting.cancel()
            if engine.state == "failed":
                logger.error("engine %s failed for good: %s", name, engine.error)

    def _report(self, engine: EngineClient) -> ReplicaReport:
        info, endpoints = engine.info, None
        if info is not None and info.endpoints is not None:
            endpoints = replace(info.endpoints, requests=engine.address)  # its private socket instead of its port
        state = STATE_OF_ENGINE.get(engine.state, "lost")
        return ReplicaReport(self._model, node="127.0.0.1", state=state, endpoints=endpoints, info=info)

    def _look(self) -> None:
        engines = self.engines.values()
        states: set[EngineState] = {engine.state for engine in engines}
        error = next((engine.error for engine in engines if engine.error is not None), None)
        if states == {"failed"}:
            self.give_up(error or "the engines failed")
        elif self.state == "restarting" and "ready" in states:
            self._enter("ready", None)
        elif self.state == "ready" and "ready" not in states:
            self._enter("restarting", error)
        elif self.state == "starting":
            self.error = error


def add_engines(service: Service, config: Config, num_gpus: int) -> None:
    """Adds the model of several engines to the service of a server. Raises ValueError."""
    options = engines_of(config, num_gpus)
    scheduler = config.engine.scheduler
    model = config.engine.model.model
    share_experts = config.server.enable_expert_parallel and config.engine.executor != "fake"
    engine = DataParallelEngine(options, model, scheduler.max_waiting, share_experts=share_experts)
    whole = as_one(config.engine, len(options), max_waiting=scheduler.max_waiting)
    served = service.add(engine, whole, config.server.served_model_names)
    metrics = ClusterMetrics(engine.router.snapshot, lambda: {served.names[0]: engine.migrations})
    service.metrics.watch(metrics, metrics.refresh)
