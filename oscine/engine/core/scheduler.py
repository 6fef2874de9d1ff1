"""Which tokens of which requests run in the next step, and on which pages.

Order. Sequences with one token to compute go first: there is always budget for them. Then those with more (prompts, and
what a preemption lost), the most urgent first, and among them, where they are more urgent, the waiting requests.
`Request.order` = (priority, whether it is new, arrival) never changes, also not when a request is preempted.

Progress. Pages are only ever taken from a request that comes later in that order. So the first of all running requests
computes something in each step, and in the end finishes; then the next is first. A request that finds no pages, and
none to take, stays as it is until pages come free. A slot, or room to start, is only taken from a lower priority.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf, isqrt
from operator import attrgetter

from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.prefix_index import PrefixHit
from oscine.engine.core.request import Request
from oscine.settings.config import SchedulerOptions
from oscine.types import EngineStats, NewSequence, ScheduledSequence, StepPlan

_order = attrgetter("order")


def _queued(request: Request) -> int:
    """Tokens to compute of a running request; 0 for one that decodes."""
    missing = request.num_missing
    return missing if missing > 1 else 0


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and the request behind each of its sequences."""

    plan: StepPlan
    requests: list[Request] = field(default_factory=list)  # aligned with plan.sequences
    launched_s: float = 0.0

    @property
    def is_empty(self) -> bool:
        return not self.requests


