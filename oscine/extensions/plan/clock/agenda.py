"""Virtual time in whole nanoseconds, whose sums do not depend on their order, and what happens when.

There are entries of two kinds. A turn of an engine is one of its steps, or several. Everything else is an event, such
as an arrival. At equal times events come first, in the order in which they were entered, then turns by their engines.
So it does not matter in how many turns an engine does its steps.
"""

import heapq
from collections.abc import Callable
from itertools import count

NS = 1e-9
NEVER = 1 << 62
Action = Callable[[], None]


class Clock:
    """A time that its owner moves. Production code reads it in seconds."""

    __slots__ = ("ns",)

    def __init__(self, ns: int = 0) -> None:
        self.ns = ns

    def __call__(self) -> float:
        return self.ns * NS


class Agenda:
    """All that will happen, and the time of now."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.timer_ns = NEVER  # the next timer of the event loop
        self.are_apart: Callable[[], bool] = lambda: False  # whether no engine's turn can change what another one does
        self._events: list[tuple[int, int, Action]] = []
        self._turns: list[tuple[int, int, Action]] = []
        self._numbers = count()

    def at(self, ns: int, event: Action) -> None:
        """`ns`: not before now."""
        heapq.heappush(self._events, (ns, next(self._numbers), event))

    def take_turn_at(self, ns: int, engine: int, turn: Action) -> None:
        """`engine`: its number; at equal times the lower one is first."""
        heapq.heappush(self._turns, (ns, engine, turn))

    @property
    def next_ns(self) -> int:
        """The time of the next entry, or NEVER."""
        return min(_first_ns(self._events), _first_ns(self._turns))

    @property
    def horizon_ns(self) -> int:
        """Until when nothing reaches the engine whose turn it is."""
        event_ns = min(_first_ns(self._events), self.timer_ns)
        return event_ns if self.are_apart() else min(event_ns, _first_ns(self._turns))

    def advance(self) -> None:
        """Moves the clock to the next entry, and does it."""
        first = self._turns if _first_ns(self._turns) < _first_ns(self._events) else self._events
        self.clock.ns, _, action = heapq.heappop(first)
        action()


def _first_ns(entries: list[tuple[int, int, Action]]) -> int:
    return entries[0][0] if entries else NEVER


def ns_of(seconds: float) -> int:
    """The nearest nanosecond."""
    return round(seconds / NS)
