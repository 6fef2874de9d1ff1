"""Which adapters are in the slots of the device, and which requests wait for one. No torch, no sockets, no clock.

An adapter keeps its slot while a request has it. A slot that no request has keeps its adapter until another one needs
the slot: the least recently used one goes first.

Requests wait in order. One whose adapter has a slot overtakes those that wait for a slot, as it takes nothing from
them. After MAX_OVERTAKEN such requests, none overtakes until the first waiting request has its slot.
"""

from collections import Counter
from collections.abc import Iterator

from oscine.engine.core.request import Request

MAX_OVERTAKEN = 256


class AdapterSlots:
    def __init__(self, count: int) -> None:
        self._slots: dict[int, int] = {}  # number of an adapter -> its slot; the least recently used first
        self._free = list(range(count - 1, -1, -1))
        self._users: Counter[int] = Counter()  # number of an adapter -> requests that have it

    def has(self, number: int) -> bool:
        return number in self._slots

    def users(self, number: int) -> int:
        return self._users[number]

    @property
    def num_used(self) -> int:
        """Slots with adapters that a request has."""
        return len(+self._users)

    def take(self, number: int) -> int | None:
        """The slot of an adapter, for one more request; None if all slots are in use."""
        slot = self._slots.pop(number, None)
        if slot is None:
            idle = next((other for other in self._slots if not self._users[other]), None)
            if not self._free and idle is None:
                return None
            slot = self._free.pop() if self._free or idle is None else self._slots.pop(idle)
        self._slots[number] = slot
        self._users[number] += 1
        return slot

    def leave(self, number: int) -> None:
        """A request has ended."""
        self._users[number] -= 1
        if not self._users[number]:
            del self._users[number]

    def forget(self, number: int) -> None:
        """An adapter that no request has is no longer known."""
        slot = self._slots.pop(number, None)
        if slot is not None:
            self._free.append(slot)


class WaitingRequests:
    """Requests that wait for a slot, with the numbers of their adapters."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._waiting: dict[Request, int] = {}  # in the order of Request.order
        self._overtaken = 0  # how often the first of them was

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def must_wait(self, number: int) -> bool:
        """Whether a request that has just come waits, though its adapter may have a slot."""
        if not self._waiting:
            return False
        return not self._slots.has(number) or self._overtaken >= MAX_OVERTAKEN

    def overtaken(self) -> None:
        self._overtaken += bool(self._waiting)

    def add(self, request: Request, number: int) -> None:
        self._waiting[request] = number
        if len(self._waiting) > 1:
            self._waiting = dict(sorted(self._waiting.items(), key=lambda item: item[0].order))

    def remove(self, request: Request) -> bool:
        if request not in self._waiting:
            return False
        if next(iter(self._waiting)) is request:
            self._overtaken = 0
        del self._waiting[request]
        return True

    def admitted(self) -> list[tuple[Request, int, int]]:
        """Those that get a slot now: with the number of the adapter, and the slot."""
        found = []
        for request, number in list(self._waiting.items()):
            is_first = next(iter(self._waiting)) is request
            if not is_first and (self._overtaken >= MAX_OVERTAKEN or not self._slots.has(number)):
                continue
            slot = self._slots.take(number)
            if slot is not None:
                self.remove(request)
                found.append((request, number, slot))
                self._overtaken += not is_first
        return found
