"""The replicas of one deployment as a router sees them: what is cached where, who has how much to do, who comes first.

Knows events, statistics and the cost; nothing of Ray, nor of requests that wait in front. It belongs to one event loop:
its subscriptions run there, and everything is called there.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import zmq.asyncio

from oscine.cluster.routing.cost import CostWeights, rank, sticky_key
from oscine.cluster.routing.kv_index import KVIndex
from oscine.cluster.routing.kv_subscriber import KVSubscriber
from oscine.cluster.routing.recent_placements import RecentPlacements
from oscine.cluster.routing.replica_view import Expected, ReplicaReport, ReplicaView
from oscine.cluster.spec.snapshot import ReplicaSnapshot
from oscine.engine.peers.kv_events import page_hash
from oscine.types import Endpoints, EngineInfo, EngineStats

_PLACED_KEPT = 4096  # requests; those that a replica is being asked for are among them


@dataclass(frozen=True, slots=True)
class _Subscription:
    endpoints: Endpoints
    subscriber: KVSubscriber
    task: asyncio.Task[None]


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request was sent."""

    replica: str
    num_overlap: int  # tokens of it that were believed to be cached there


class _Sink:
    """Where the news of one replica go."""

    def __init__(self, fleet: "Fleet", replica: str) -> None:
        self._fleet, self._replica = fleet, replica

    def store(self, pages: Iterable[bytes | int]) -> None:
        self._fleet.index.store(self._replica, pages)

    def remove(self, pages: Iterable[bytes | int]) -> None:
        self._fleet.index.remove(self._replica, pages)

    def clear(self) -> None:
        self._fleet.index.clear(self._replica)

    def hear(self, stats: EngineStats) -> None:
        self._fleet.hear(self._replica, stats)


