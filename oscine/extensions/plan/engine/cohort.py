"""The production scheduler, in which a sequence that only decodes costs nothing between its own events.

A tick is a call of `schedule`. Each member of the cohort is scheduled for one sampled token in each tick, and has a
constant `offset`. After the tick t its num_computed is offset + t. When the step of the tick t is committed, it has
offset + t + 1 tokens. So the number of members and the sum of their offsets give the rows and the context of a step.

A member is touched at a tick at which it needs a page or has its last token computed, and when the commit of a step
means a page event, an output or the end to it. Then it gets its true numbers, and production code does the rest. A
member that leaves the cohort while a step is in flight becomes an entry of that step, in its old place.

Without drafts, and without extensions of the loop.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.prefix_index import PrefixHit
from oscine.engine.core.request import Request
from oscine.engine.core.scheduler import ScheduledStep, Scheduler
from oscine.extensions.plan.engine.ticks import Ticks
from oscine.extensions.plan.engine.tokens import set_length
from oscine.settings.config import SchedulerOptions
from oscine.types import EngineStats, ScheduledSequence, StepPlan, StepResult

_Place = tuple[bool, int]  # in a step: decodes come first, in the order in which they started; then as scheduled


@dataclass(slots=True)
class CohortPlan(StepPlan):
    """Beside its sequences, members of the cohort run in this step."""

    tick: int = 0
    steady: int = 0  # members without an entry in `sequences`
    context: int = 0  # tokens that these read, over all of them

    @property
    def num_tokens(self) -> int:
        return self.steady + sum(sequence.num_tokens for sequence in self.sequences)


@dataclass(slots=True)
class CohortStep(ScheduledStep):
    """A step whose plan has members of the cohort beside its entries."""

    plan: CohortPlan
    num_decodes: int = 0  # leading entries that were scheduled as decodes
    places: list[_Place] = field(default_factory=list)  # of the entries, once it is scheduled
    left: list[tuple[_Place, Request]] = field(default_factory=list)  # members that became entries after the launch

    @property
    def is_empty(self) -> bool:
        return not (self.requests or self.plan.steady)


_ONE = ScheduledSequence(0, 0, 1, True, [])  # of a member; the loop reads no more of it than its one token


class CohortScheduler(Scheduler):
    """Makes the same decisions as its parent."""

    def __init__(
        self,
        cache: KVCacheManager,
        options: SchedulerOptions,
        max_attended: int | None,
        clock: Callable[[], float],
        counters: EngineStats,
    ) -> None:
        super().__init__(cache, options, max_attended, clock, counters)
        self.tick = self.committed = 0  # of the newest step, and of the newest committed one
        self.steady = self.offsets = 0  # members that go on, and the sum of their offsets
        self.touches, self.commits = Ticks(), Ticks()
        self.others: dict[Request, None] = {}  # that run outside the cohort
        self.flight: CohortStep | None = None  # launched, and not committed
        self._offset: dict[Request, int] = {}  # of the members
        self._entered: dict[Request, int] = {}  # the tick at which a member was scheduled last with an entry
        self._ending: set[Request] = set()  # members whose last token is in flight
        self._number: dict[Request, int] = {}  # of those that run, in the order in which they started
        self._num_started = 0
        # Of the step being made:
        self._new: CohortStep  # the same as _step
        self._newcomers: dict[Request, None] = {}  # members that entered with an entry of this step
        self._touched: set[Request] = set()  # members that production code has charged to the budget
        self._decodes_done = False

    # ---- what production calls ----

    def _new_step(self) -> CohortStep:
        self.tick += 1
        self._new = CohortStep(CohortPlan(self._next_step, [], [], tick=self.tick))
        return self._new

    def schedule(self) -> CohortStep:
        super().schedule()
        step, plan = self._new, self._new.plan
        plan.steady = self.steady - len(self._newcomers)
        entered = sum(request.num_computed for request in self._newcomers)
        plan.context = self.offsets + self.steady * self.tick - entered
        step.places = [
            (False, self._number[request]) if i < step.num_decodes else (True, i)
            for i, request in enumerate(step.requests)
        ]
        if not step.is_empty:
            self.flight = step
        return step

    def _schedule_decodes(self) -> list[Request]:
        self._touched.clear()
        self._newcomers.clear()
        self._decodes_done = False
        prefills: list[Request] = []
        touched = self.touches.pop(self.tick)
        for request in sorted([*touched, *self.others], key=self._number.__getitem__):
            if request.slot < 0:
                continue  # preempted a moment ago
            if request in self._offset:
                self._touch(request)
            elif request.num_missing == 1:
                self._schedule(request, 1)
            elif request.num_missing > 1:
                prefills.append(request)
        self._budget -= self.steady - len(self._newcomers) - len(self._touched)
        self._decodes_done = True
        self._new.num_decodes = len(self._new.requests)
        return prefills

    def _schedule(self, request: Request, num_tokens: int) -> None:
        before = len(self._new.requests)
        super()._schedule(request, num_tokens)
        is_scheduled = len(self._new.requests) > before
        goes_on = request.samples and request.num_wanted == request.num_computed + 1
        if is_scheduled and goes_on and request in self.others:
            self._enter(request)

    def _start(self, request: Request, hit: PrefixHit) -> None:
        super()._start(request, hit)
        self._num_started += 1
        self._number[request] = self._num_started
        self.others[request] = None

    def _preempt(self, request: Request) -> None:
        new = self._new
        if self._decodes_done and request in new.requests[: new.num_decodes]:
            new.num_decodes -= 1
        if request in self._newcomers:
            del self._newcomers[request]
        elif request in self._offset and request not in self._ending:
            if self._decodes_done or request in self._touched:
                self._budget += 1
            self._touched.discard(request)
        super()._preempt(request)

    def _vacate(self, request: Request) -> None:
        if request in self._offset:
            self.count_tokens(request)
            self._leave(request)
        del self.others[request], self._number[request]
        super()._vacate(request)

    # ---- the cohort ----

    def count_tokens(self, request: Request) -> None:
        """Gives a member the tokens that it has, but for those of its entry in a step in flight."""
        if self._entered.get(request, self.committed + 1) <= self.committed:
            set_length(request, self._offset[request] + self.committed + 1)

    def _enter(self, request: Request) -> None:
        """It has just been scheduled with an entry, and goes on by one token in each tick."""
        del self.others[request]
        offset = self._offset[request] = request.num_computed - self.tick
        self._entered[request] = self.tick
        self.steady += 1
        self.offsets += offset
        self._newcomers[request] = None
        self.touches.put(request, request.fast_end - offset + 1)

    def _touch(self, request: Request) -> None:
        """A member needs a page, or its last token is in flight."""
        new, offset = self._new, self._offset[request]
        request.num_computed, request.num_wanted = offset + self.tick - 1, offset + self.tick
        if request.num_missing != 1:
            self._ending.add(request)
            self.steady -= 1
            self.offsets -= offset
            return
        before = len(new.requests)
        super()._schedule(request, 1)
        if len(new.requests) == before:  # it found no page
            self.count_tokens(request)
            self._leave(request)
            return
        del new.requests[-1], new.plan.sequences[-1]
        self._touched.add(request)
        self.touches.put(request, request.fast_end - offset + 1)

    def _leave(self, request: Request) -> None:
        """A member is one no more. A step in flight, in which it has no entry yet, gets one."""
        is_ending, offset, entered = request in self._ending, self._offset.pop(request), self._entered.pop(request)
        if is_ending:
            self._ending.remove(request)
        else:
            self.steady -= 1
            self.offsets -= offset
        flight = self.flight
        if flight is not None and entered < flight.plan.tick and (flight.plan.tick < self.tick or not is_ending):
            flight.left.append(((False, self._number[request]), request))
            flight.plan.steady -= 1
        self.touches.remove(request)
        self.commits.remove(request)
        self.others[request] = None

    # ---- commits ----

    def unfold(self, step: CohortStep, result: StepResult) -> None:
        """A step is committed: members to which this means something become entries of it. Counts the others."""
        tick = self.committed = step.plan.tick
        if self.flight is step:
            self.flight = None
        due = self.commits.pop(tick)
        for request in due:
            set_length(request, self._offset[request] + tick)
        step.plan.steady -= len(due)
        num_more = step.plan.steady
        self._counters.generated_tokens += num_more
        self._counters.inter_tokens += num_more
        self.active_tokens += num_more
        more = [*(((False, self._number[request]), request) for request in due), *step.left]
        if not more:
            return
        entries = [*zip(step.places, step.requests, step.plan.sequences, result.token_ids, strict=True)]
        entries += [(place, request, _ONE, [0]) for place, request in more]
        entries.sort(key=lambda entry: entry[0])
        _, requests, sequences, token_ids = zip(*entries, strict=True)
        step.requests, step.plan.sequences, result.token_ids = [*requests], [*sequences], [*token_ids]

    def fold(self, step: CohortStep) -> None:
        """A step was committed: says when the commits of later steps will mean something to its entries."""
        for request in step.requests:
            if self._entered.get(request, step.plan.tick + 1) <= step.plan.tick:
                tokens = min(request.end, request.page_event + 1, request.emit_at)
                self.commits.put(request, tokens - self._offset[request] - 1)

    # ---- ticks in which nothing happens ----

    @property
    def only_counts(self) -> bool:
        """Whether the newest step has nothing but members that were not touched."""
        return not (self._new.requests or self._touched or self._preempted)

    def num_quiet(self, ahead: int) -> int:
        """The number of next ticks without a touch, nor a commit that means something. `ahead`: steps in flight."""
        touch, commit = self.touches.next(), self.commits.next()
        before_touch = inf if touch is None else touch - self.tick - 1
        before_commit = inf if commit is None else commit - (self.tick - ahead) - 1
        return int(min(before_touch, before_commit))

    def pass_ticks(self, count: int, ahead: int) -> None:
        """So many quiet ticks are over."""
        self.tick += count
        self.committed = self.tick - ahead
        self.active_tokens += count * self.steady
        if self.flight is not None:
            self.flight.plan.tick = self.tick
