"""The cluster's own numbers in an ingress's /metrics: of every replica, of the router, and of requests that moved."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.api.telemetry.engine_metrics import Samples, family_of
from oscine.extensions.replicas.client.dispatcher import MigrationCounters
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters
from oscine.statistic import declared
from oscine.types import STATISTICS

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # with a router that does not answer: a scrape waits no longer

_LABELS = ("replica", "model_name", "role", "node")
_STATES = ("starting", "ready", "draining", "lost")


class Standby(Protocol):
    """An ingress's own router, for the time that the cluster's is away."""

    num_placed: int  # requests

    async def snapshot(self) -> ClusterSnapshot:
        """Of the replicas."""
        ...


class ClusterMetrics(Collector):
    """What `refresh` last learned. While the router does not answer, nothing is said of it."""

    def __init__(
        self,
        snapshot: Callable[[], Awaitable[ClusterSnapshot]],
        migrations: Callable[[], Mapping[str, MigrationCounters]],
        standby: Standby | None = None,
    ) -> None:
        """`snapshot` asks the router; `migrations` are those of this ingress, by the first names of the models.

        `standby` says what is known of the replicas while the router is away.
        """
        self._ask, self._migrations, self._standby = snapshot, migrations, standby
        self._snapshot: ClusterSnapshot | None = None
        self._is_up = False  # the router answers

    async def refresh(self) -> None:
        """Before each scrape."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._snapshot, self._is_up = await self._ask(), True
        except Exception as error:  # the other metrics are read in any case
            self._is_up = False
            self._snapshot = await self._standby.snapshot() if self._standby is not None else None
            logger.warning("the router says nothing of the cluster: %s", error or type(error).__name__)

    def collect(self) -> Iterable[Metric]:
        known = self._snapshot or ClusterSnapshot(0.0)
        yield GaugeMetricFamily("oscine:router_up", "1 while the router answers", float(self._is_up))
        placed = 0 if self._standby is None else self._standby.num_placed
        here = "Requests that this process placed while the router was away"
        yield CounterMetricFamily("oscine:requests_placed_without_router", here, float(placed))
        yield from _replicas(known.replicas)
        yield from _router(known)
        moves = [([model], counters) for model, counters in self._migrations().items()]
        yield from _families(MigrationCounters, "oscine:", moves)


def _replicas(replicas: list[ReplicaSnapshot]) -> Iterable[Metric]:
    labelled = [([r.replica, r.model, r.role, r.node], r) for r in replicas]
    states = GaugeMetricFamily("oscine:replica_state", "1 for the state that it is in", labels=[*_LABELS, "state"])
    yield _filled(states, (([*of, state], float(r.state == state)) for of, r in labelled for state in _STATES))
    indexed = "Pages that the router believes to be cached there"
    pages = GaugeMetricFamily("oscine:replica_indexed_pages", indexed, labels=_LABELS)
    yield _filled(pages, ((of, r.num_indexed_pages) for of, r in labelled))
    samples = [(of, r.stats) for of, r in labelled]
    for statistic in STATISTICS:
        if "replica" in statistic.readers:
            name = f"oscine:replica_{statistic.metric.removeprefix('num_')}"
            yield family_of(statistic, name, _LABELS, samples)


def _router(known: ClusterSnapshot) -> Iterable[Metric]:
    queued = GaugeMetricFamily("oscine:router_requests_queued", "Requests that wait for a place", labels=["model_name"])
    yield _filled(queued, (([model], number) for model, number in known.queued.items()))
    yield from _families(RouterCounters, "oscine:router_", [([of.model], of) for of in known.routers])


def _families(kind: type, prefix: str, samples: Samples) -> Iterable[Metric]:
    for statistic in declared(kind):
        yield family_of(statistic, prefix + statistic.metric, ["model_name"], samples)


def _filled(family: GaugeMetricFamily, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
