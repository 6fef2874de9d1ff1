"""Where each request of one model goes: it waits for its turn, a replica admits it, another one may compute its prompt.

Knows the fleets of the model and how a replica is asked; nothing of Ray. It belongs to one event loop, as they do.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

from oscine.cluster.routing.fair_queue import FairQueue
from oscine.cluster.routing.fleet import Fleet
from oscine.cluster.spec.model_route import ModelRoute
from oscine.cluster.spec.placement import Accepted, NoPlace, Place, Placement
from oscine.cluster.spec.snapshot import RouterCounters
from oscine.types import PrefillSource

# What a request is charged for: its prompt, and of what it may generate no more than this, as most end far earlier.
_CHARGED_TOKENS = 512
_RETRY_S = 2.0  # where no replica is there: one may be, soon
_EXCLUDED_S = 2.0  # a replica that failed a request is asked again: its engine may go on, and it may be the only one


# Asks the replica that comes first in fleet.rank, and those after it if it is gone. None: it takes no requests now.
# Waits while there is no replica at all.
Admit = Callable[[Placement], Awaitable[Accepted | None]]


@dataclass(frozen=True, slots=True)
class _Excluded:
    """Replicas that a request shall not go to."""

    addresses: Mapping[str, str | None]  # replica -> where the engine listened that failed the request
    until_s: float


_NONE = _Excluded({}, 0.0)


@dataclass(eq=False, slots=True)
class _Waiter:
    placement: Placement
    excluded: _Excluded
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ModelRouter:
    """Places the requests of one model."""

    def __init__(
        self,
        route: ModelRoute,
        generate: Fleet,
        prefill: Fleet | None,
        admit: Admit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.route = route
        self.generate, self.prefill = generate, prefill
        self._admit, self._clock = admit, clock
        self._queue: FairQueue[_Waiter] = FairQueue(route.queue, clock)
        self._asking = 0  # requests whose turn it was, and that no replica has admitted yet
        self._counters = RouterCounters(route.model)
        self.wake_prefill: Callable[[], None] = lambda: None  # called when a replica for prompts is missed
        generate.on_change = self.pump

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def counters(self) -> RouterCounters:
        gaps = self.generate.num_gaps + (self.prefill.num_gaps if self.prefill is not None else 0)
        return replace(self._counters, event_gaps=gaps)

    def reconfigure(self, route: ModelRoute) -> None:
        """Other limits of the same deployments."""
        self.route = route
        self._queue.limits = route.queue

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        started_s = self._clock()
        addresses = {name: self.generate.address(name) for name in placement.exclude}
        excluded = _Excluded(addresses, started_s + _EXCLUDED_S)
        patience_s = self._patience_s(excluded)
        try:
            async with asyncio.timeout(patience_s):
                accepted = await self._accept(_Waiter(placement, excluded))
        except TimeoutError:
            raise self._no_place(excluded, f"this one has waited {patience_s:g} s") from None
        except NoPlace as refusal:
            if refusal.overloaded:
                self._count(refused=1)
            raise
        return self._place(placement, accepted, self._clock() - started_s)

    def pump(self) -> None:
        """Gives turns to requests that wait, as many as the replicas can take."""
        while len(self._queue) and self._room() > 0:
            ticket = self._queue.pop(lambda waiter: not waiter.placement.exclude or self._room(waiter.excluded) > 0)
            if ticket is None:
                return
            if not ticket.item.turn.done():  # else it is leaving
                self._asking += 1
                ticket.item.turn.set_result(None)

    async def wake(self) -> None:
        """Has a replica started where there is none; returns when it answers."""
        await self._admit(Placement(f"wake-{self.route.model}", self.route.model, [], num_tokens=0, max_tokens=0))
        self.generate.withdraw(f"wake-{self.route.model}")

    # ---- a turn, and a replica that accepts ----

    async def _accept(self, waiter: _Waiter) -> Accepted:
        while True:
            await self._turn(waiter)
            excluded = self._still_excluded(waiter.excluded)
            wanted = replace(waiter.placement, exclude=excluded, held_back=self.num_queued)
            try:
                accepted = await self._admit(wanted)
            finally:
                self._asking -= 1
                self.pump()
            if accepted is not None:
                return accepted
            self._refused(wanted)
            waiter = _Waiter(waiter.placement, waiter.excluded)

    async def _turn(self, waiter: _Waiter) -> None:
        """Waits until a replica can take the request; it then counts as asking."""
        wanted = waiter.placement
        ticket, displaced = self._queue.push(
            waiter,
            priority=2 * wanted.priority - wanted.moved,  # half a priority before newcomers of its own
            tenant=wanted.tenant,
            tokens=wanted.num_tokens + min(wanted.max_tokens, _CHARGED_TOKENS),
        )
        if displaced is not None and not displaced.item.turn.done():  # else it is leaving
            displaced.item.turn.set_exception(self._queue.overloaded("others were to be served before", None))
        self.pump()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if not self._queue.remove(ticket) and _was_given(waiter.turn):
                self._asking -= 1  # it left at the very moment of its turn
                self.pump()
            raise

    def _refused(self, wanted: Placement) -> None:
        placed = self.generate.placed(wanted.request_id)
        if placed is not None:
            self.generate.refuse(placed.replica)
            self.generate.withdraw(wanted.request_id)

    def _room(self, excluded: _Excluded = _NONE) -> int:
        """Turns to give. One request may ask while there is no replica at all: so Serve learns that one is wanted."""
        room = self.generate.room(self._still_excluded(excluded)) if len(self.generate) else 1
        return room - self._asking

    def _still_excluded(self, excluded: _Excluded) -> list[str]:
        """A replica whose engine was started again since it failed the request is another one."""
        if self._clock() >= excluded.until_s:
            return []
        return [name for name, address in excluded.addresses.items() if self.generate.address(name) in (address, None)]

    # ---- what comes out ----

    def _place(self, placement: Placement, accepted: Accepted, queue_s: float) -> Place:
        self.generate.meet(accepted.replica, accepted.endpoints)
        placed = self.generate.placed(placement.request_id)
        num_overlap = placed.num_overlap if placed is not None else 0
        prefill = self._prefill(placement, placement.num_tokens - num_overlap)
        self._count(
            placed=1,
            overlap_tokens=num_overlap,
            known_tokens=placement.num_tokens,
            remote_prefills=int(prefill is not None),
            queue_s=queue_s,
        )
        return Place(accepted.replica, accepted.endpoints.requests, prefill, num_overlap, queue_s)

    def _prefill(self, placement: Placement, num_missing: int) -> PrefillSource | None:
        route = self.route
        if self.prefill is None or num_missing < route.prefill_min_tokens:
            return None
        if not len(self.prefill):
            self.wake_prefill()
        for name in self.prefill.rank(placement.digests, placement.num_tokens, placement.exclude):
            address = self.prefill.address(name)
            if address is not None:
                self.prefill.place(placement.request_id, name, placement.digests, placement.num_tokens)
                return PrefillSource(name, address, route.prefill_min_tokens, route.prefill_timeout_s)
        return None

    def _patience_s(self, excluded: _Excluded) -> float:
        """Until a replica has room; longer where one has to be started first."""
        there = self.generate.candidates(self._still_excluded(excluded))
        return self.route.queue.max_wait_s if there else self.route.start_timeout_s

    def _no_place(self, excluded: _Excluded, reason: str) -> NoPlace:
        if self.generate.candidates(self._still_excluded(excluded)):
            self._count(refused=1)
            return self._queue.overloaded(reason, None)
        message = f"no replica of {self.route.model} is ready"
        return NoPlace(message, retry_after_s=_RETRY_S, overloaded=False)

    def _count(self, **more: float) -> None:
        counters = self._counters
        self._counters = replace(counters, **{name: getattr(counters, name) + n for name, n in more.items()})


def _was_given(turn: asyncio.Future[None]) -> bool:
    return turn.done() and not turn.cancelled() and turn.exception() is None