class Fleet:
    """All replicas of a deployment. A change of what they can take is told to `on_change`."""

    def __init__(self, weights: CostWeights | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self.weights = weights or CostWeights()
        self.key = ""  # the cluster's: see oscine.engine.wire.tcp
        self.index = KVIndex()
        self.info: EngineInfo | None = None  # of any replica; where there is none, of one that there was
        self.on_change: Callable[[], None] = lambda: None
        self._clock = clock
        self._views: dict[str, ReplicaView] = {}
        self._recent = RecentPlacements()
        self._subscriptions: dict[str, _Subscription] = {}
        self._retired: dict[str, set[str]] = {}  # replica -> addresses of earlier lives of its engine
        self._ended_gaps = 0  # of subscriptions that are over
        self._placed: dict[str, Placed] = {}  # the last requests
        self._ranked: tuple[Sequence[bytes], dict[str, int]] = ([], {})  # the last one's pages, and who has them
        self._context: zmq.asyncio.Context | None = None  # made by the first subscription

    def __len__(self) -> int:
        return len(self._views)

    @property
    def num_gaps(self) -> int:
        """Times that events were missed, or began anew."""
        return self._ended_gaps + sum(s.subscriber.num_gaps for s in self._subscriptions.values())

    async def close(self) -> None:
        """Ends all subscriptions."""
        tasks = [subscription.task for subscription in self._subscriptions.values()]
        self.update({})
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._context is not None:
            self._context.term()
            self._context = None

    # ---- who there is ----

    def update(self, reports: Mapping[str, ReplicaReport]) -> None:
        """These are the replicas now, and what they said last."""
        for name in [name for name in self._views if name not in reports]:
            self.remove(name)
        for name, report in reports.items():
            self.index.add(name)
            view = self._views.setdefault(name, ReplicaView(name, self._clock()))
            endpoints = report.endpoints
            if endpoints is not None and endpoints.requests in self._retired.get(name, ()):
                endpoints = view.report.endpoints  # the report is older than what the replica itself has said since
            view.report = replace(report, endpoints=endpoints)
            self._follow(view)
        if reports:
            self.info = next((report.info for report in reports.values() if report.info is not None), None)
        self.on_change()

    def remove(self, name: str) -> None:
        """The replica is gone."""
        self._views.pop(name, None)
        self._retired.pop(name, None)
        self._unsubscribe(name)
        self.index.drop(name)

    def meet(self, name: str, endpoints: Endpoints) -> None:
        """A replica says where its engine listens: news, if the engine was started again since the last report."""
        view = self._views.get(name)
        if view is None or view.report.endpoints == endpoints:
            return
        if view.report.endpoints is not None:
            self._retired.setdefault(name, set()).add(view.report.endpoints.requests)
        view.report = replace(view.report, endpoints=endpoints)
        self._follow(view)

    def refuse(self, name: str) -> None:
        """The replica did not take a request."""
        if name in self._views:
            self._views[name].refuse(self._clock())

    def address(self, name: str) -> str | None:
        """Where its engine takes requests; another one in each life of the engine."""
        view = self._views.get(name)
        return view.report.endpoints.requests if view is not None and view.report.endpoints is not None else None

    def snapshot(self) -> list[ReplicaSnapshot]:
        now_s = self._clock()
        return [view.snapshot(self.index.num_pages(name), now_s) for name, view in self._views.items()]

    # ---- what they can take ----

    def candidates(self, exclude: Collection[str] = ()) -> list[ReplicaView]:
        """Replicas that take requests."""
        now_s = self._clock()
        return [v for name, v in self._views.items() if name not in exclude and v.state(now_s) == "ready"]

    def room(self, exclude: Collection[str] = ()) -> int:
        """Requests that the replicas can take before they have enough to do."""
        now_s = self._clock()
        views = self.candidates(exclude)
        return sum(max(0, v.bound - v.num_requests(now_s)) for v in views)

    def rank(self, digests: Sequence[bytes], num_tokens: int, exclude: Collection[str] = ()) -> list[str]:
        """Replicas that may take a request, best first; those that have enough to do come last."""
        now_s = self._clock()
        views = self.candidates(exclude)
        loads = {v.name: v.load(self.index.num_pages(v.name), now_s) for v in views}
        pages = self.overlap_pages(digests)
        self._ranked = (digests, pages)
        tokens = {v.name: min(pages.get(v.name, 0) * v.page_size, num_tokens) for v in views}
        key = sticky_key(digests, [pages[v.name] for v in views if v.name in pages])
        free = [loads[v.name] for v in views if loads[v.name].num_requests < v.bound]
        busy = [loads[v.name] for v in views if loads[v.name].num_requests >= v.bound]
        return [name for some in (free, busy) for name in rank(some, tokens, num_tokens, key, self.weights)]

    def overlap_pages(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Replica -> leading pages that it has, or will have when it has computed what was placed on it."""
        pages = self.index.overlap(map(page_hash, digests))
        recent = self._recent.find(digests, max(pages.values(), default=0), self._clock())
        if recent is not None and recent[0] in self._views:
            replica, num_pages = recent
            pages[replica] = max(pages.get(replica, 0), num_pages)
        return pages

    def place(self, request_id: str, name: str, digests: Sequence[bytes], num_tokens: int) -> None:
        """The request is sent there. It counts at once; a second call moves it."""
        placed = self._placed.get(request_id)
        if name not in self._views or (placed is not None and placed.replica == name):
            return
        now_s = self._clock()
        self.withdraw(request_id)
        view = self._views[name]
        known = self._ranked[1] if self._ranked[0] is digests else self.overlap_pages(digests)
        overlap = min(known.get(name, 0) * view.page_size, num_tokens)
        view.expect(Expected(request_id, num_tokens, overlap, now_s))
        self._recent.note(digests[known.get(name, 0) :], name, now_s)
        self._placed[request_id] = Placed(name, overlap)
        if len(self._placed) > _PLACED_KEPT:
            del self._placed[next(iter(self._placed))]

    def placed(self, request_id: str) -> Placed | None:
        """Where a request was sent, if that is not long ago."""
        return self._placed.get(request_id)

    def withdraw(self, request_id: str) -> None:
        """The request does not go where it was sent."""
        placed = self._placed.pop(request_id, None)
        if placed is not None and placed.replica in self._views:
            self._views[placed.replica].withdraw(request_id)

    def hear(self, name: str, stats: EngineStats) -> None:
        """A snapshot of a replica's engine arrived."""
        if name in self._views:
            self._views[name].hear(stats, self._clock())
            self.on_change()

    # ---- subscriptions ----

    def _follow(self, view: ReplicaView) -> None:
        """Subscribes to the events of a replica's present engine."""
        endpoints, following = view.report.endpoints, self._subscriptions.get(view.name)
        if following is not None and following.endpoints == endpoints:
            return
        if following is not None:
            self._unsubscribe(view.name)
            self.index.clear(view.name)
            view.begin_life(self._clock())
        if endpoints is None or endpoints.kv_events is None:
            return
        if self._context is None:
            self._context = zmq.asyncio.Context()
        sink = _Sink(self, view.name)
        subscriber = KVSubscriber(self._context, endpoints.kv_events, endpoints.kv_replay, sink, self.key)
        self._subscriptions[view.name] = _Subscription(endpoints, subscriber, asyncio.create_task(subscriber.run()))

    def _unsubscribe(self, name: str) -> None:
        subscription = self._subscriptions.pop(name, None)
        if subscription is not None:
            self._ended_gaps += subscription.subscriber.num_gaps
            subscription.task.cancel()


# Serve makes the routers, and gives nobody a way to them; this is the way to what they know.
_fleets: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, str], Fleet]] = WeakKeyDictionary()


def fleet_of(app: str, deployment: str) -> Fleet:
    """What the handles of a deployment that route on the running event loop know of its replicas."""
    fleets = _fleets.setdefault(asyncio.get_running_loop(), {})
    return fleets.setdefault((app, deployment), Fleet())
