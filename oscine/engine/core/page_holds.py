"""Pages held for somebody who does not run here: engines that read them, and requests whose pages are fetched.

Knows pools and the prefix index; nothing of how pages are fetched, or of who asks. What is held is not evicted. Holds
of requests that wait for their turn are a favour: they are given up, the least urgent first, before anything that runs
has to stop. What they held stays in the prefix index until it is evicted.
"""

from dataclasses import dataclass
from typing import NamedTuple

from oscine.engine.core.page_pool import PagePool
from oscine.engine.core.prefix_index import PrefixIndex
from oscine.engine.core.request import Order, Request
from oscine.types import PageGroup


class Lacking(NamedTuple):
    """Pages of a prefix that the index does not know, by their place in it."""

    full: list[int]
    sliding: list[int]  # of the last window


@dataclass(frozen=True, slots=True)
class Hold:
    """Place in a prefix -> page."""

    full: dict[int, int]
    sliding: dict[int, int]


class PageHolds:
    def __init__(self, index: PrefixIndex, full: PagePool, sliding: PagePool) -> None:
        self.num_holds = 0  # while there are any, who waits for pages may have to wait for them
        self._index, self._full, self._sliding = index, full, sliding
        self._waiting: dict[Request, Hold] = {}

    def lacking(self, digests: list[bytes]) -> Lacking:
        """What a request with this prefix of whole pages would have to compute, or fetch."""
        full, sliding = self._known(digests)
        first = self._index.first_needed(len(digests))
        return Lacking(
            [i for i in range(len(digests)) if i not in full],
            [i for i in range(first, len(digests)) if i not in sliding],
        )

    def has_room(self, digests: list[bytes], reserve: int) -> bool:
        """Whether take() would leave `reserve` pages of each group."""
        full, sliding = self._known(digests)
        lacking = self.lacking(digests)
        num_full = len(lacking.full) + self._full.num_unheld(list(full.values()))
        num_sliding = len(lacking.sliding) + self._sliding.num_unheld(list(sliding.values()))
        return num_full + reserve <= self._full.num_available and num_sliding + reserve <= self._sliding.num_available

    def take(self, digests: list[bytes]) -> Hold:
        """Holds the pages of a prefix and of its last window: those that the index knows, and new ones in place of
        those that it lacks. There must be room."""
        full, sliding = self._known(digests)
        lacking = self.lacking(digests)
        for pool, known in ((self._full, full), (self._sliding, sliding)):
            for page in known.values():
                pool.retain(page)
        full |= zip(lacking.full, self._full.allocate(len(lacking.full)), strict=True)
        sliding |= zip(lacking.sliding, self._sliding.allocate(len(lacking.sliding)), strict=True)
        self.num_holds += 1
        return Hold(full, sliding)

    def register(self, digests: list[bytes], token_ids: list[int], hold: Hold, places: Lacking) -> None:
        """The pages at these places of a hold have got their content; it is of these tokens, or the first of them."""
        groups: list[tuple[PageGroup, PagePool, list[int], dict[int, int]]] = [
            ("full", self._full, places.full, hold.full),
            ("sliding", self._sliding, places.sliding, hold.sliding),
        ]
        for group, pool, indices, pages in groups:
            learnt = [i for i in indices if self._index.insert(group, digests[i], pages[i])]
            for i in learnt:
                pool.mark_indexed(pages[i])
            if group == "full":
                self._index.announce(digests, token_ids, learnt)

    def release(self, hold: Hold) -> None:
        """Of a prefix, the end is evicted before the start."""
        for pool, pages in ((self._full, hold.full), (self._sliding, hold.sliding)):
            for i in sorted(pages, reverse=True):
                pool.release(pages[i])
        self.num_holds -= 1

    # ---- requests that wait ----

    def keep(self, request: Request, hold: Hold) -> None:
        """Holds the pages until the request starts or ends, or until somebody else needs them more."""
        self._waiting[request] = hold

    def release_of(self, request: Request) -> None:
        """The request holds its pages itself now, or needs none any more."""
        hold = self._waiting.pop(request, None)
        if hold is not None:
            self.release(hold)

    def reclaim(self, after: Order | None = None) -> bool:
        """Gives up the hold of the last waiting request, unless it comes before `after` in order. False if none."""
        last = max(self._waiting, key=lambda request: request.order, default=None)
        if last is None or (after is not None and last.order <= after):
            return False
        self.release_of(last)
        return True

    def _known(self, digests: list[bytes]) -> tuple[dict[int, int], dict[int, int]]:
        """Pages of the prefix that are known in the full group, and of its last window in the sliding one, by place."""
        first = self._index.first_needed(len(digests))
        full = {i: self._index.page("full", digest) for i, digest in enumerate(digests)}
        sliding = {i: self._index.page("sliding", digests[i]) for i in range(first, len(digests))}
        return _found(full), _found(sliding)


def _found(pages: dict[int, int | None]) -> dict[int, int]:
    return {i: page for i, page in pages.items() if page is not None}
