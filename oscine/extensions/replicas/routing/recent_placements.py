"""Where prompts were placed moments ago: their pages are expected there before any event says so.

Addresses of pages are chained: two prompts that share a page share all before it. So the pages noted of a prompt are
the first ones after those that were cached, and bisection finds the last.
"""

from collections import OrderedDict
from collections.abc import Sequence

_KEPT_S = 10.0  # by then a page is in an event, or its request was never run


class RecentPlacements:
    """The replica that each page was last placed on."""

    def __init__(self) -> None:
        # Page -> replica and time, oldest first. In a plain dict, the first key is slow to find after deletions.
        self._placed: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def note(self, pages: Sequence[bytes], replica: str, now_s: float) -> None:
        self._expire(now_s)
        placed, note = self._placed, (replica, now_s)
        for page in reversed(pages):  # of a prefix, the end is forgotten before the start
            placed[page] = note
            placed.move_to_end(page)

    def find(self, pages: Sequence[bytes], num_cached: int, now_s: float) -> tuple[str, int] | None:
        """The replica that served most of this prefix last, and how many leading pages it will have.

        The first num_cached pages are cached somewhere and need no note; only further pages count.
        """
        self._expire(now_s)
        known, unknown = num_cached, len(pages) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if pages[middle - 1] in self._placed:
                known = middle
            else:
                unknown = middle
        return (self._placed[pages[known - 1]][0], known) if known > num_cached else None

    def _expire(self, now_s: float) -> None:
        while self._placed:
            _, placed_s = next(iter(self._placed.values()))
            if now_s - placed_s < _KEPT_S:
                return
            self._placed.popitem(last=False)
