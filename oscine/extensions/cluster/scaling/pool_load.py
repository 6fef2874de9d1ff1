"""The load of one pool (a role of a model) in the last seconds, as input of scaling.

Made from series of points: the values of Replica.record_autoscaling_stats, as Serve keeps them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oscine.types import STATISTICS, EngineStats

LOOK_BACK_S = 5.0  # window of counters: enough tokens for a mean, and old values are gone before a replica has started
GAUGE_S = 3.0  # window of gauges, which are averaged: a shorter load is no reason to start a replica
STALE_S = 5.0  # a replica that has not reported for this long is starting, ending or lost; clocks may differ by less

_LOADS = tuple(statistic for statistic in STATISTICS if "load" in statistic.readers)
_MEANS = ("running", "waiting", "queued_tokens", "kv_usage")  # fields of ReplicaLoad, and series
_NEWEST = ("max_num_seqs", "held_back", "held_back_s")
_GROWTH = {"asked_tokens": "prefix_queries", "cached_tokens": "prefix_hits"} | {
    name: name for name in ("first_tokens", "inter_tokens", "inter_token_s")
}
Series = Mapping[str, Sequence[tuple[float, float]]]  # name -> (Unix time, value), oldest first


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """Of one replica; the first four are means over GAUGE_S, counts are over window_s."""

    running: float = 0.0  # sequences
    waiting: float = 0.0  # requests
    queued_tokens: float = 0.0  # to be computed, before a look into the prefix cache
    kv_usage: float = 0.0  # 0..1, of the fuller group of pages
    least_queued_tokens: float = 0.0  # at any time of the window: above 0, there were always prompts to compute
    most_running: float = 0.0  # sequences, at any time of the window
    max_num_seqs: float = 0.0  # sequences that it runs at once; 0: not known
    window_s: float = LOOK_BACK_S
    asked_tokens: float = 0.0  # in the prompts of requests
    cached_tokens: float = 0.0  # of these in the prefix cache
    first_tokens: float = 0.0
    inter_tokens: float = 0.0
    inter_token_s: float = 0.0
    held_back: float = 0.0  # requests queued at the router, by its last message to this replica
    held_back_s: float = 0.0  # when; Unix time

    @property
    def computed_tokens_s(self) -> float:
        """Computed prompt tokens per second."""
        return (self.asked_tokens - self.cached_tokens) / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """The load of the whole pool."""

    time_s: float  # Unix time
    ready: int  # replicas that are in service, whether they report or not
    replicas: tuple[ReplicaLoad, ...] = ()  # of those that report
    queued: float = 0.0  # requests at Serve's handles in the last seconds; without a replica they wait for one

    @property
    def num_missing(self) -> int:
        return max(0, self.ready - len(self.replicas))

    @property
    def held_back(self) -> float:
        """Requests queued at the router, by its newest message. It queues none while a replica has a free sequence."""
        if not self.replicas or any(r.running + r.waiting < r.max_num_seqs for r in self.replicas):
            return 0.0
        return max(self.replicas, key=lambda r: r.held_back_s).held_back

    @property
    def requests(self) -> float:
        """Running and waiting requests, wherever they wait."""
        queued = self.queued if self.ready == 0 else 0.0  # else they are calls of the router, over in a moment
        return self.total("running") + self.total("waiting") + self.held_back + queued

    @property
    def idle(self) -> bool:
        """Whether there are replicas, and no request for any of them in the whole window."""
        asked = self.requests or self.queued or self.total("asked_tokens") or self.total("inter_tokens")
        return bool(self.replicas) and not asked

    def total(self, name: str) -> float:
        return float(sum(getattr(r, name) for r in self.replicas))


def replica_load(series: Series, now_s: float) -> ReplicaLoad | None:
    """The load of one replica; None if it has not reported."""
    newest_s = max((points[-1][0] for points in series.values() if points), default=-math.inf)
    if newest_s < now_s - STALE_S:
        return None
    running = _since(series, "running", newest_s - LOOK_BACK_S)
    span_s = max(newest_s - series["running"][0][0], 0.0) if len(running) > 1 else 0.0

    def mean(name: str) -> float:
        values = _since(series, name, newest_s - GAUGE_S)
        return sum(values) / len(values) if values else 0.0

    return ReplicaLoad(
        **{name: mean(name) for name in _MEANS},
        **{name: series[name][-1][1] if series.get(name) else 0.0 for name in _NEWEST},
        # The growth of a counter. The first point is from before the window.
        **{field: sum(_since(series, name, newest_s - LOOK_BACK_S)[1:]) for field, name in _GROWTH.items()},
        least_queued_tokens=min(_since(series, "queued_tokens", newest_s - LOOK_BACK_S), default=0.0),
        most_running=max(running, default=0.0),
        window_s=min(span_s, LOOK_BACK_S),
    )


def report(now: EngineStats, before: EngineStats) -> dict[str, float]:
    """One point of each series: gauges, and the growth of counters; a restarted engine adds nothing."""
    if now.steps < before.steps or now.requests < before.requests:
        before = now
    return {
        load.load_name: float(getattr(now, load.field) - (getattr(before, load.field) if load.only_grows else 0))
        for load in _LOADS
    }


def _since(series: Series, name: str, from_s: float) -> list[float]:
    return [value for time_s, value in series.get(name, ()) if time_s >= from_s]
