"""The router of an ingress for the time that the cluster's router is away: its machine is lost, or not to be reached.

It knows the replicas from the router, follows their engines itself, and so places requests at once. Each ingress has
one. A router that is back is in charge of a model again as soon as a replica of the model has enlisted with it.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from oscine.extensions.replicas.routing.router import Router
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.extensions.replicas.spec.placement import Place, Placement
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaReport
from oscine.types import EngineInfo


class StandbyRouter:
    """Implements Substitute. Belongs to the event loop of its client."""

    def __init__(self, key: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """`key`: the cluster's; see oscine.engine.wire.tcp."""
        self.num_placed = 0
        self._router = Router(key, clock)
        self._models: set[str] = set()
        self._known: dict[str, tuple[ReplicaReport, asyncio.Task[None]]] = {}  # replicas of the last lists
        self._of_router: set[str] = set()  # models that the cluster's router can place

    def reconfigure(self, models: Sequence[ModelSpec]) -> None:
        """The models now."""
        self._models = {model.name for model in models}
        self._router.reconfigure(models)
        for name, (report, _) in list(self._known.items()):
            if report.model not in self._models:
                self._forget(name)

    def hear(self, replicas: dict[str, ReplicaReport] | None) -> None:
        """See Substitute. A router that has just started knows no replica yet: what was known before remains."""
        self._of_router = {report.model for report in (replicas or {}).values()}
        for name, report in (replicas or {}).items():
            known = self._known.get(name)
            if report.model in self._models and (known is None or known[0] != report):
                self._known[name] = report, asyncio.create_task(self._router.enlist(name, report))
                if known is not None:
                    known[1].cancel()
        for name, (report, _) in list(self._known.items()):
            if replicas is not None and name not in replicas and report.model in self._of_router:
                self._forget(name)

    def _forget(self, name: str) -> None:
        self._known.pop(name)[1].cancel()

    def serves(self, model: str) -> bool:
        return model not in self._of_router and self._router.has_replica(model)

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        place = await self._router.place(placement)
        self.num_placed += 1
        return place

    async def describe(self, model: str) -> EngineInfo:
        return await self._router.describe(model)

    async def snapshot(self) -> ClusterSnapshot:
        """Of the replicas; not of the cluster's router."""
        return replace(await self._router.snapshot(), routers=[], queued={})

    async def close(self) -> None:
        for name in list(self._known):
            self._forget(name)
        await self._router.close()
