"""One engine under the virtual clock, and what its process does: events for the router, requests, steps."""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from typing import cast

from oscine.engine.core.due_statistics import INTERVAL_S, DueStatistics
from oscine.engine.core.extension import EngineExtension, LoopState, MakeExtension
from oscine.engine.core.loop import EngineLoop
from oscine.engine.process.prefills import Prefills
from oscine.engine.wire.messages import FromPeer
from oscine.extensions.disaggregation.prefill_service import PrefillService
from oscine.extensions.disaggregation.remote_prefill import RemotePrefills
from oscine.extensions.offload.manager import Offload
from oscine.extensions.offload.page_store import PageStore
from oscine.extensions.plan.clock.agenda import NS, Agenda, Clock, ns_of
from oscine.extensions.plan.engine.cohort_loop import CohortLoop
from oscine.extensions.plan.engine.host_store import HostStore
from oscine.extensions.plan.engine.peers import Copies, Links, Network
from oscine.extensions.plan.fleet.engines import EngineSpec, Way
from oscine.extensions.plan.fleet.page_news import PageNews
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.spec.snapshot import ReplicaReport, ReplicaState
from oscine.types import Endpoints, EngineStats, GenerationOutput, GenerationRequest, Role

_INTERVAL_NS, _NS_OF_MS = ns_of(INTERVAL_S), 1_000_000


