"""Pages held for requests that do not run here: other engines read them, or they are being fetched.

What is held is not evicted. Holds for requests that still wait are given up, the least urgent first, before anything
that runs has to stop. Their pages stay in the prefix index until they are evicted.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from oscine.engine.core.page_pool import Pools
from oscine.engine.core.prefix_index import PrefixIndex
from oscine.engine.core.request import Order, Request
from oscine.kv_group import KVGroup

Lacking = list[list[int]]  # per group: pages of a prefix, or of its last window, that the index does not know, by place
Hold = list[dict[int, int]]  # per group: place in a prefix -> page


class PageHolds:
    def __init__(self, groups: Sequence[KVGroup], pools: Pools, index: PrefixIndex) -> None:
        self.num_holds = 0  # while there are any, a request may have to wait for their pages
        self._groups, self._pools, self._index = groups, pools, index
        self._waiting: dict[Request, Hold] = {}

    def lacking(self, digests: list[bytes]) -> Lacking:
        """What a request with this prefix of whole pages would have to compute, or fetch."""
        return [[i for i, page in pages.items() if page is None] for pages in self._pages(digests)]

    def has_room(self, digests: list[bytes]) -> bool:
        """Whether take() would leave pages for running sequences to go on, and one for a sequence to start."""
        wanted, known = [], []
        for pages in self._pages(digests):
            known.append([page for page in pages.values() if page is not None])
            wanted.append(len(pages) - len(known[-1]) + 1)
        return self._pools.have_room(wanted, known)

    def take(self, digests: list[bytes]) -> Hold:
        """Holds the pages of a prefix and of its last window, and new pages where the index has none. There must be
        room."""
        self.num_holds += 1
        found = self._pages(digests)
        for pool, pages in zip(self._pools, found, strict=True):  # before any are allocated, which might evict them
            for page in pages.values():
                if page is not None:
                    pool.retain(page)
        lacking = [[i for i, page in pages.items() if page is None] for pages in found]
        added = self._pools.allocate([*map(len, lacking)])
        return [_filled(pages, dict(zip(*new, strict=True))) for pages, *new in zip(found, lacking, added, strict=True)]

    def register(self, digests: list[bytes], token_ids: list[int], hold: Hold, places: Lacking) -> None:
        """The pages at these places of a hold have got their content; it is of these tokens, or the first of them."""
        for group, (pool, pages) in enumerate(zip(self._pools, hold, strict=True)):
            for run in _runs(places[group]):
                pool.mark_indexed(self._index.register(group, digests, token_ids, [pages[i] for i in run], run))

    def release(self, hold: Hold) -> None:
        """Of a prefix, the end is evicted before the start."""
        for pool, pages in zip(self._pools, hold, strict=True):
            pool.release_some([pages[i] for i in sorted(pages, reverse=True)])
        self.num_holds -= 1

    # ---- requests that wait ----

    def keep(self, request: Request, hold: Hold) -> None:
        """Holds the pages until the request starts or ends, or until a more urgent request needs them.

        It replaces what was held for the request before.
        """
        self.release_of(request)
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

    def _pages(self, digests: list[bytes]) -> list[dict[int, int | None]]:
        """Per group: pages of the prefix that are read after it, by place; None for those that the index lacks."""
        end = len(digests)
        return [
            {i: self._index.page(place, digests[i]) for i in range(group.first_needed(end), end)}
            for place, group in enumerate(self._groups)
        ]


def _runs(places: Sequence[int]) -> Iterator[range]:
    """Places that follow each other."""
    for _, run in groupby(enumerate(places), lambda pair: pair[1] - pair[0]):
        first, *others = (place for _, place in run)
        yield range(first, first + 1 + len(others))


def _filled(pages: dict[int, int | None], new: dict[int, int]) -> dict[int, int]:
    return {i: new[i] if page is None else page for i, page in pages.items()}
