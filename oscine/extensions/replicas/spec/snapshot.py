"""The state of a cluster as the router sees it: for `oscine cluster status`, for metrics and for scaling."""

from dataclasses import dataclass, field
from typing import Literal

from oscine.statistic import counter, seconds
from oscine.types import Endpoints, EngineInfo, EngineStats, Role

ReplicaState = Literal["starting", "ready", "draining", "lost"]
# Of a replica, by the state of its engine; a replica whose engine is in any other state is lost.
STATE_OF_ENGINE: dict[str, ReplicaState] = {"starting": "starting", "ready": "ready", "restarting": "starting"}


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica tells the router of itself."""

    model: str = ""
    role: Role = "aggregated"
    node: str = ""  # address of its machine
    state: ReplicaState = "ready"
    endpoints: Endpoints | None = None  # of its engine's present life
    info: EngineInfo | None = None


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One replica; rates are over the last seconds."""

    replica: str  # unique in the cluster, over its whole life
    model: str
    role: Role
    node: str  # address of its machine
    state: ReplicaState
    stats: EngineStats
    tokens_s: float = 0.0  # generated
    prompt_tokens_s: float = 0.0
    ttft_s: float | None = None  # mean, where there was any
    itl_s: float | None = None
    num_indexed_pages: int = 0  # that the router believes to be cached there


@dataclass(slots=True)
class RouterCounters:
    """Of one model; only grow while the router lives."""

    model: str
    placed: int = counter("Requests that got a place", "requests_placed")
    refused: int = counter("Requests that got none, for overload", "requests_refused")
    overlap_tokens: int = counter("Tokens believed to be cached where requests were placed", "overlap_tokens")
    known_tokens: int = counter("Tokens of the requests placed", "known_tokens")
    remote_prefills: int = counter("Requests placed with a replica that computes their prompt", "remote_prefills")
    event_gaps: int = counter("KV events that were missed and asked for again", "event_gaps")
    queue_s: float = seconds("Seconds that requests waited for a place, added up", "queue_seconds")


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    time_s: float  # Unix time
    replicas: list[ReplicaSnapshot] = field(default_factory=list)
    routers: list[RouterCounters] = field(default_factory=list)  # one a model
    queued: dict[str, int] = field(default_factory=dict)  # model -> requests that wait for a place
