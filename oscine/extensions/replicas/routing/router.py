"""Places the requests of every model of a cluster, and says how the cluster does.

Replicas enlist here; their engines report what they have cached and how much they do. Nothing is stored. After a
restart it learns of replicas as they enlist again, of their pages by replay, and of their load from their next report.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import NoReturn

from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.types import EngineInfo, Role

_AGAIN_S = 5.0  # where a model is not deployed
_TOGETHER_S = 0.2  # changes within this time are told together
_SETTLE_S = 0.3  # from the first replica that enlists: those that come by then are there together


class Router:
    """Implements Placer; every method runs on one event loop."""

    def __init__(self, key: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`key`: the cluster's; see oscine.engine.wire.tcp."""
        self._key, self._clock = key, clock
        self._routers: dict[str, ModelRouter] = {}
        self._fleets: dict[tuple[str, Role], Fleet] = {}  # by model and role, as replicas name them
        self._enlisted: dict[str, object] = {}  # replica -> its newest report's token
        self._reports: dict[str, ReplicaReport] = {}  # of these
        self._changed = asyncio.Event()  # of _reports; each is set once
        self._settled_s: float | None = None  # on the event loop's clock

    def reconfigure(self, models: Iterable[ModelSpec]) -> None:
        """The models now; requests of the others find no place any more."""
        routers: dict[str, ModelRouter] = {}
        for model in models:
            router = self._routers.get(model.name)
            if router is not None and _roles(router.model) == _roles(model):
                router.reconfigure(model)
            else:
                prefill = self._fleet(model.name, "prefill") if model.role("prefill") else None
                router = ModelRouter(model, self._fleet(model.name, model.serving.role), prefill, self._clock)
            routers[model.name] = router
        self._routers = routers

    async def enlist(self, replica: str, report: ReplicaReport) -> NoReturn:
        """The replica is there until this is cancelled, or called with a newer report.

        A router that is started again has requests that wait. They are not all for the replica that comes first.
        """
        token = self._enlisted[replica] = object()
        self._report(replica, report)
        fleet = self._fleet(report.model, report.role)
        now_s = asyncio.get_running_loop().time()
        self._settled_s = self._settled_s or now_s + _SETTLE_S
        try:
            if now_s < self._settled_s:
                await asyncio.sleep(self._settled_s - now_s)
            fleet.join(replica, report)
            while True:
                await asyncio.Event().wait()
        finally:
            if self._enlisted.get(replica) is token:
                del self._enlisted[replica]
                self._report(replica, None)
                fleet.remove(replica)

    def _report(self, replica: str, report: ReplicaReport | None) -> None:
        """None: it is not there any more."""
        if report is None:
            del self._reports[replica]
        else:
            self._reports[replica] = report
        self._changed.set()
        self._changed = asyncio.Event()

    async def reports(self) -> AsyncIterator[dict[str, ReplicaReport]]:
        """Of all replicas that have enlisted, by name: at once, and after changes."""
        while True:
            changed = self._changed
            yield dict(self._reports)
            await changed.wait()
            await asyncio.sleep(_TOGETHER_S)

    def has_replica(self, model: str) -> bool:
        """Whether a request of the model can be placed on a replica that is there."""
        router = self._routers.get(model)
        return router is not None and bool(router.generate.candidates())

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        return await self._router(placement.model).place(placement)

    def place_now(self, placement: Placement) -> Place | None:
        """As `place`, but None where it would wait or refuse."""
        router = self._routers.get(placement.model)
        return router.place_now(placement) if router is not None else None

    async def describe(self, model: str) -> EngineInfo:
        """Of any replica of the model, once one was ready. Raises NoPlace when it cannot be served."""
        return await self._router(model).describe()

    async def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(
            time.time(),
            replicas=[replica for fleet in self._fleets.values() for replica in fleet.snapshot()],
            routers=[router.counters for router in self._routers.values()],
            queued={model: router.num_queued for model, router in self._routers.items()},
        )

    def queued(self) -> dict[str, int]:
        """Requests that wait for a place, of the models that have any."""
        return {model: router.num_queued for model, router in self._routers.items() if router.num_queued}

    def missing(self) -> list[tuple[str, Role]]:
        """Models and roles without a replica, that requests have asked for since the last call."""
        return [(model, role) for model, router in self._routers.items() for role in router.missing()]

    async def close(self) -> None:
        await asyncio.gather(*(fleet.close() for fleet in self._fleets.values()))

    def _fleet(self, model: str, role: Role) -> Fleet:
        return self._fleets.setdefault((model, role), Fleet(self._key, self._clock))

    def _router(self, model: str) -> ModelRouter:
        router = self._routers.get(model)
        if router is None:
            raise NoPlace(f"the model {model!r} is not deployed", retry_after_s=_AGAIN_S, overloaded=False)
        return router


def _roles(model: ModelSpec) -> set[Role]:
    return {role.role for role in model.roles}
