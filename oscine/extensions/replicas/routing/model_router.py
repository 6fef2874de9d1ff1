"""Where each request of one model goes: it waits for its turn, gets a replica, and another one may compute its prompt.

The router decides by what it knows of the replicas. Where it is wrong, the engine or the connection refuses, and the
request comes back. Belongs to one event loop.
"""

import asyncio
import time
from collections.abc import Callable, Collection

from oscine.extensions.replicas.routing.fair_queue import FairQueue, Ticket
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.routing.replica_view import ReplicaView
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.extensions.replicas.spec.placement import NoPlace, Place, Placement
from oscine.extensions.replicas.spec.snapshot import RouterCounters
from oscine.types import EngineInfo, PrefillSource, Role

# What a request is charged for: its prompt, and of what it may generate no more than this, as most end far earlier.
_CHARGED_TOKENS = 512
_RETRY_S = 2.0  # where no replica is there: one may be, soon
_LOOK_S = 0.05  # between looks for a first replica
_EXCLUDED_S = 2.0  # a replica that failed a request is asked again: its engine may go on, and it may be the only one


class _Waiter:
    """A request that waits for its turn, and the replicas that may take it."""

    def __init__(self, placement: Placement, fleet: Fleet, clock: Callable[[], float]) -> None:
        self.placement, self._fleet, self._clock = placement, fleet, clock
        # Replica -> where the engine listened that failed the request.
        self._excluded = {name: fleet.address(name) for name in placement.exclude}
        self.since_s = clock()
        self.turn: asyncio.Future[Place] = asyncio.get_running_loop().create_future()

    def excluded(self) -> list[str]:
        """A replica whose engine was started again since it failed the request is another one."""
        if self._clock() >= self.since_s + _EXCLUDED_S:
            return []
        return [name for name, address in self._excluded.items() if self._fleet.address(name) in (address, None)]

    def candidates(self) -> list[ReplicaView]:
        return self._fleet.candidates(self.excluded())

    def has_room(self) -> bool:
        return not self.placement.exclude or self._fleet.has_room(self.excluded())


