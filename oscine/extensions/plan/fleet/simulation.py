"""A deployment under a load, in virtual time: production router, scheduler and caches, and step times of a table."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, fields
from random import Random

from oscine.api.serving.admission import Admission
from oscine.extensions.bench.serve.answer import Record
from oscine.extensions.plan.clock.agenda import Agenda, ns_of
from oscine.extensions.plan.clock.virtual_loop import VirtualLoop
from oscine.extensions.plan.engine.peers import Network
from oscine.extensions.plan.fleet.clients import Clients, Traffic
from oscine.extensions.plan.fleet.engines import EngineSpec, Way
from oscine.extensions.plan.fleet.ingress import Ingress
from oscine.extensions.plan.fleet.pool import Change, Pool, Timing, World
from oscine.extensions.plan.fleet.replica import Replica
from oscine.extensions.replicas.client.dispatcher import MigrationLimits
from oscine.extensions.replicas.client.followed_models import cluster_options
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.deployment import ModelSpec
from oscine.extensions.replicas.spec.snapshot import RouterCounters
from oscine.system.collector import paused
from oscine.types import EngineStats, Role


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a simulation."""

    records: list[Record]  # in the order in which the requests ended; times are virtual seconds
    duration_s: float
    engines: list[EngineStats]  # of all replicas at the end, those that are gone included
    router: RouterCounters
    changes: list[Change]  # of the number of replicas
    num_unfinished: int  # requests that were under way at the end, and have no record
    num_moved: int  # requests that lost a replica and went on elsewhere
    num_jumped: int  # steps that were made together with others
    num_asked: int  # prompt tokens at the replicas that answer; `engines` also has those of prefill replicas

    @property
    def total(self) -> EngineStats:
        """The counters of all engines."""
        total = EngineStats()
        for stats in self.engines:
            for field in fields(EngineStats):
                if not isinstance(getattr(stats, field.name), list):
                    setattr(total, field.name, getattr(total, field.name) + getattr(stats, field.name))
        return total


def simulate(
    model: ModelSpec,
    specs: dict[Role, EngineSpec],
    traffic: Traffic,
    *,
    timing: Timing | None = None,
    failures_s: Sequence[float] = (),
    until_s: float | None = None,
    seed: int = 0,
    way: Way = "jumps",
) -> Outcome:
    """Until all requests have ended, or until a time. `specs`: the engines of each role of the model.

    `failures_s`: when a replica that answers requests is lost, chosen by the seed.
    """
    agenda = Agenda()
    # What lives is many objects and next to no cycles: collections would find little, and take long.
    with paused(), asyncio.Runner(loop_factory=lambda: VirtualLoop(agenda)) as runner:
        simulation = Simulation(agenda, model, specs, timing or Timing(), way)
        return runner.run(simulation.run(traffic, failures_s, until_s, Random(seed)))


def _network(agenda: Agenda, timing: Timing) -> Network:
    return Network(agenda, timing.message_s, timing.bytes_per_s, timing.host_bytes_per_s)


class Simulation:
    """One model of a deployment: pools of replicas, a router, and the ingress before it."""

    def __init__(
        self, agenda: Agenda, model: ModelSpec, specs: dict[Role, EngineSpec], timing: Timing, way: Way
    ) -> None:
        clock, serving = agenda.clock, model.serving.role
        self.agenda = agenda
        world = World(agenda, _network(agenda, timing), timing, way)
        self.pools = {role.role: Pool(model, role, specs[role.role], world) for role in model.roles}
        fleets = {role: pool.fleet for role, pool in self.pools.items()}
        self.router = ModelRouter(model, fleets[serving], fleets.get("prefill"), clock)
        whole = cluster_options(model).scheduler
        admission = Admission(whole.max_num_seqs + whole.max_waiting, whole.max_queued_tokens, clock)
        limits = MigrationLimits(max_losses=model.migration_retries)
        self.ingress = Ingress(self.router, admission, clock, specs[serving].info.page_size, limits)
        for pool in self.pools.values():
            pool.on_join, pool.on_lose, pool.num_requests = self._join, self._lose, self.ingress.num_running
            pool.num_queued = lambda: self.router.num_queued
        self.answering = self.pools[serving]

    def _join(self, replica: Replica) -> None:
        self.ingress.replicas[replica.name] = replica
        replica.deliver, replica.refuse = self.ingress.deliver, self.ingress.refuse
        replica.is_heard = lambda: self.ingress.num_waiting > 0  # for a replica with room

    def _lose(self, replica: Replica, broke: bool) -> None:
        del self.ingress.replicas[replica.name]
        self.ingress.lose(replica, broke=broke)

    async def run(
        self, traffic: Traffic, failures_s: Sequence[float], until_s: float | None, random: Random
    ) -> Outcome:
        agenda, ended = self.agenda, asyncio.get_running_loop().create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        def fail(error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(error)

        self.ingress.on_error = fail
        for pool in self.pools.values():
            pool.begin()
        clients = Clients(traffic, self.ingress, agenda, end)
        if traffic.are_independent and len(self.pools) == 1:
            agenda.are_apart = lambda: not self.ingress.num_waiting
        for failure_s in failures_s:
            place = random.getrandbits(32)
            agenda.at(ns_of(failure_s), lambda place=place: self.answering.fail(place))  # type: ignore[misc]
        if until_s is not None:
            agenda.at(ns_of(until_s), end)
        clients.begin()
        await ended
        return self._outcome(clients.records)

    def _outcome(self, records: list[Record]) -> Outcome:
        pools = self.pools.values()
        stats = {pool: [*pool.ended, *(replica.stats for replica in pool.there)] for pool in pools}
        return Outcome(
            records,
            self.agenda.clock(),
            [one for pool in pools for one in stats[pool]],
            self.router.counters,
            sorted((change for pool in pools for change in pool.changes), key=lambda change: change.time_s),
            self.ingress.num_requests - len(records),
            self.ingress.num_moved,
            sum(pool.num_jumped + sum(replica.num_jumped for replica in pool.there) for pool in pools),
            sum(one.prompt_tokens for one in stats[self.answering]),
        )
