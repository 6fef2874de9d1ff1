"""Which members of a cohort have something to do at which tick."""

import heapq
from collections.abc import Sequence

from oscine.engine.core.request import NEVER, Request


class Ticks:
    """At most one tick for each request: a later call replaces an earlier one."""

    def __init__(self) -> None:
        self._tick_of: dict[Request, int] = {}
        self._due: dict[int, list[Request]] = {}  # those that were moved or removed are still in here
        self._order: list[int] = []  # a heap of the keys of _due

    def put(self, request: Request, tick: int) -> None:
        """It is due at this tick, and at no other one."""
        self._tick_of[request] = tick
        due = self._due.get(tick)
        if due is None:
            self._due[tick] = [request]
            heapq.heappush(self._order, tick)
        else:
            due.append(request)

    def put_each(self, requests: Sequence[Request], ticks: Sequence[int]) -> None:
        """As put() of each."""
        self._tick_of.update(zip(requests, ticks, strict=True))
        all_due = self._due
        for request, tick in zip(requests, ticks, strict=True):
            if (due := all_due.get(tick)) is None:
                all_due[tick] = [request]
                heapq.heappush(self._order, tick)
            else:
                due.append(request)

    def remove(self, request: Request) -> None:
        self._tick_of.pop(request, None)

    def pop(self, tick: int) -> list[Request]:
        """Those that are due, each once; they have no tick from now on."""
        due, tick_of = self._due.pop(tick, None), self._tick_of
        if due is None:
            return []
        if len(due) == 1:  # of most ticks
            return due if tick_of.get(due[0]) == tick == tick_of.pop(due[0]) else []
        return [one for one in due if tick_of.get(one) == tick and tick_of.pop(one) == tick]

    def next(self) -> int:
        """No request is due before this tick; NEVER: none is due at all."""
        order = self._order
        while order and order[0] not in self._due:
            heapq.heappop(order)
        return order[0] if order else NEVER
