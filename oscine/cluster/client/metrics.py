"""The cluster's own numbers in an ingress's /metrics: of every replica, of the router, and of requests that moved.

Knows snapshots and how metrics are called; nothing of Ray, nor of single requests.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from oscine.cluster.client.engine import MigrationCounters
from oscine.cluster.spec.snapshot import ClusterSnapshot, ReplicaSnapshot, RouterCounters
from oscine.types import EngineStats

logger = logging.getLogger(__name__)

_PATIENCE_S = 2.0  # with a router that does not answer: a scrape waits no longer

_LABELS = ("replica", "model_name", "role", "node")
_STATES = ("starting", "ready", "draining", "lost")

_OfReplica = Callable[[ReplicaSnapshot], float]
_REPLICA_GAUGES: tuple[tuple[str, str, _OfReplica], ...] = (
    ("requests_running", "Sequences that run", lambda r: r.stats.num_running),
    ("requests_waiting", "Sequences that wait", lambda r: r.stats.num_waiting),
    ("queued_tokens", "Tokens not yet computed of live requests", lambda r: r.stats.queued_tokens),
    ("active_tokens", "Tokens known of the requests that run", lambda r: r.stats.active_tokens),
    ("kv_cache_usage_perc", "Used share of the fuller page group, 0 to 1", lambda r: r.stats.kv_usage),
    ("indexed_pages", "Pages that the router believes to be cached there", lambda r: r.num_indexed_pages),
)
_REPLICA_COUNTERS: tuple[tuple[str, str, _OfReplica], ...] = (
    ("prompt_tokens", "Prompt tokens of admitted requests", lambda r: r.stats.prompt_tokens),
    ("generation_tokens", "Generated tokens", lambda r: r.stats.generated_tokens),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda r: r.stats.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda r: r.stats.prefix_hits),
    ("preemptions", "Sequences that were put back to make room", lambda r: r.stats.preemptions),
    ("remote_prefills", "Prompts whose pages came from another engine", lambda r: r.stats.remote_prefills),
    (
        *("remote_prefill_failures", "Prompts that another engine was asked for and that were computed here"),
        lambda r: r.stats.remote_prefill_failures,
    ),
    ("fetched_pages", "KV pages that came from other engines", lambda r: r.stats.fetched_pages),
    ("fetched_bytes", "Bytes of these", lambda r: r.stats.fetched_bytes),
    ("fetch_seconds", "Seconds that fetching them took, added up", lambda r: r.stats.fetch_s),
)
_OfTimes = Callable[[EngineStats], tuple[int, float]]
_REPLICA_TIMES: tuple[tuple[str, str, _OfTimes], ...] = (
    ("time_to_first_token_seconds", "Arrival there to first token", lambda s: (s.first_tokens, s.first_token_s)),
    ("inter_token_latency_seconds", "Between tokens of a sequence", lambda s: (s.inter_tokens, s.inter_token_s)),
)
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
    for name, what, read in _REPLICA_GAUGES:
        gauge = GaugeMetricFamily(f"oscine:replica_{name}", what, labels=_LABELS)
        yield _filled(gauge, ((of, read(r)) for of, r in labelled))
    for name, what, read in _REPLICA_COUNTERS:
        counter = CounterMetricFamily(f"oscine:replica_{name}", what, labels=_LABELS)
        yield _filled(counter, ((of, read(r)) for of, r in labelled))
    for name, what, times in _REPLICA_TIMES:
        summary = SummaryMetricFamily(f"oscine:replica_{name}", what, labels=_LABELS)
        for of, r in labelled:
            summary.add_metric(of, *times(r.stats))
        yield summary


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