class ModelRouter:
    """Places the requests of one model."""

    def __init__(
        self, model: ModelSpec, generate: Fleet, prefill: Fleet | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.model = model
        self.generate, self.prefill = generate, prefill
        self._clock = clock
        self._queue: FairQueue[_Waiter] = FairQueue(model.queue, clock)
        self._counters = RouterCounters(model.name)
        self._num_describing = 0
        self._misses_prefill = False
        self._pumping: asyncio.Handle | None = None  # at most once per turn of the event loop
        generate.on_change = self._pump_soon

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def counters(self) -> RouterCounters:
        self._counters.event_gaps = sum(fleet.num_gaps for fleet in (self.generate, self.prefill) if fleet is not None)
        return self._counters

    def reconfigure(self, model: ModelSpec) -> None:
        """Other limits of the same roles."""
        self.model = model
        self._queue.limits = model.queue

    def missing(self) -> list[Role]:
        """Roles without a replica, that requests have asked for since the last call."""
        wanted: list[Role] = []
        if self.generate.is_missing and (len(self._queue) or self._num_describing):
            wanted.append(self.model.serving.role)
        if self._misses_prefill:
            wanted.append("prefill")
        self._misses_prefill = False
        return wanted

    async def describe(self) -> EngineInfo:
        """Of any replica, once one was ready. Raises NoPlace."""
        self._num_describing += 1
        try:
            async with asyncio.timeout(self.model.start_timeout_s):
                while self.generate.info is None:
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            raise self._no_replica() from None
        finally:
            self._num_describing -= 1
        return self.generate.info

    def place_now(self, placement: Placement) -> Place | None:
        """A place, if there is one at once."""
        if placement.exclude or len(self._queue) or not self.generate.has_room():
            return None
        return self._place(placement, (), 0.0)

    async def place(self, placement: Placement) -> Place:
        """Waits for a place. Raises NoPlace."""
        if (place := self.place_now(placement)) is not None:
            return place
        waiter = _Waiter(placement, self.generate, self._clock)
        ticket = self._push(waiter)
        self.pump()
        # A replica has room after a while; one that has to be started first takes longer.
        patience_s = self.model.queue.max_wait_s if waiter.candidates() else self.model.start_timeout_s
        try:
            async with asyncio.timeout(patience_s):
                return await self._turn(waiter, ticket)
        except TimeoutError:
            if not waiter.candidates():
                raise self._no_replica() from None
            self._counters.refused += 1
            raise self._queue.overloaded(f"this one has waited {patience_s:g} s", None) from None
        except NoPlace:
            self._counters.refused += 1
            raise

    def _pump_soon(self) -> None:
        if len(self._queue) and self._pumping is None:
            self._pumping = asyncio.get_running_loop().call_soon(self.pump)

    def pump(self) -> None:
        """Gives places to requests that wait, as many as the replicas can take."""
        self._pumping = None
        while len(self._queue) and self.generate.has_room():
            ticket = self._queue.pop(_Waiter.has_room)
            if ticket is None:
                return
            waiter = ticket.item
            if not waiter.turn.done():  # else it is leaving
                waited_s = self._clock() - waiter.since_s
                waiter.turn.set_result(self._place(waiter.placement, waiter.excluded(), waited_s))

    # ---- a turn ----

    def _push(self, waiter: _Waiter) -> Ticket[_Waiter]:
        wanted = waiter.placement
        try:
            ticket, displaced = self._queue.push(
                waiter,
                priority=2 * wanted.priority - wanted.moved,  # half a priority before newcomers of its own
                tenant=wanted.tenant,
                tokens=wanted.num_tokens + min(wanted.max_tokens, _CHARGED_TOKENS),
            )
        except NoPlace:
            self._counters.refused += 1
            raise
        if displaced is not None and not displaced.item.turn.done():  # else it is leaving
            displaced.item.turn.set_exception(self._queue.overloaded("others were to be served before", None))
        return ticket

    async def _turn(self, waiter: _Waiter, ticket: Ticket[_Waiter]) -> Place:
        try:
            return await waiter.turn
        except asyncio.CancelledError:
            if not self._queue.remove(ticket):  # it may have left at the very moment of its turn
                self.generate.withdraw(waiter.placement.request_id)
                self.pump()
            raise

    # ---- what comes out ----

    def _place(self, wanted: Placement, excluded: Collection[str], queue_s: float) -> Place:
        name = next(self.generate.rank(wanted.digests, wanted.num_tokens, excluded))
        num_overlap = self.generate.place(wanted.request_id, name, wanted.digests, wanted.num_tokens)
        address = self.generate.address(name)
        assert address is not None
        prefill = self._prefill(wanted, wanted.num_tokens - num_overlap, address)
        counters = self._counters
        counters.placed += 1
        counters.overlap_tokens += num_overlap
        counters.known_tokens += wanted.num_tokens
        counters.remote_prefills += prefill is not None
        counters.queue_s += queue_s
        return Place(name, address, prefill, num_overlap, queue_s)

    def _prefill(self, placement: Placement, num_missing: int, reader: str) -> PrefillSource | None:
        """`reader`: the address of the engine that reads the pages."""
        limits = self.model.prefill
        if self.prefill is None or num_missing < limits.min_tokens:
            return None
        self._misses_prefill |= self.prefill.is_missing
        place = placement.digests, placement.num_tokens, placement.exclude
        for name in self.prefill.rank(*place, reader=reader, num_read=num_missing):
            address = self.prefill.address(name)
            if address is not None:
                self.prefill.place(placement.request_id, name, placement.digests, placement.num_tokens)
                return PrefillSource(name, address, limits.min_tokens, limits.timeout_s)
        return None

    def _no_replica(self) -> NoPlace:
        return NoPlace(f"no replica of {self.model.name} is ready", retry_after_s=_RETRY_S, overloaded=False)
