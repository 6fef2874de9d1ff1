"""The queue of requests that wait while every replica of their model is busy: order, and estimates of the wait.

Pure policy with an injected clock, over items of any type.

Order: priority (lower first), then a fair share of tokens for each tenant, then arrival. The share is start-time fair
queueing (Goyal, Vin and Cheng, 1996). A request's start tag is where its tenant's last one ended in virtual time. If
the tenant had none waiting, it is the present virtual time. The smallest tag is served, and becomes the virtual time.
"""

import bisect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from oscine.extensions.replicas.spec.deployment import QueueLimits
from oscine.extensions.replicas.spec.placement import NoPlace

T = TypeVar("T")

_RATE_WINDOW_S = 10.0  # of time with waiting requests, used for the estimate
_MIN_RETRY_S = 1.0  # the least value of the HTTP header


@dataclass(order=True, slots=True)
class Ticket(Generic[T]):
    """A place in the queue."""

    priority: int
    number: int  # counts arrivals
    item: T = field(compare=False)
    tenant: str = field(compare=False)
    tokens: float = field(compare=False)  # of its tenant's share
    arrival_s: float = field(compare=False)


@dataclass(slots=True)
class _Tenant(Generic[T]):
    start: float  # virtual time at which its next request starts
    waiting: list[Ticket[T]] = field(default_factory=list)  # in order


class ServiceRate:
    """Requests served per second while others waited, over about the last ten seconds of such time."""

    def __init__(self, now_s: float) -> None:
        self._now_s = now_s
        self._served = 0.0
        self._busy_s = 0.0

    def advance(self, now_s: float, waiting: bool) -> None:
        if waiting:
            kept = math.exp(-(now_s - self._now_s) / _RATE_WINDOW_S)
            self._served *= kept
            self._busy_s = self._busy_s * kept + _RATE_WINDOW_S * (1 - kept)
        self._now_s = now_s

    def count(self) -> None:
        self._served += 1

    def seconds(self, requests: int) -> float | None:
        """Seconds to serve this many; None while too few were served."""
        return requests * self._busy_s / self._served if self._served >= 1 and self._busy_s else None


class FairQueue(Generic[T]):
    """A bounded queue. If it is full, a tenant with more than its fair share, or a lower priority, makes room."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float]) -> None:
        self.limits = limits
        self._clock = clock
        self._tenants: dict[str, _Tenant[T]] = {}  # with requests waiting, or served since the queue was last empty
        self._virtual = 0.0  # tokens
        self._num_arrivals = 0
        self._size = 0
        self._rate = ServiceRate(clock())

    def __len__(self) -> int:
        return self._size

    def push(self, item: T, *, priority: int, tenant: str, tokens: float) -> tuple[Ticket[T], Ticket[T] | None]:
        """Queues an item. Returns its ticket, and the ticket of an item that it displaced. Raises NoPlace if the queue
        is full of requests with equal or higher rank, or if the wait would exceed the limit.
        """
        now_s = self._tick()
        wait_s = self.estimate_s(priority, tenant)
        if self._size and wait_s is not None and wait_s > self.limits.max_wait_s:
            raise self.overloaded(f"a wait of about {wait_s:.0f} s is expected", wait_s)
        displaced = self._displace(priority, tenant, wait_s) if self._size >= self.limits.max_requests else None
        ticket = Ticket(priority, self._num_arrivals, item, tenant, tokens, now_s)
        self._num_arrivals += 1
        owner = self._tenants.setdefault(tenant, _Tenant(self._virtual))
        if not owner.waiting:
            owner.start = max(owner.start, self._virtual)
        bisect.insort(owner.waiting, ticket)
        self._size += 1
        return ticket, displaced

    def pop(self, fits: Callable[[T], bool] = lambda _: True) -> Ticket[T] | None:
        """Takes out the next ticket in order whose item fits, and counts it as served."""
        now_s = self._tick()
        for ticket in self._in_order():
            if fits(ticket.item):
                owner = self._tenants[ticket.tenant]
                self._virtual = max(self._virtual, owner.start)
                owner.start += ticket.tokens
                if now_s > ticket.arrival_s:
                    self._rate.count()
                self._take(ticket)
                return ticket
        return None

    def remove(self, ticket: Ticket[T]) -> bool:
        """Removes an item that waits no more, without a charge for its tenant. False if it had been taken out
        already."""
        owner = self._tenants.get(ticket.tenant)
        if owner is None or ticket not in owner.waiting:
            return False
        self._tick()
        self._take(ticket)
        return True

    def estimate_s(self, priority: int, tenant: str) -> float | None:
        """Seconds that a request arriving now would wait; None if there is no estimate."""
        return self._rate.seconds(self._num_ahead(priority, tenant) + 1)

    def overloaded(self, reason: str, wait_s: float | None) -> NoPlace:
        """The exception for a request that cannot wait, or has waited too long."""
        retry_s = min(max(wait_s or 0.0, _MIN_RETRY_S), max(self.limits.max_wait_s, _MIN_RETRY_S))
        message = f"all replicas are busy, {self._size} requests wait, and {reason}"
        return NoPlace(message, retry_after_s=retry_s, overloaded=True)

    def _num_ahead(self, priority: int, tenant: str) -> int:
        """Requests that would be served before one that arrives now, if all tenants get equal numbers."""
        own = self._tenants.get(tenant)
        num_own = len(own.waiting) if own is not None else 0
        ahead = 0
        for name, other in self._tenants.items():
            urgent = bisect.bisect_left(other.waiting, priority, key=lambda ticket: ticket.priority)
            equal = bisect.bisect_right(other.waiting, priority, key=lambda ticket: ticket.priority) - urgent
            ahead += urgent + (equal if name == tenant else min(equal, num_own + 1))
        return ahead

    def _displace(self, priority: int, tenant: str, wait_s: float | None) -> Ticket[T]:
        """Takes out the last request of the tenant with the lowest rank; raises NoPlace if that is the new request."""
        backlogged = [owner for owner in self._tenants.values() if owner.waiting]
        if backlogged:
            most = max(backlogged, key=lambda owner: (owner.waiting[-1].priority, len(owner.waiting)))
            own = self._tenants.get(tenant)
            num_own = len(own.waiting) + 1 if own is not None else 1
            if (most.waiting[-1].priority, len(most.waiting)) > (priority, num_own):
                victim = most.waiting[-1]
                self._take(victim)
                return victim
        raise self.overloaded("no more may", wait_s)

    def _in_order(self) -> Iterator[Ticket[T]]:
        backlogged = (owner for owner in self._tenants.values() if owner.waiting)
        heads = sorted(backlogged, key=lambda owner: (owner.waiting[0].priority, owner.start, owner.waiting[0].number))
        for owner in heads:
            yield from owner.waiting

    def _take(self, ticket: Ticket[T]) -> None:
        waiting = self._tenants[ticket.tenant].waiting
        del waiting[bisect.bisect_left(waiting, ticket)]
        self._size -= 1
        if not self._size:  # the end of a busy period: all shares are reset
            self._tenants.clear()

    def _tick(self) -> float:
        now_s = self._clock()
        self._rate.advance(now_s, self._size > 0)
        return now_s
