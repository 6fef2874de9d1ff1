"""The cluster's own numbers in an ingress's /metrics: of every replica, of the router, and of requests that moved.

Knows snapshots and how metrics are called; nothing of Ray, nor of single requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.api.telemetry.engine_metrics import family_of
from oscine.cluster.client.engine import MigrationCounters
from oscine.cluster.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters
from oscine.types import STATISTICS

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # with a router that does not answer: a scrape waits no longer

_LABELS = ("replica", "model_name", "role", "node")
_STATES = ("starting", "ready", "draining", "lost")

_OfRouter = Callable[[RouterCounters], float]
_ROUTER_COUNTERS: tuple[tuple[str, str, _OfRouter], ...] = (
    ("requests_placed", "Requests that got a place", lambda r: r.placed),
    ("requests_refused", "Requests that got none, for overload", lambda r: r.refused),
    ("overlap_tokens", "Tokens believed to be cached where requests were placed", lambda r: r.overlap_tokens),
    ("known_tokens", "Tokens of the requests placed", lambda r: r.known_tokens),
    ("remote_prefills", "Requests placed with a replica that computes their prompt", lambda r: r.remote_prefills),
    ("event_gaps", "KV events that were missed and asked for again", lambda r: r.event_gaps),
    ("queue_seconds", "Seconds that requests waited for a place, added up", lambda r: r.queue_s),
)
_OfMoves = Callable[[MigrationCounters], float]
_MOVES: tuple[tuple[str, str, _OfMoves], ...] = (
    ("migrations", "Requests that went on in another replica, each time", lambda m: m.migrations),
    ("migration_failures", "Requests that lost their replica and could not go on", lambda m: m.failures),
    ("migration_pause_seconds", "Longest pause of each request that moved, added up", lambda m: m.pause_s),
)


class ClusterMetrics(Collector):
    """What `refresh` last learned. While the router does not answer, nothing is said of it and of the replicas."""

    def __init__(
        self,
        snapshot: Callable[[], Awaitable[ClusterSnapshot]],
        migrations: Callable[[], Mapping[str, MigrationCounters]],
    ) -> None:
        """`snapshot` asks the router; `migrations` are those of this ingress, by the first names of the models."""
        self._ask, self._migrations = snapshot, migrations
        self._snapshot: ClusterSnapshot | None = None

    async def refresh(self) -> None:
        """Before each scrape."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                self._snapshot = await self._ask()
        except Exception as error:  # whatever it is, the other metrics are to be seen
            self._snapshot = None
            logger.warning("the router says nothing of the cluster: %s", error or type(error).__name__)

    def collect(self) -> Iterable[Metric]:
        known = self._snapshot or ClusterSnapshot(0.0)
        yield GaugeMetricFamily("oscine:router_up", "1 while the router answers", float(self._snapshot is not None))
        yield from _replicas(known.replicas)
        yield from _router(known)
        yield from self._moves()

    def _moves(self) -> Iterable[Metric]:
        moves = self._migrations()
        for name, what, read in _MOVES:
            counter = CounterMetricFamily(f"oscine:{name}", what, labels=["model_name"])
            yield _filled(counter, (([model], read(counters)) for model, counters in moves.items()))
        name, what = "oscine:migration_longest_pause_seconds", "Of all requests that moved"
        longest = GaugeMetricFamily(name, what, labels=["model_name"])
        yield _filled(longest, (([model], counters.longest_pause_s) for model, counters in moves.items()))


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
    for name, what, read in _ROUTER_COUNTERS:
        counter = CounterMetricFamily(f"oscine:router_{name}", what, labels=["model_name"])
        yield _filled(counter, (([of.model], read(of)) for of in known.routers))


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[tuple[Sequence[str], float]]) -> Metric:
    for labels, value in samples:
        family.add_metric(labels, value)
    return family
