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
        self._last: dict[str, ReplicaReport] = {}  # all replicas of the last lists
        self._known: dict[str, tuple[ReplicaReport, asyncio.Task[None]]] = {}  # of these, those of `_models`
        self._of_router: set[str] = set()  # models that the cluster's router can place

    def reconfigure(self, models: Sequence[ModelSpec]) -> None:
        """The models now. Their replicas may have been heard of before."""
        self._models = {model.name for model in models}
        self._router.reconfigure(models)
        self._follow()

    def hear(self, replicas: dict[str, ReplicaReport] | None) -> None:
        """See Substitute. A router that has just started knows no replica yet: what was known before remains."""
        now = replicas or {}
        self._of_router = {report.model for report in now.values()}
        kept = self._models - self._of_router if now else {report.model for report in self._last.values()}
        self._last = {name: report for name, report in self._last.items() if report.model in kept} | now
        self._follow()

    def _follow(self) -> None:
        wanted = {name: report for name, report in self._last.items() if report.model in self._models}
        for name, report in wanted.items():
            known = self._known.get(name)
            if known is None or known[0] != report:
                self._known[name] = report, asyncio.create_task(self._router.enlist(name, report))
                if known is not None:
                    known[1].cancel()
        for name in self._known.keys() - wanted.keys():
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
        for _, following in self._known.values():
            following.cancel()
        await self._router.close()
