"""The replicas of one role: how many there are, when they start, fail and end, and what scaling decides."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from oscine.extensions.cluster.scaling.load_record import Line, PoolSeries
from oscine.extensions.cluster.scaling.policy import EVERY_S, Bounds, Goals, State, decide
from oscine.extensions.cluster.scaling.pool_load import report
from oscine.extensions.plan.clock.agenda import Agenda, ns_of
from oscine.extensions.plan.engine.peers import Network
from oscine.extensions.plan.fleet.engines import EngineSpec, Way
from oscine.extensions.plan.fleet.replica import Replica
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.types import EngineStats

_EVERY_NS, _LOOK_NS = ns_of(EVERY_S), ns_of(0.05)


@dataclass(frozen=True, slots=True)
class Timing:
    """What is not in a deployment file."""

    start_s: float = 60.0  # from asking for a replica to a ready one
    drain_s: float = 30.0  # that a replica may go on with its requests before it ends
    message_s: float = 100e-6  # of a message from an engine to another
    bytes_per_s: float = 25e9  # of pages that an engine sends to others
    host_bytes_per_s: float = 42e9  # of pages between an engine and host memory, in one direction (docs/hardware.md)


@dataclass(frozen=True, slots=True)
class World:
    """What all pools of a simulation share."""

    agenda: Agenda
    network: Network
    timing: Timing
    way: Way
    numbers: Iterator[int] = field(default_factory=count)  # of replicas


@dataclass(frozen=True, slots=True)
class Change:
    """Of the number of replicas."""

    time_s: float
    role: str
    replicas: int  # from now on: those that are wanted, or ready after a failure
    reason: str


class Pool:
    """Ray Serve's part is imitated: it starts as many replicas as the policy wants, and ends the newest ones first."""

    def __init__(self, model: ModelSpec, role: RoleSpec, spec: EngineSpec, world: World) -> None:
        self.role, self.spec = role, spec
        self.fleet = Fleet(clock=world.agenda.clock, page_hash=bytes)  # PageNews tells the digests themselves
        self.changes: list[Change] = []
        self.ended: list[EngineStats] = []  # of replicas that are gone
        self.num_jumped = 0  # steps of these
        self.on_join: Callable[[Replica], None] = lambda replica: None
        self.on_lose: Callable[[Replica, bool], None]  # and whether it broke; it takes its requests away
        self.num_requests: Callable[[Replica], int]  # that a replica has
        self.num_queued: Callable[[], int]  # requests that wait for a place
        self._model, self._world, self._agenda, self._timing = model, world, world.agenda, world.timing
        self._ready: list[Replica] = []  # oldest first
        self._draining: list[Replica] = []
        self._starting: list[object] = []  # a mark for each that will be there
        self._target = role.replicas.min * role.data_parallel_size  # engines
        self._scaled: dict[Replica, EngineStats] = {}  # what was reported last
        self._series, self._state = PoolSeries(role), State()
        self._goals = Goals(role.role, model.levels, model.scaling)

    def begin(self) -> None:
        """The first replicas are ready."""
        for _ in range(self._target):
            self._join()
        if self.role.replicas.scales:
            self._agenda.at(self._agenda.clock.ns + _EVERY_NS, self._scale)

    @property
    def there(self) -> list[Replica]:
        """All that have an engine."""
        return [*self._ready, *self._draining]

    def fail(self, place: int) -> None:
        """One of the ready replicas is lost, and another one starts in its place."""
        if self._ready:
            replica = self._ready[place % len(self._ready)]
            self._end(replica, broke=True)
            self._note(len(self._ready), f"{replica.name} is lost")
            self._fill()

    # ---- starts and ends ----

    def _fill(self) -> None:
        """As many replicas as are wanted are there, or start."""
        while len(self._ready) + len(self._starting) < self._target:
            mark = object()
            self._starting.append(mark)
            self._agenda.at(self._agenda.clock.ns + ns_of(self._timing.start_s), partial(self._started, mark))
        while len(self._ready) + len(self._starting) > self._target:
            if self._starting:
                self._starting.pop()
            else:
                self._drain(self._ready[-1])

    def _started(self, mark: object) -> None:
        if mark in self._starting:
            self._starting.remove(mark)
            self._join()

    def _join(self) -> None:
        world = self._world
        replica = Replica(
            next(world.numbers), self.role.role, self.spec, self.fleet, world.agenda, world.network, world.way
        )
        self._ready.append(replica)
        self.on_join(replica)
        self.fleet.join(replica.name, replica.report())

    def _drain(self, replica: Replica) -> None:
        self._ready.remove(replica)
        self._draining.append(replica)
        self.fleet.join(replica.name, replica.report("draining"))
        self._look(replica, self._agenda.clock.ns + ns_of(self._timing.drain_s))

    def _look(self, replica: Replica, end_ns: int) -> None:
        """Ends a draining replica that has no requests any more, or no more time."""
        if replica not in self._draining:
            return
        now_ns = self._agenda.clock.ns
        if now_ns >= end_ns or not self.num_requests(replica):
            self._end(replica, broke=False)
        else:
            self._agenda.at(min(now_ns + _LOOK_NS, end_ns), partial(self._look, replica, end_ns))

    def _end(self, replica: Replica, *, broke: bool) -> None:
        (self._ready if replica in self._ready else self._draining).remove(replica)
        self.fleet.remove(replica.name)
        self._scaled.pop(replica, None)
        self.on_lose(replica, broke)
        self.ended.append(replica.stats)
        self.num_jumped += replica.num_jumped

    # ---- scaling ----

    def _scale(self) -> None:
        """As replicas and Serve's controller do every second."""
        self._agenda.at(self._agenda.clock.ns + _EVERY_NS, self._scale)
        now_s, queued = self._agenda.clock(), self.num_queued()
        for replica in self.there:
            now = replica.stats
            values = report(now, self._scaled.get(replica, now))
            values |= {"max_num_seqs": float(self.spec.options.scheduler.max_num_seqs)}
            values |= {"held_back": float(queued), "held_back_s": now_s}
            self._scaled[replica] = now
            self._series.take(Line(now_s, self._model.name, self.role.role, replica.name, values))
        load = replace(self._series.load(now_s), ready=len(self._ready), queued=float(queued))
        bounds = Bounds(self.role.replicas.min, self.role.replicas.max)
        decision = decide(load, self._target, bounds, self._goals, self._state)
        self._state = decision.state
        if decision.replicas != self._target:
            self._target = decision.replicas
            self._note(self._target, decision.reason)
            self._fill()

    def _note(self, replicas: int, reason: str) -> None:
        self.changes.append(Change(self._agenda.clock(), self.role.role, replicas, reason))
