"""What the replicas of one pool (a role of a model) had to do in the last seconds, as scaling looks at it.

Made from series of points, as Serve keeps what Replica.record_autoscaling_stats says. Knows no policy and no Ray.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oscine.types import EngineStats

LOOK_BACK_S = 5.0  # of what is counted: enough tokens for a mean, and old news are gone before a replica has started
GAUGE_S = 3.0  # of gauges, whose mean is taken: what is over sooner is no reason to start a replica
STALE_S = 5.0  # a replica that was not heard for so long is starting, ending or lost; clocks may differ by less

_COUNTERS = (
    *("first_tokens", "first_token_s", "inter_tokens", "inter_token_s", "prefix_queries", "prefix_hits"),
    *("prompt_tokens", "generated_tokens"),
)
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
    asked_tokens: float = 0.0  # that requests came with
    cached_tokens: float = 0.0  # of these in the prefix cache
    first_tokens: float = 0.0
    first_token_s: float = 0.0  # added up
    inter_tokens: float = 0.0
    inter_token_s: float = 0.0
    held_back: float = 0.0  # requests that the router did not place yet, as it told this replica last
    held_back_s: float = 0.0  # when; Unix time

    @property
    def computed_tokens_s(self) -> float:
        """Of prompts."""
        return (self.asked_tokens - self.cached_tokens) / self.window_s if self.window_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class PoolLoad:
    """All of the pool."""

    time_s: float  # Unix time
    ready: int  # replicas that are in service, whether they report or not
    replicas: tuple[ReplicaLoad, ...] = ()  # of those that report
    queued: float = 0.0  # requests at Serve's handles in the last seconds: where there is no replica they wait for one

    @property
    def num_missing(self) -> int:
        return max(0, self.ready - len(self.replicas))

    @property
    def held_back(self) -> float:
        """Requests at the router, by its newest word; it holds none back while a replica has a sequence to spare."""
        if not self.replicas or any(r.running + r.waiting < r.max_num_seqs for r in self.replicas):
            return 0.0
        return max(self.replicas, key=lambda r: r.held_back_s).held_back

    @property
    def requests(self) -> float:
        """That want to run now, wherever they wait."""
        queued = self.queued if self.ready == 0 else 0.0  # else they are calls of the router, over in a moment
        return self.total("running") + self.total("waiting") + self.held_back + queued

    @property
    def idle(self) -> bool:
        """There are replicas, and nobody asked them for anything in the whole window."""
        asked = self.requests or self.queued or self.total("asked_tokens") or self.total("inter_tokens")
        return bool(self.replicas) and not asked

    def total(self, name: str) -> float:
        return float(sum(getattr(r, name) for r in self.replicas))

    def mean(self, total: str, count: str) -> float | None:
        """Over all that was counted; None where nothing was."""
        number = self.total(count)
        return self.total(total) / number if number > 0 else None


def replica_load(series: Series, now_s: float) -> ReplicaLoad | None:
    """None where there is no news of it."""
    newest_s = max((points[-1][0] for points in series.values() if points), default=-math.inf)
    if newest_s < now_s - STALE_S:
        return None
    running = _since(series, "running", newest_s - LOOK_BACK_S)
    span_s = max(newest_s - series["running"][0][0], 0.0) if len(running) > 1 else 0.0

    def mean(name: str) -> float:
        values = _since(series, name, newest_s - GAUGE_S)
        return sum(values) / len(values) if values else 0.0

    def last(name: str) -> float:
        return series[name][-1][1] if series.get(name) else 0.0

    def grown(name: str) -> float:
        """The first point tells of the time before the window."""
        return sum(_since(series, name, newest_s - LOOK_BACK_S)[1:])

    return ReplicaLoad(
        running=mean("running"),
        waiting=mean("waiting"),
        queued_tokens=mean("queued_tokens"),
        kv_usage=mean("kv_usage"),
        least_queued_tokens=min(_since(series, "queued_tokens", newest_s - LOOK_BACK_S), default=0.0),
        most_running=max(running, default=0.0),
        max_num_seqs=last("max_num_seqs"),
        window_s=min(span_s, LOOK_BACK_S),
        asked_tokens=grown("prefix_queries"),
        cached_tokens=grown("prefix_hits"),
        first_tokens=grown("first_tokens"),
        first_token_s=grown("first_token_s"),
        inter_tokens=grown("inter_tokens"),
        inter_token_s=grown("inter_token_s"),
        held_back=last("held_back"),
        held_back_s=last("held_back_s"),
    )


def report(now: EngineStats, before: EngineStats) -> dict[str, float]:
    """One point of each series: gauges, and by how much the counters grew; an engine that begins again adds nothing."""
    if now.steps < before.steps or now.requests < before.requests:
        before = now
    return {
        "running": float(now.num_running),
        "waiting": float(now.num_waiting),
        "queued_tokens": float(now.queued_tokens),
        "active_tokens": float(now.active_tokens),
        "kv_usage": now.kv_usage,
    } | {name: float(getattr(now, name) - getattr(before, name)) for name in _COUNTERS}


def _since(series: Series, name: str, from_s: float) -> list[float]:
    return [value for time_s, value in series.get(name, ()) if time_s >= from_s]
