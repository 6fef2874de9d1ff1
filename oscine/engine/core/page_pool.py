"""The holders of each page of one page group: reference counts, the free list, and the order of eviction.

A page is in exactly one of three states:

    held     by one request or, after a prefix hit, by several
    cached   not held, but the prefix index has its content: it can be taken again, or evicted
    free     not held, content worthless
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice


class PagePool:
    """Pages 0 .. num_pages - 1. `forget(page)` is called when a cached page is given away to hold something else."""

    def __init__(self, num_pages: int, forget: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.num_growing = 0  # running sequences that may need one page more than they hold
        self._forget = forget
        self._holders = [0] * num_pages
        self._indexed = bytearray(num_pages)  # whether the prefix index knows the page
        self._free = list(range(num_pages - 1, -1, -1))
        self._cold: OrderedDict[int, None] = OrderedDict()  # cached, evicted first; least recently released first
        self._kept: OrderedDict[int, None] = OrderedDict()  # cached, evicted when nothing else is left

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give: free or cached."""
        return len(self._free) + len(self._cold) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Pages held."""
        return self.num_pages - self.num_available

    @property
    def num_spare(self) -> int:
        """Pages available beyond one for each running sequence that may need one more; negative if there are fewer."""
        return self.num_available - self.num_growing

    def num_unheld(self, pages: list[int]) -> int:
        """How many of these pages are not held: taking them makes so many fewer available."""
        return sum(not self._holders[page] for page in pages)

    def next_evicted(self, count: int) -> list[int]:
        """Of the cached pages, those that the next `count` allocated pages would evict; none that are cold."""
        return list(islice(self._kept, max(0, count - len(self._free) - len(self._cold))))

    def allocate(self, count: int) -> list[int]:
        """`count` pages for one holder; at most num_available. Evicts cached pages when the free ones are spent."""
        pages = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def retain(self, page: int) -> None:
        """One more holder of a held or cached page."""
        if not self._holders[page]:
            assert self._indexed[page], "a free page holds nothing to share"
            self._cold.pop(page, None)
            self._kept.pop(page, None)
        self._holders[page] += 1

    def release(self, page: int, *, cold: bool = False) -> None:
        """One holder fewer. The last one leaves the page cached if it is indexed (cold: to be evicted early)."""
        assert self._holders[page] > 0, "released more often than held"
        self._holders[page] -= 1
        if self._holders[page]:
            return
        if self._indexed[page]:
            (self._cold if cold else self._kept)[page] = None
        else:
            self._free.append(page)

    def mark_indexed(self, pages: Iterable[int]) -> None:
        """The prefix index now knows the content of these held pages."""
        for page in pages:
            self._indexed[page] = True

    def _evict(self) -> int:
        page, _ = (self._cold or self._kept).popitem(last=False)
        self._indexed[page] = False
        self._forget(page)
        return page
