"""Pages that come from elsewhere for a request that waits for them: from another engine, or back from the host.

New pages are held from the moment they are taken. What was launched before that may still write to them, so the copy
begins after a fence. When it has ended, the pages enter through the prefix index, and are held until the request
starts. Pages of a copy that is given up are not reused before it has ended. See decision 8.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.page_holds import Hold, Lacking
from oscine.engine.core.request import Request


class Copying(Protocol):
    """Pages on their way. Their memory must stay theirs until the state is no longer "running"."""

    @property
    def state(self) -> Literal["running", "done", "failed"]: ...

    def cancel(self) -> None:
        """Ends as failed as soon as nothing is being written any more."""
        ...


@dataclass(slots=True, eq=False)
class Arrival:
    """The pages of one prefix."""

    request: Request
    digests: list[bytes]  # of all whole pages of the prefix
    hold: Hold | None = None
    lacking: Lacking = field(default_factory=list)
    fence: int = 0  # steps that must have ended before the pages may be written to

    @property
    def num_lacking(self) -> int:
        return sum(map(len, self.lacking))

    def keys(self, lacking: Lacking) -> Iterator[tuple[int, bytes]]:
        """Group and digest."""
        return ((group, self.digests[i]) for group, places in enumerate(lacking) for i in places)


class Arrivals:
    """Not thread-safe."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._draining: list[tuple[Hold, Copying]] = []  # given up, but still being written to
        self._coming: set[tuple[int, bytes]] = set()  # group and digest of the pages that are being copied

    @property
    def is_draining(self) -> bool:
        return bool(self._draining)

    def drain(self) -> None:
        """Frees the pages of copies that were given up and have ended."""
        for hold, copying in list(self._draining):
            if copying.state != "running":
                self._draining.remove((hold, copying))
                self._cache.holds.release(hold)

    def is_coming(self, arrival: Arrival) -> bool:
        """Whether pages that it lacks are being copied for another request."""
        if not self._coming:
            return False
        return not self._coming.isdisjoint(arrival.keys(self._cache.holds.lacking(arrival.digests)))

    def take_pages(self, arrival: Arrival, fence: int) -> bool:
        """Takes pages for what is lacking now, if there is room. False: there is none."""
        holds, digests = self._cache.holds, arrival.digests
        while not holds.has_room(digests):
            if not holds.reclaim(after=arrival.request.order):
                return False
        arrival.lacking = holds.lacking(digests)
        arrival.hold, arrival.fence = holds.take(digests), fence
        self._coming.update(arrival.keys(arrival.lacking))
        return True

    def finish(self, arrival: Arrival) -> None:
        """The pages are here, and are held until the request starts."""
        assert arrival.hold is not None
        holds = self._cache.holds
        holds.register(arrival.digests, arrival.request.token_ids, arrival.hold, arrival.lacking)
        holds.keep(arrival.request, arrival.hold)
        self._forget(arrival)

    def give_up(self, arrival: Arrival, copying: Copying | None) -> None:
        """`copying`: what may still write to its pages."""
        if arrival.hold is None:
            return
        self._forget(arrival)
        if copying is not None and copying.state == "running":
            copying.cancel()
            self._draining.append((arrival.hold, copying))
        else:
            self._cache.holds.release(arrival.hold)

    def _forget(self, arrival: Arrival) -> None:
        self._coming.difference_update(arrival.keys(arrival.lacking))
