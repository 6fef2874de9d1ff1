"""Virtual time in whole nanoseconds: sums of them do not depend on their order."""

import heapq
from collections.abc import Callable
from itertools import count

NS = 1e-9
NEVER = 1 << 62


class Clock:
    """A time that its owner moves. Production code reads it in seconds."""

    __slots__ = ("ns",)

    def __init__(self, ns: int = 0) -> None:
        self.ns = ns

    def __call__(self) -> float:
        return self.ns * NS


class Agenda:
    """What happens when. At equal times, what was entered first happens first."""

    def __init__(self) -> None:
        self.clock = Clock()
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, ns: int, action: Callable[[], None]) -> None:
        """`ns`: not before now."""
        heapq.heappush(self._entries, (ns, next(self._numbers), action))

    @property
    def next_ns(self) -> int:
        return self._entries[0][0] if self._entries else NEVER

    def advance(self) -> None:
        """Moves the clock to the next entry, and runs it."""
        self.clock.ns, _, action = heapq.heappop(self._entries)
        action()


def ns_of(seconds: float) -> int:
    return round(seconds / NS)
