"""The production scheduler, in which a sequence that only decodes costs nothing between its own events.

A tick is a call of `schedule`. Each member of the cohort is scheduled for one sampled token in each tick, and has a
constant `offset`. After the tick t its num_computed is offset + t. When the step of the tick t is committed, it has
offset + t + 1 tokens. So the number of members and the sum of their offsets give the rows and the context of a step.

A member has ticks of two kinds. At some it gets a page, and at the commit of others it registers or frees one: then
the cache does its work, and the member stays as it is. At others its last token is computed, or the commit of a step
means an output or the end to it: then it gets its true numbers, and production code does the rest. A member that leaves
the cohort while a step is in flight becomes an entry of that step, in its old place.

Without drafts, and without extensions of the loop.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

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
PAGE_EVENT = ScheduledSequence(0, 0, 1, True, [])  # of a member whose token means nothing but a page event


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
        # Of schedules at which a member needs a page, or its last token is in flight.
        self.touches, self.endings = Ticks(), Ticks()
        # Of steps whose commit means a page event to a member, or an output or the end.
        self.page_events, self.outputs = Ticks(), Ticks()
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
        self._moves_pages = False  # a member got a page, or had a page event

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
        self._decodes_done = self._moves_pages = False
        prefills: list[Request] = []
        touched = self.endings.pop(self.tick)
        in_need = self.touches.pop(self.tick)
        if in_need and self._can_extend(in_need):
            self._extend(in_need)
        else:
            touched += in_need
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
        self._put_touch(request, offset)

    def _put_touch(self, request: Request, offset: int) -> None:
        ticks = self.touches if request.fast_end < request.num_to_compute else self.endings
        ticks.put(request, request.fast_end - offset + 1)

    def _can_extend(self, in_need: Sequence[Request]) -> bool:
        """Whether members get their pages together: each finds some, and no other sequence takes pages in between."""
        return self.cache.pools.have_slots(len(in_need)) and not any(one.num_missing == 1 for one in self.others)

    def _extend(self, in_need: list[Request]) -> None:
        """Gives each of these members the page that it needs at this tick."""
        if not in_need:
            return
        self._moves_pages = True
        in_need.sort(key=self._number.__getitem__)
        self.cache.extend_each(in_need)
        if len(in_need) == 1:
            self._put_touch(in_need[0], self._offset[in_need[0]])
            return
        touches: list[Request] = []
        for request in in_need:
            if request.fast_end < request.num_to_compute:
                touches.append(request)
            else:
                self._put_touch(request, self._offset[request])
        self.touches.put_each(touches, [request.fast_end - self._offset[request] + 1 for request in touches])

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
        self._put_touch(request, offset)

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
        for ticks in (self.touches, self.endings, self.page_events, self.outputs):
            ticks.remove(request)
        self.others[request] = None

    # ---- commits ----

    def unfold(self, step: CohortStep, result: StepResult) -> None:
        """A step is committed: members to which this means something become entries of it. Counts the others.

        Where it means page events alone, these are done.
        """
        tick = self.committed = step.plan.tick
        if self.flight is step:
            self.flight = None
        due, with_pages = self.outputs.pop(tick), self.page_events.pop(tick)
        if due and with_pages:
            with_pages = [request for request in with_pages if request not in due]
        for request in due:
            set_length(request, self._offset[request] + tick)
        step.plan.steady -= len(due)
        num_more = step.plan.steady
        self._counters.generated_tokens += num_more
        self._counters.inter_tokens += num_more
        self.active_tokens += num_more
        if not (due or step.left or step.requests):
            self.commit_pages(with_pages)
            return
        step.plan.steady -= len(with_pages)
        more = [((False, self._number[request]), request, _ONE, [0]) for request in due]
        more += [(place, request, _ONE, [0]) for place, request in step.left]
        more += [((False, self._number[request]), request, PAGE_EVENT, [0]) for request in with_pages]
        if not more:
            return
        entries = [*zip(step.places, step.requests, step.plan.sequences, result.token_ids, strict=True), *more]
        entries.sort(key=itemgetter(0))
        _, requests, sequences, token_ids = zip(*entries, strict=True)
        step.requests, step.plan.sequences, result.token_ids = [*requests], [*sequences], [*token_ids]

    def fold(self, step: CohortStep) -> None:
        """A step was committed: says when the commits of later steps will mean something to its entries."""
        for request, sequence in zip(step.requests, step.plan.sequences, strict=True):
            if sequence is not PAGE_EVENT and self._entered.get(request, step.plan.tick + 1) <= step.plan.tick:
                offset = self._offset[request]
                self.outputs.put(request, min(request.end, request.emit_at) - offset - 1)
                self.page_events.put(request, request.page_event - offset)

    def commit_pages(self, requests: list[Request]) -> None:
        """The commit of the newest step means a page event to these members, and nothing else."""
        if not requests:
            return
        self._moves_pages = True
        number, offset_of, committed = self._number, self._offset, self.committed
        if len(requests) == 1:
            (request,) = requests
            offset = offset_of[request]
            self.cache.commit(request, offset + committed)
            self.page_events.put(request, request.page_event - offset)
            return
        requests.sort(key=number.__getitem__)
        offsets = [offset_of[request] for request in requests]
        self.cache.commit_each(requests, [offset + committed for offset in offsets])
        events = [request.page_event - offset for request, offset in zip(requests, offsets, strict=True)]
        self.page_events.put_each(requests, events)

    # ---- ticks in which no request starts or ends ----

    @property
    def only_counts(self) -> bool:
        """Whether the newest step has nothing but members, and no page has moved."""
        return not (self._new.requests or self._touched or self._preempted or self._moves_pages)

    def num_quiet(self, ahead: int, *, past_pages: bool) -> int:
        """The number of next ticks without an end or an output, and perhaps without any event of a page. `ahead`: steps
        in flight."""
        before = min(self._before(self.endings, self.tick), self._before(self.outputs, self.tick - ahead))
        if not past_pages:
            before = min(before, self.num_before_touch, self._before(self.page_events, self.tick - ahead))
        return before

    @property
    def num_before_touch(self) -> int:
        """The number of next ticks in which no member needs a page."""
        return self._before(self.touches, self.tick)

    def have_pages(self, count: int) -> bool:
        """Whether all members find pages in the next `count` ticks, also if none were freed."""
        if count <= self.num_before_touch:
            return True
        return self.cache.pools.have_slots(self.steady * (1 + count // self.cache.page_size))

    def pass_ticks(self, count: int, ahead: int) -> None:
        """So many quiet ticks are over."""
        last = self.tick + count
        touch, commit = self.touches.next(), self.page_events.next() + ahead
        while touch <= last or commit <= last:
            if touch <= commit:
                self.tick = touch
                self._extend(self.touches.pop(touch))
                touch = self.touches.next()
            else:
                self.committed = commit - ahead
                self.commit_pages(self.page_events.pop(self.committed))
                commit = self.page_events.next() + ahead
        self.tick = last
        self.committed = self.tick - ahead
        self.active_tokens += count * self.steady
        if self.flight is not None:
            self.flight.plan.tick = self.tick

    @staticmethod
    def _before(ticks: Ticks, tick: int) -> int:
        """The number of ticks after this one that come before the first of these."""
        return ticks.next() - tick - 1
