"""Where prompts were placed moments ago: their pages are expected there before any event says so.

Addresses of pages are chained: two prompts that share a page share all before it. So the pages noted of a prompt are
the first ones after those that were cached, and bisection finds the last.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_KEPT_S = 10.0  # by then a page is in an event, or its request was never run


class _Note(NamedTuple):
    """A prompt was placed."""

    pages: Sequence[bytes]
    replica: str
    placed_s: float


class RecentPlacements:
    """The replica that each page was last placed on."""

    def __init__(self) -> None:
        self._placed: dict[bytes, _Note] = {}  # page -> the last prompt that has it
        self._notes: deque[_Note] = deque()  # oldest first

    def note(self, pages: Sequence[bytes], replica: str, now_s: float) -> None:
        self._expire(now_s)
        note = _Note(pages, replica, now_s)
        self._placed.update(dict.fromkeys(pages, note))
        self._notes.append(note)

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
        return (self._placed[pages[known - 1]].replica, known) if known > num_cached else None

    def _expire(self, now_s: float) -> None:
        placed = self._placed
        while self._notes and now_s - self._notes[0].placed_s >= _KEPT_S:
            note = self._notes.popleft()
            for page in note.pages:
                if placed.get(page) is note:
                    del placed[page]
