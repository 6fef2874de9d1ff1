"""One replica as a router sees it: its own report, and the requests placed on it that are not in a report yet."""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice
from math import inf

from oscine.extensions.replicas.routing.cost import ReplicaLoad
from oscine.extensions.replicas.spec.snapshot import ReplicaReport, ReplicaSnapshot, ReplicaState
from oscine.settings.config import SEQS, CacheOptions
from oscine.types import EngineStats

_PENDING_S = 2.0  # a placed request that no report shows by then never arrived
_RATES_S = 5.0  # that rates look back on
_SILENT_S = 4.0  # an engine reports every second at least
_ARRIVED_KEPT = 256  # requests; those that wait are the last that arrived


_NOTHING = EngineStats()


@dataclass(frozen=True, slots=True)
class Expected:
    """A request that was placed and is not in the replica's reports yet."""

    request_id: str
    num_tokens: int
    num_overlap: int  # of these, believed to be cached
    placed_s: float


@dataclass(slots=True)
class ReplicaView:
    """The replica's latest report and statistics."""

    name: str
    since_s: float  # when the router learned of it
    report: ReplicaReport = field(default_factory=ReplicaReport)
    stats: EngineStats | None = None  # none was heard yet of the engine's present life
    # Requests that keep its engine busy between two of its reports: all its sequences, and some that wait.
    bound: int = field(init=False)
    _publishes: bool = field(init=False)  # events and statistics
    _heard_s: float | None = None
    _history: deque[tuple[float, EngineStats]] = field(default_factory=deque)  # of the last seconds
    _expected: OrderedDict[str, Expected] = field(default_factory=OrderedDict)  # in the order of placement
    _expected_tokens: int = 0  # of these
    _expected_overlap: int = 0
    _arrived: deque[int] = field(default_factory=lambda: deque(maxlen=_ARRIVED_KEPT))  # overlap of each, oldest first
    # Tokens that its engine counts as queued because they belong to requests that wait, and that it will find cached.
    _waiting_overlap: int = 0
    _load: tuple[ReplicaLoad, float] | None = None  # the last load, and until when it is true if nothing is heard

    @property
    def page_size(self) -> int:
        return self.report.info.page_size if self.report.info is not None else CacheOptions.page_size

    def __post_init__(self) -> None:
        self.describe(self.report)

    def describe(self, report: ReplicaReport) -> None:
        """It says this of itself."""
        self.report, self._load = report, None
        max_num_seqs = report.info.max_num_seqs if report.info is not None else SEQS
        self.bound = max_num_seqs + max(4, max_num_seqs // 4)
        self._publishes = report.endpoints is not None and report.endpoints.kv_events is not None

    def begin_life(self, now_s: float) -> None:
        """Its engine is another one than before."""
        self.stats, self._heard_s, self.since_s = None, None, now_s
        self._history.clear()
        self._expected.clear()
        self._expected_tokens = self._expected_overlap = 0
        self._arrived.clear()
        self._waiting_overlap, self._load = 0, None

    def hear(self, stats: EngineStats, now_s: float) -> None:
        """Takes in a snapshot of its engine, and stops expecting the requests that are in it."""
        before = self.stats
        if before is not None and stats.requests < before.requests:
            self.begin_life(now_s)
            before = None
        # A first report does not show whether it has those that are expected.
        arrived = stats.requests - before.requests if before is not None else len(self._expected)
        for request_id in list(islice(self._expected, arrived)):
            self._arrived.append(self.withdraw(request_id))
        self._waiting_overlap = sum(islice(reversed(self._arrived), stats.num_waiting))
        self.stats, self._heard_s, self._load = stats, now_s, None
        self._history.append((now_s, stats))
        while self._history[0][0] < now_s - _RATES_S:
            self._history.popleft()

    def expect(self, request: Expected) -> None:
        self._expected[request.request_id] = request
        self._expected_tokens += request.num_tokens
        self._expected_overlap += request.num_overlap
        self._load = None

    def withdraw(self, request_id: str) -> int:
        """The request is not expected any more. Returns the tokens of it that were believed to be cached."""
        request = self._expected.pop(request_id, None)
        if request is None:
            return 0
        self._expected_tokens -= request.num_tokens
        self._expected_overlap -= request.num_overlap
        self._load = None
        return request.num_overlap

    def state(self, now_s: float) -> ReplicaState:
        if self.report.state != "ready":
            return self.report.state
        if not self._publishes:
            return "ready"
        return "lost" if now_s > self._last_sign_s + _SILENT_S else "ready"

    def num_requests(self, now_s: float) -> int:
        """That wait or run, those expected included."""
        while self._expected:
            oldest = next(iter(self._expected.values()))
            if now_s - oldest.placed_s <= _PENDING_S:
                break
            self.withdraw(oldest.request_id)
        running = self.stats.num_running + self.stats.num_waiting if self.stats is not None else 0
        return running + len(self._expected)

    def same_until_s(self, now_s: float) -> float:
        """Until when its state and its load are those of now, if nothing is heard and placed."""
        self.load(now_s)
        assert self._load is not None
        until_s = self._load[1]
        if self._publishes and self.state(now_s) == "ready":
            until_s = min(until_s, self._last_sign_s + _SILENT_S)
        return until_s

    @property
    def _last_sign_s(self) -> float:
        return self._heard_s if self._heard_s is not None else self.since_s

    def load(self, now_s: float) -> ReplicaLoad:
        if self._load is None or now_s > self._load[1]:
            load = self._count_load(now_s)
            oldest = next(iter(self._expected.values()), None)
            self._load = load, inf if oldest is None else oldest.placed_s + _PENDING_S
        return self._load[0]

    def _count_load(self, now_s: float) -> ReplicaLoad:
        stats, size = self.stats or _NOTHING, self.page_size
        num_requests = self.num_requests(now_s)
        new_tokens = self._expected_tokens - self._expected_overlap
        capacity = stats.full_pages_total * size
        slot_tokens = capacity / max(stats.kv_slots_total, 1)
        return ReplicaLoad(
            self.name,
            queued_tokens=max(0, stats.queued_tokens - self._waiting_overlap) + new_tokens,
            active_tokens=stats.active_tokens + self._expected_tokens,
            num_requests=num_requests,
            capacity_tokens=capacity,
            held_tokens=round(stats.kv_slots_used * slot_tokens) + new_tokens,
            cached_tokens=round(stats.kv_slots_cached * slot_tokens),
        )

    def snapshot(self, num_indexed_pages: int, now_s: float) -> ReplicaSnapshot:
        now = self.stats or _NOTHING
        then_s, then = self._history[0] if self._history else (now_s, now)
        elapsed_s = (self._heard_s or now_s) - then_s
        per_s = 1 / elapsed_s if elapsed_s > 0 else 0.0
        return ReplicaSnapshot(
            self.name,
            self.report.model,
            self.report.role,
            self.report.node,
            self.state(now_s),
            now,
            tokens_s=(now.generated_tokens - then.generated_tokens) * per_s,
            prompt_tokens_s=(now.prompt_tokens - then.prompt_tokens) * per_s,
            ttft_s=_mean(now.first_token_s - then.first_token_s, now.first_tokens - then.first_tokens),
            itl_s=_mean(now.inter_token_s - then.inter_token_s, now.inter_tokens - then.inter_tokens),
            num_indexed_pages=num_indexed_pages,
        )


def _mean(total: float, count: int) -> float | None:
    return total / count if count > 0 else None