class Replica:
    """Its steps end at times of its own clock. The agenda has its next turn, which delivers the outputs of a step."""

    def __init__(
        self, number: int, role: Role, spec: EngineSpec, fleet: Fleet, agenda: Agenda, network: Network, way: Way
    ) -> None:
        """`number`: among all replicas of the simulation."""
        self.name, self.number, self.role, self.spec = f"{role}-{number}", number, role, spec
        self.address = f"virtual://{self.name}"
        self.clock = Clock(agenda.clock.ns)
        self._network, self._prefills = network, Prefills()
        self._questions: deque[tuple[str, FromPeer]] = deque()  # of engines that want prompts computed
        self.loop: EngineLoop = self._loop(way)
        self.num_jumped = 0  # steps that were made together with others
        self.is_gone = False
        # Called with each output of a request, and with requests that the engine is too full for.
        self.deliver: Callable[[Replica, GenerationOutput], None]
        self.refuse: Callable[[Replica, GenerationRequest], None]
        # Whether statistics, as soon as they are told, may have effects elsewhere.
        self.is_heard: Callable[[], bool]
        self._fleet, self._agenda = fleet, agenda
        self._jumping = self.loop if way == "jumps" and isinstance(self.loop, CohortLoop) else None
        self._due = DueStatistics(self.clock)
        self._news = self.loop.cache.index.events = PageNews(fleet.index, self.name)
        self._inbox: deque[GenerationRequest] = deque()
        self._outputs: list[GenerationOutput] = []  # of the step that ends at the next turn
        self._is_awake = False  # the agenda has a turn of it

    @property
    def stats(self) -> EngineStats:
        """Of now."""
        return self.loop.stats()

    def report(self, state: ReplicaState = "ready") -> ReplicaReport:
        """What it registers at the router with."""
        return ReplicaReport(self.spec.info.model, self.role, "", state, Endpoints(self.address), self.spec.info)

    def submit(self, request: GenerationRequest) -> None:
        """A request arrives now, by the clock of the agenda."""
        self._inbox.append(request)
        self._wake()

    def end(self) -> dict[str, int]:
        """It is gone, with all requests that it has. Returns how many tokens of each were delivered.

        The outputs of the step that runs now are lost.
        """
        self.is_gone = True
        self._network.leave(self.name, self.address)
        delivered = {request.request_id: 0 for request in self._inbox}
        delivered |= {output.request_id: len(output.token_ids) - 1 for output in self._outputs}
        in_step = bool(self._outputs) or self.clock.ns > self._agenda.clock.ns
        for output in self.loop.fail_all("the engine is gone"):
            delivered.setdefault(output.request_id, max(0, len(output.token_ids) - in_step))
        return delivered

    def _loop(self, way: Way) -> EngineLoop:
        """One that fetches pages of prompts, one that gives them, or one that does neither."""
        spec = self.spec
        extensions: list[MakeExtension] = [self._offload] if spec.options.cache.kv_offload_bytes else []
        if self.role == "aggregated":
            return spec.loop(self.clock, way, extensions, number=self.number)
        model = spec.info.model
        copies = Copies(self.address, self._network, self.clock, model, spec.groups, spec.memory)
        if self.role == "decode":
            links = Links(self.name, self._network, self.clock, self._wake)
            extensions.append(lambda loop: RemotePrefills(loop, links, copies, self.clock))
            return spec.loop(self.clock, way, extensions, number=self.number)
        loop = spec.loop(self.clock, way, extensions, number=self.number)
        self._prefills = PrefillService(loop, copies.endpoint, copies.attend, self.clock)
        self._network.serve(self.address, self._hear)
        return loop

    def _offload(self, loop: LoopState) -> EngineExtension:
        options = self.spec.options
        num_bytes, rate = options.cache.kv_offload_bytes or 0, self._network.host_bytes_per_s
        store = HostStore(self.spec.groups, num_bytes, self.clock, rate)
        step_tokens = options.scheduler.max_num_batched_tokens
        return Offload(loop, cast(PageStore, store), step_tokens=step_tokens, clock=self.clock)

    def _hear(self, peer: str, question: FromPeer) -> None:
        self._questions.append((peer, question))
        self._wake()

    def _tend_peers(self) -> None:
        """As EngineServer: leases end, peers get the news of their prompts, and may request others."""
        prefills = self._prefills
        prefills.expire()
        while self._questions:
            peer, question = self._questions.popleft()
            prefills.handle(peer.encode(), question)
        news, prefills.news = prefills.news, []
        for reader, message in news:
            self._network.answer(reader.decode(), self.address, message, self.clock.ns)

    def _wake(self) -> None:
        if not self._is_awake and not self.is_gone:
            self._is_awake = True
            self.clock.ns = self._agenda.clock.ns
            self._agenda.take_turn_at(self.clock.ns, self.number, self._turn)

    def _turn(self) -> None:
        """A step has ended, or a request came to an idle engine. As EngineServer.run."""
        if self.is_gone:
            return
        loop, outputs = self.loop, self._outputs
        if outputs:
            outputs, self._outputs = self._prefills.take(outputs), []
        self._news.flush()
        if self._due.are_due(has_work=loop.has_work):
            self._fleet.hear(self.name, loop.stats())
        for output in outputs:
            self.deliver(self, output)
        self._tend_peers()
        while self._inbox:
            request = self._inbox.popleft()
            if loop.is_full:
                self.refuse(self, request)
            else:
                loop.add(request)
        if not loop.has_work:
            self._is_awake = False
            if (patience_ms := self._prefills.patience_ms) is not None:  # leases are looked at
                self._agenda.at(self.clock.ns + patience_ms * _NS_OF_MS, self._wake)
            return
        if self._jumping is None or not self._jump(self._jumping):
            self._outputs = loop.step()
        self._agenda.take_turn_at(self.clock.ns, self.number, self._turn)

    def _jump(self, loop: CohortLoop) -> bool:
        """Makes the steps of many turns that change nothing elsewhere, and tells at the end what these would have told.

        All but the last turn are over for the others then. Statistics of one turn replace those of the turns before.
        """
        if (num_quiet := loop.num_quiet()) <= 1:
            return False
        until_ns = self._agenda.horizon_ns
        if self.is_heard():
            until_ns = min(until_ns, ns_of(self._due.told_s) + _INTERVAL_NS)
        ends_ns = loop.foresee(num_quiet, until_ns)
        if not ends_ns:
            return False
        num_turns = len(ends_ns) - 1
        num_told = self._num_until_told(ends_ns[:num_turns])
        if num_told:
            loop.make(num_told)
            self._fleet.hear(self.name, loop.stats())
        loop.make(num_turns - num_told)
        self._news.flush()
        loop.make(1)
        self.num_jumped += len(ends_ns)
        return True

    def _num_until_told(self, turns_ns: list[int]) -> int:
        """The number of turns at these times up to the last one at which statistics are told; counts them as told."""
        num_told, due = 0, self._due
        while True:
            # The first one that may be due: differences of seconds are rounded.
            place = bisect_left(turns_ns, ns_of(due.told_s) + _INTERVAL_NS - 1, num_told)
            while place < len(turns_ns) and turns_ns[place] * NS - due.told_s < INTERVAL_S:
                place += 1
            if place == len(turns_ns):
                return num_told
            due.told_s, num_told = turns_ns[place] * NS, place + 1
