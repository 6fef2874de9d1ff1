"""The replicas of one deployment as a router sees them: the pages of each, its load, and which is best for a request.

It belongs to one event loop: its subscriptions run there, and everything is called there.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import chain
from urllib.parse import urlsplit

from oscine.extensions.kv_events.publisher import page_hash
from oscine.extensions.replicas.routing.cost import rank, sticky_key
from oscine.extensions.replicas.routing.known_loads import KnownLoads
from oscine.extensions.replicas.routing.kv_index import KVIndex
from oscine.extensions.replicas.routing.kv_subscriber import KVSubscriptions
from oscine.extensions.replicas.routing.recent_placements import RecentPlacements
from oscine.extensions.replicas.routing.replica_view import Expected, ReplicaView
from oscine.extensions.replicas.spec.snapshot import ReplicaReport, ReplicaSnapshot
from oscine.types import EngineInfo, EngineStats

_PLACED_KEPT = 4096  # requests, which may still be withdrawn


class Fleet:
    """All replicas of a deployment. A change of what they can take is told to `on_change`."""

    def __init__(
        self,
        key: str = "",
        clock: Callable[[], float] = time.monotonic,
        page_hash: Callable[[bytes], Hashable] = page_hash,
    ) -> None:
        """`key`: the cluster's; see oscine.engine.wire.tcp. `page_hash`: from a digest to the hash in KV events."""
        self.index = KVIndex()
        self.info: EngineInfo | None = None  # of any replica; where there is none, of one that there was
        self.on_change: Callable[[], None] = lambda: None
        self._clock, self._page_hash = clock, page_hash
        self._views: dict[str, ReplicaView] = {}
        self._loads = KnownLoads(self._views)
        self._recent = RecentPlacements()
        self._subscriptions = KVSubscriptions(self.index, key)
        self._placed: OrderedDict[str, str] = OrderedDict()  # the last requests -> replicas
        # The last request's pages, and how many each replica has.
        self._ranked: tuple[Sequence[bytes], dict[str, int]] = ([], {})

    @property
    def is_missing(self) -> bool:
        """There is no replica, or only such as are about to go."""
        return all(view.report.state == "draining" for view in self._views.values())

    @property
    def num_gaps(self) -> int:
        """Times that events were missed, or began anew."""
        return self._subscriptions.num_gaps

    async def close(self) -> None:
        """Ends all subscriptions."""
        await self._subscriptions.close()

    # ---- which there are ----

    def join(self, name: str, report: ReplicaReport) -> None:
        """The replica is there, and says this of itself."""
        self.index.add(name)
        view = self._views.setdefault(name, ReplicaView(name, self._clock()))
        view.describe(report)
        if self._subscriptions.follow(name, report.endpoints, partial(self.hear, name)):
            view.begin_life(self._clock())
        self._loads.note(name)
        self.info = _known_info(self._views.values(), self.info)
        self.on_change()

    def remove(self, name: str) -> None:
        """The replica is gone."""
        self._views.pop(name, None)
        self._loads.note(name)
        self._subscriptions.end(name)
        self.index.drop(name)
        self.info = _known_info(self._views.values(), self.info)
        self.on_change()

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

    def has_room(self, exclude: Collection[str] = ()) -> bool:
        """Whether room() is not 0."""
        self._loads.refresh(self._clock())
        return any(name not in exclude for name in self._loads.free)

    def rank(
        self,
        digests: Sequence[bytes],
        num_tokens: int,
        exclude: Collection[str] = (),
        *,
        reader: str | None = None,
        num_read: int = 0,
    ) -> Iterator[str]:
        """Replicas that may take a request, best first; those that have enough to do come last.

        reader: the address of an engine that reads the pages of num_read tokens, preferably on the same machine.
        """
        self._loads.refresh(self._clock())
        free, busy = self._loads.free, self._loads.busy
        if exclude:
            free, busy = ({name: load for name, load in some.items() if name not in exclude} for some in (free, busy))
        pages = self.overlap_pages(digests)
        self._ranked = (digests, pages)
        having = [name for name in pages if name in free or name in busy]
        tokens = {name: min(pages[name] * self._views[name].page_size, num_tokens) for name in having}
        key = sticky_key(digests, [pages[name] for name in having])
        moved: dict[str, int] = {}
        if reader is not None:
            moved = {name: num_read for name in (*free, *busy) if not self._is_on(name, _machine(reader))}
        return chain.from_iterable(rank([*some.values()], tokens, num_tokens, key, moved) for some in (free, busy))

    def _is_on(self, name: str, machine: str | None) -> bool:
        address = self.address(name)
        return address is not None and _machine(address) == machine

    def overlap_pages(self, digests: Sequence[bytes]) -> dict[str, int]:
        """Replica -> leading pages that it has, or will have when it has computed what was placed on it."""
        pages = self.index.overlap(map(self._page_hash, digests))
        recent = self._recent.find(digests, max(pages.values(), default=0), self._clock())
        if recent is not None and recent[0] in self._views:
            replica, num_pages = recent
            pages[replica] = max(pages.get(replica, 0), num_pages)
        return pages

    def place(self, request_id: str, name: str, digests: Sequence[bytes], num_tokens: int) -> int:
        """The request is sent there; it counts at once. Returns the tokens of it that are believed to be cached."""
        now_s = self._clock()
        self.withdraw(request_id)
        view = self._views[name]
        known = self._ranked[1] if self._ranked[0] is digests else self.overlap_pages(digests)
        overlap = min(known.get(name, 0) * view.page_size, num_tokens)
        view.expect(Expected(request_id, num_tokens, overlap, now_s))
        self._loads.note(name)
        self._recent.note(digests[known.get(name, 0) :], name, now_s)
        self._placed[request_id] = name
        if len(self._placed) > _PLACED_KEPT:
            self._placed.popitem(last=False)
        return overlap

    def withdraw(self, request_id: str) -> None:
        """The request does not go where it was sent."""
        replica = self._placed.pop(request_id, None)
        if replica in self._views:
            self._views[replica].withdraw(request_id)
            self._loads.note(replica)

    def hear(self, name: str, stats: EngineStats) -> None:
        """A snapshot of a replica's engine arrived."""
        if name in self._views:
            self._views[name].hear(stats, self._clock())
            self._loads.note(name)
            self.on_change()


@lru_cache(maxsize=1024)
def _machine(address: str) -> str | None:
    """None for a socket that is a file."""
    return urlsplit(address).hostname


def _known_info(views: Collection[ReplicaView], last: EngineInfo | None) -> EngineInfo | None:
    """Of any replica; where there is none, the last one."""
    infos = (view.report.info for view in views if view.report.info is not None)
    return next(infos, None) if views else last