class Scheduler:
    """Makes one plan after the other. Each is launched before the next is made, and all but the last are committed."""

    def __init__(
        self,
        cache: KVCacheManager,
        options: SchedulerOptions,
        max_attended: int | None,
        clock: Callable[[], float],
        counters: EngineStats,
    ) -> None:
        """`max_attended`: query-key pairs that the prompts of one step may have; None: no limit."""
        self.cache = cache
        self.waiting: list[Request] = []  # sorted by order
        self.running: dict[str, Request] = {}
        self._priorities: Counter[int] = Counter()  # of these
        self.active_tokens = 0  # known of those that run
        self.queued_tokens = 0  # known of those that wait, and to be computed of those that run and lack several
        self.num_vacated = 0  # how often a sequence left its slot
        self._refused: tuple[Request, int] | None = None  # to whom preempting would not give room, and this number then
        self._free_slots = list(range(options.max_num_seqs - 1, -1, -1))
        self._max_num_batched_tokens = options.max_num_batched_tokens
        self._max_attended = max_attended
        self._clock, self._counters = clock, counters
        self._next_step = 0
        # Of the step being made:
        self._step = ScheduledStep(StepPlan(0, [], []))
        self._budget = 0
        self._draft_budget = 0  # of the budget, what drafts may take
        self._attended = 0  # of _max_attended
        self._preempted: list[Request] = []  # not admitted again before the step in flight is committed

    def add(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)
        self.queued_tokens += len(request.token_ids)

    def remove(self, request: Request) -> None:
        """Forgets a request, whether it waits or runs, and frees what it holds."""
        if request.slot >= 0:
            self._vacate(request)
        else:
            del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
            self.queued_tokens -= len(request.token_ids)

    def schedule(self) -> ScheduledStep:
        """The next step; its plan is empty if there is nothing to compute before another step is committed."""
        self._step = step = self._new_step()
        self._budget = self._max_num_batched_tokens
        self._draft_budget = self._budget - len(self.running)
        self._attended = 0
        self._preempted = []
        for request in sorted(self._schedule_decodes(), key=_order):
            self._admit(above=request.given.priority)
            if request.slot >= 0 and self._budget:
                self._schedule(request, min(request.num_missing, self._budget))
        self._admit(above=inf)
        if step.plan.sequences:
            self._next_step += 1
        return step

    def _new_step(self) -> ScheduledStep:
        return ScheduledStep(StepPlan(self._next_step, [], []))

    def _schedule_decodes(self) -> list[Request]:
        """Schedules every running sequence that has one token to compute; returns those that have more.

        This loop runs once per sequence and step: page logic is behind `fast_end`.
        """
        sequences, requests = self._step.plan.sequences, self._step.requests
        prefills: list[Request] = []
        num_decoded = 0
        for request in list(self.running.values()):
            start = request.num_computed
            if request.num_uncertain or (request.num_drafts and start >= request.drafts_from):
                self._schedule_drafts(request)
            elif start < request.fast_end and request.num_wanted == start + 1:
                request.num_computed = start + 1
                request.num_wanted = start + 2
                num_decoded += 1
                sequences.append(ScheduledSequence(request.slot, start, 1, True, []))
                requests.append(request)
            elif request.slot >= 0:  # not preempted a moment ago
                missing = request.num_missing
                if missing == 1:
                    self._schedule(request, 1)
                elif missing > 1:
                    prefills.append(request)
        self._budget -= num_decoded
        return prefills

    def _schedule_drafts(self, request: Request) -> None:
        """Schedules the last token of a running request and, as far as there is room, drafts of what comes after it.

        While a step in flight verifies drafts, the token may be up to num_uncertain positions later than num_computed
        says. If there may be no place for it, the request waits until that step is committed.
        """
        start = request.num_computed
        last = start + request.num_uncertain
        if request.slot < 0 or last >= request.num_to_compute:
            return
        num_drafts = min(request.num_drafts, request.num_to_compute - last - 1, self._draft_budget)
        room = self._room(request, last - start + 1 + num_drafts)
        num_drafts = min(num_drafts, room - (last - start + 1))
        if num_drafts < 0:
            return
        pages = self.cache.extend(request, last + 1 + num_drafts)
        request.num_computed = start + 1
        request.num_wanted = start + 2
        request.num_uncertain += num_drafts
        self._budget -= 1 + num_drafts
        self._draft_budget -= num_drafts
        self._step.plan.sequences.append(ScheduledSequence(request.slot, start, 1, True, pages, num_drafts))
        self._step.requests.append(request)

    def _schedule(self, request: Request, num_tokens: int) -> None:
        """Schedules up to num_tokens >= 1 tokens of a running request: as many as find pages, none if none do."""
        start, queued = request.num_computed, _queued(request)
        num_tokens = min(num_tokens, self._chunk(start, num_tokens))
        num_tokens = min(num_tokens, self._room(request, num_tokens))
        if not num_tokens:
            return
        if num_tokens > 1:
            self._attended += num_tokens * (start + num_tokens)
        pages = self.cache.extend(request, start + num_tokens)
        request.num_computed = start + num_tokens
        sample = request.num_computed == request.num_wanted and request.samples
        if sample:
            request.num_wanted += 1
        if queued:
            self.queued_tokens += _queued(request) - queued
        self._budget -= num_tokens
        self._step.plan.sequences.append(ScheduledSequence(request.slot, start, num_tokens, sample, pages))
        self._step.requests.append(request)

    def _chunk(self, start: int, num_tokens: int) -> int:
        """The number of tokens that use half of what is left of max_attended, so that the next prompt is served too."""
        if self._max_attended is None or num_tokens == 1:
            return num_tokens
        share = max(0, self._max_attended - self._attended) // 2
        return max(1, (isqrt(start * start + 4 * share) - start) // 2)  # n * (start + n) <= share

    def _room(self, request: Request, num_tokens: int) -> int:
        """Tokens that the pages at hand let the request compute, after preempting others if it could compute none."""
        page_size = self.cache.page_size
        room = request.num_pages * page_size - request.num_computed
        if room >= num_tokens:
            return room
        wanted = self.cache.num_pages(num_tokens - room)
        while not (found := self.cache.appendable(wanted)) and not room:
            if self.cache.holds.reclaim():
                continue
            victim = max(self.running.values(), key=_order)
            if victim is request:
                return 0
            self._preempt(victim)
        # A long chunk leaves pages for running sequences. Otherwise they would preempt it to get them back.
        return room + found * page_size

    def _admit(self, above: float) -> None:
        """Starts waiting requests with priority values below `above`, in order, while there is budget and room."""
        while self._budget and self.waiting:
            request = self.waiting[0]
            if request.given.priority >= above or request in self._preempted:
                return
            hit = self._make_room(request)
            if hit is None:
                return
            del self.waiting[0]
            self.queued_tokens -= len(request.token_ids)
            self._start(request, hit)
            self._schedule(request, min(request.num_missing, self._budget))

    def _make_room(self, request: Request) -> PrefixHit | None:
        """Finds a slot and pages for a waiting request, preempting lower priorities. None if that is not enough.

        Running sequences that would not be preempted for it keep one page each, if they may need one more. An
        incomplete prompt also needs only one: it takes its missing pages from sequences that come after it. What
        preempting would free is not counted again before a sequence leaves: that takes time for each of its pages.
        """
        hit = self.cache.find(request) if self._free_slots else None
        if hit is not None and self._fits(request, hit):
            return hit
        if max(self._priorities, default=-inf) <= request.given.priority:
            return None
        if self._refused == (request, self.num_vacated):
            return None
        lower = [r for r in self.running.values() if r.given.priority > request.given.priority]
        hit = hit or self.cache.find(request)
        if not self._fits(request, hit, lower, preempted=True):
            self._refused = request, self.num_vacated
            return None
        lower.sort(key=_order)
        while not (self._free_slots and self._fits(request, hit, lower)):
            self._preempt(lower.pop())
        return hit

    def _fits(
        self, request: Request, hit: PrefixHit, lower: Sequence[Request] = (), *, preempted: bool = False
    ) -> bool:
        """Whether a waiting request finds pages, after giving up those held for requests that come after it.

        Running requests keep a page to go on with, except for those of `lower` priority. `preempted`: count the latter
        as preempted.
        """
        while not self.cache.fits(request, hit, lower, preempted=preempted):
            if not self.cache.holds.reclaim(after=request.order):
                return False
        return True

    def _start(self, request: Request, hit: PrefixHit) -> None:
        self.cache.start(request, hit)
        request.slot = self._free_slots.pop()
        request.num_wanted = request.drafts_from = len(request.token_ids)
        self.running[request.request_id] = request
        self._priorities[request.given.priority] += 1
        self.active_tokens += len(request.token_ids)
        self.queued_tokens += _queued(request)
        if request.queue_s is None:
            self._count_admission(request)
        self._step.plan.new.append(
            NewSequence(
                slot=request.slot,
                token_ids=request.token_ids[:],
                num_prompt_tokens=request.num_prompt_tokens,
                num_cached_tokens=request.num_computed,
                pages=hit.pages,
                sampling=request.sampling,
                cache_salt=request.given.adapter + request.given.cache_salt,
                adapter=request.adapter,
            )
        )

    def _count_admission(self, request: Request) -> None:
        """A request starts for the first time."""
        request.queue_s = self._clock() - request.arrival_s
        request.num_cached_tokens = min(request.num_computed, request.num_prompt_tokens)
        self._counters.prompt_tokens += request.num_prompt_tokens
        fetched = request.remote_prefill.num_full_pages * self.cache.page_size if request.remote_prefill else 0
        num_external = min(fetched, request.num_cached_tokens)
        self._counters.external_hits += num_external
        self._counters.local_hits += request.num_cached_tokens - num_external
        if self.cache.looks_up(request):
            self._counters.prefix_queries += request.num_given
            self._counters.prefix_hits += request.num_computed

    def _preempt(self, request: Request) -> None:
        """Back to waiting with the tokens it has; a token being sampled will still be its own."""
        if request in self._step.requests:
            self._withdraw(request)
        self._vacate(request)
        request.num_computed = 0
        self._counters.preemptions += 1
        self._preempted.append(request)
        self.add(request)

    def _withdraw(self, request: Request) -> None:
        """Takes a request out of the step being made. It has not started in this step: such a request is no victim."""
        step = self._step
        i = step.requests.index(request)
        self._budget += step.plan.sequences[i].num_tokens + step.plan.sequences[i].num_drafts
        del step.requests[i], step.plan.sequences[i]

    def _vacate(self, request: Request) -> None:
        del self.running[request.request_id]
        self.num_vacated += 1
        self.active_tokens -= len(request.token_ids)
        self.queued_tokens -= _queued(request)
        self._priorities[request.given.priority] -= 1
        if not self._priorities[request.given.priority]:
            del self._priorities[request.given.priority]
        self._free_slots.append(request.slot)
        request.slot = -1
        request.num_uncertain = 0
        self.cache.release(request)
