"""The engine: requests go in, a step is schedule, execute, commit, and news of the requests come out."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oscine.engine.core.extension import MakeExtension, overrides, overriding
from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.pending_requests import PendingRequests
from oscine.engine.core.prefix_index import PrefixIndex
from oscine.engine.core.request import Request
from oscine.engine.core.scheduler import ScheduledStep, Scheduler
from oscine.kv_group import KVGroup, Slots
from oscine.settings.config import EngineOptions
from oscine.types import (
    NON_FINITE,
    EngineStats,
    Executor,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    ScheduledSequence,
    StepResult,
)

_IDLE_S = 0.0002  # between two polls for transfers and grammars, while there is no step to compute


def _idle() -> None:
    time.sleep(_IDLE_S)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop is made of. A simulation has others."""

    scheduler: type[Scheduler] = Scheduler
    index: type[PrefixIndex] = PrefixIndex
    clock: Callable[[], float] = time.monotonic
    idle: Callable[[], None] = _idle  # called where the loop has work, and nothing to compute yet


_PARTS = Parts()


class EngineLoop:
    """Runs requests on one executor. Not thread-safe: one thread calls everything.

    With `overlap` a step is scheduled and launched before the step before it is collected, so the device never waits
    for the scheduler. The scheduler then counts a token that is still being sampled. If that token ends its sequence,
    the launched step computes one token in vain. It is thrown away; only a later plan reuses the page it was put on.

    `extensions` are made with the loop, whose cache and counters are there then. Requests are admitted in their order.

    Of the options it reads scheduler, cache and peers. Pages are counted, and sized in tokens, never in bytes.
    Raises ValueError if the memory of a group cannot hold one window.
    """

    def __init__(
        self,
        executor: Executor,
        options: EngineOptions,
        *,
        groups: Sequence[KVGroup],
        memory: Sequence[Slots],
        max_model_len: int,
        max_attended: int | None = None,
        extensions: Sequence[MakeExtension] = (),
        parts: Parts = _PARTS,
    ) -> None:
        self._executor = executor
        self._options = options.scheduler
        self._max_model_len = max_model_len
        self._clock, self._idle = parts.clock, parts.idle
        self.counters = EngineStats()  # everything that only grows
        self.cache = KVCacheManager(
            groups,
            memory,
            prefix_caching=options.cache.prefix_caching,
            prefix_seed=options.peers.prefix_seed,
            drafts=options.speculation.is_on,
            index=parts.index,
        )
        self._scheduler = parts.scheduler(self.cache, self._options, max_attended, parts.clock, self.counters)
        self.extensions = tuple(make(self) for make in extensions)
        self._pending = PendingRequests(executor, self._scheduler, self.extensions)
        self._busy = tuple(one for one in self.extensions if overrides(one, "is_busy"))
        self._before_step = overriding(self.extensions, "before_step")
        self._idle_step = overriding(self.extensions, "idle_step")
        self._first_token = overriding(self.extensions, "first_token")
        self._after_drafts = overriding(self.extensions, "after_drafts")
        self._after_step = overriding(self.extensions, "after_step")
        self._refusals = overriding(self.extensions, "refusal")
        self._ended = overriding(self.extensions, "ended")
        self._requests: dict[str, Request] = {}  # live
        self._launched: deque[ScheduledStep] = deque()
        self._max_launched = 2 if self._options.overlap else 1
        self._news: list[GenerationOutput] = []  # of refused and cancelled requests, for the next step
        self._committed_s = 0.0  # when the last step was committed: its tokens were sampled then
        self._num_streaming = 0  # live requests that have their first token

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._requests or self._launched or self._news or any(one.is_busy for one in self._busy))

    @property
    def is_full(self) -> bool:
        """Whether one more request would be refused because too many wait."""
        return len(self._scheduler.waiting) + len(self._pending.waiting()) >= self._options.max_waiting

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. One that cannot be run gets its only output, an error, from the next step."""
        error = self._refusal(request)
        if error is not None:
            self._news.append(GenerationOutput(request.request_id, finish_reason="error", error=error))
            return
        live = Request(
            request,
            arrival=self.counters.requests,
            arrival_s=self._clock(),
            max_model_len=self._max_model_len,
            stream_interval=self._options.stream_interval,
        )
        self.counters.requests += 1
        live.finish_reason = live.given_end
        if live.finish_reason is not None:
            self._news.append(live.take_output())
            return
        self._requests[live.request_id] = live
        self._pending.add(live)

    def cancel(self, request_id: str) -> None:
        """Ends a request at once, wherever it is; unknown ids are of requests that have just ended by themselves."""
        request = self._requests.get(request_id)
        if request is not None:
            self._news.append(self._finish(request, "cancelled"))

    def fail_all(self, error: str) -> list[GenerationOutput]:
        """Ends every request after the executor has failed. Returns all outputs that were not yet given out."""
        self._launched.clear()
        news, self._news = self._news, []
        return news + [self._finish(request, "error", error) for request in list(self._requests.values())]

    def step(self) -> list[GenerationOutput]:
        """Schedules and launches a step, commits the oldest one. Returns all news. Raises what the executor raises."""
        self._pending.poll(self.counters.steps, len(self._launched))
        for before_step in self._before_step:
            before_step(self._scheduler.running.values())
        step = self._scheduler.schedule()
        if step.is_empty:
            has_run = any(idle_step() for idle_step in self._idle_step)
            if not (has_run or self._launched or self._news):
                self._idle()
        done = self._execute(step)
        return self._commit(done)

    def stats(self) -> EngineStats:
        scheduler, pending = self._scheduler, self._pending.waiting()
        full, *sliding = self.cache.pools
        slots = self.cache.pools.usage
        stats = self.counters.copy()
        stats.num_running = len(scheduler.running)
        stats.num_waiting = len(scheduler.waiting) + len(pending)
        stats.kv_slots_used, stats.kv_slots_cached, stats.kv_slots_total = slots
        stats.full_pages_used, stats.full_pages_total = full.num_used, full.num_pages
        stats.sliding_pages_used = sum(pool.num_used for pool in sliding)
        stats.sliding_pages_total = sum(pool.num_pages for pool in sliding)
        stats.queued_tokens = scheduler.queued_tokens + sum(len(request.token_ids) for request in pending)
        stats.active_tokens = scheduler.active_tokens
        for extension in self.extensions:
            extension.count(stats)
        return stats

    def _execute(self, step: ScheduledStep) -> tuple[ScheduledStep, StepResult] | None:
        """Launches a step, then waits for the oldest one unless the device may go on with it meanwhile."""
        if not step.is_empty:
            step.launched_s = self._clock()
            self._executor.launch(step.plan)
            self._launched.append(step)
        idle = not (self._scheduler.running or self._scheduler.waiting)
        assert self._launched or idle or self.cache.holds.num_holds, "requests, but nothing to compute"
        if len(self._launched) == self._max_launched or (self._launched and step.is_empty):
            return self._launched.popleft(), self._executor.collect()
        return None

    def _commit(self, done: tuple[ScheduledStep, StepResult] | None) -> list[GenerationOutput]:
        news, self._news = self._news, []
        if done is None:
            return news
        step, result = done
        assert result.step == step.plan.step
        count_steps(self.counters, step.plan.num_tokens)
        began_s, now_s = max(step.launched_s, self._committed_s), self._clock()
        seconds = now_s - began_s if result.seconds is None else result.seconds
        self._note_time(now_s)
        in_vain = True
        for i, request in enumerate(step.requests):
            if request.finish_reason is None:  # else cancelled, or ended by the token before this one
                in_vain = False
                self._advance(request, step.plan.sequences[i], result, i, news)
        for after_step in self._after_step:
            after_step(step.plan, sum(result.num_drafted or ()), seconds, in_vain=in_vain)
        return news

    def _note_time(self, now_s: float) -> None:
        """A step ends. The time between the first and the last token of a request is the sum of all waits between."""
        if self._num_streaming:
            self.counters.inter_token_s += (now_s - self._committed_s) * self._num_streaming
        self._committed_s = now_s

    def _count_first_token(self, request: Request) -> None:
        request.first_token_s = self._committed_s
        self._num_streaming += 1
        self.counters.first_tokens += 1
        self.counters.first_token_s += self._committed_s - request.arrival_s
        for first_token in self._first_token:
            first_token(request)

    def _advance(
        self, request: Request, sequence: ScheduledSequence, result: StepResult, i: int, news: list[GenerationOutput]
    ) -> None:
        """Takes in what a step computed of one live request: the i-th of the step."""
        num_computed = sequence.start + sequence.num_tokens
        if result.prompt_logprobs is not None and sequence.slot in result.prompt_logprobs:
            request.add_prompt_logprobs(sequence.start, result.prompt_logprobs[sequence.slot])
        sampled = result.token_ids[i]
        error = None if result.errors is None else result.errors.get(sequence.slot)
        if error is not None:
            self.counters.non_finite += error == NON_FINITE
            news.append(self._finish(request, "error", error))
            return
        if sampled:
            num_known = len(request.token_ids)
            reason = request.accept(sampled, result.logprobs[i] if result.logprobs is not None else None)
            num_computed = len(request.token_ids) - 1
            num_new = num_computed + 1 - num_known
            self.counters.generated_tokens += num_new
            self.counters.inter_tokens += num_new - (num_known == request.num_given)
            if request.slot >= 0:
                self._scheduler.active_tokens += num_new
            else:  # preempted meanwhile
                self._scheduler.queued_tokens += num_new
            if sequence.num_drafts:
                self._count_drafts(request, sequence, result.num_drafted[i] if result.num_drafted else 0, len(sampled))
            if num_known == request.num_given:
                self._count_first_token(request)
        else:
            reason = None if request.samples or num_computed < request.num_prompt_tokens else "length"
        if num_computed >= request.page_event:
            self.cache.commit(request, num_computed, ends=reason is not None)
        if reason is not None:
            news.append(self._finish(request, reason))
        elif len(request.token_ids) >= request.emit_at:
            news.append(request.take_output())

    def _count_drafts(self, request: Request, sequence: ScheduledSequence, num_drafted: int, num_sampled: int) -> None:
        """A step has verified drafts of a request, of which it accepted all but one less than it sampled."""
        if request.slot >= 0:  # else it was preempted meanwhile
            request.num_uncertain -= sequence.num_drafts
        if num_drafted:
            counters, num_accepted = self.counters, num_sampled - 1
            counters.drafts += 1
            counters.draft_tokens += num_drafted
            counters.accepted_tokens += num_accepted
            counters.accepted_by_position += [0] * (num_accepted - len(counters.accepted_by_position))
            for position in range(num_accepted):
                counters.accepted_by_position[position] += 1
        for after_drafts in self._after_drafts:
            after_drafts(request, sequence.num_drafts, num_drafted, num_sampled - 1)

    def _refusal(self, request: GenerationRequest) -> str | None:
        """Why a request cannot be run, for its sender."""
        num_tokens, num_generated = len(request.prompt_token_ids), len(request.generated_token_ids)
        if request.request_id in self._requests:
            return f"request id {request.request_id!r} is in use"
        if not 1 <= num_tokens < self._max_model_len:
            return f"the prompt has {num_tokens} tokens; 1 to {self._max_model_len - 1} are possible"
        if num_tokens + num_generated > self._max_model_len:
            return f"{num_tokens} prompt tokens and {num_generated} generated ones are more than {self._max_model_len}"
        if self.is_full:
            return f"{self._options.max_waiting} requests are waiting already"
        for refusal in self._refusals:
            if (why := refusal(request)) is not None:
                return str(why)
        end = min(num_tokens + request.sampling.max_tokens, self._max_model_len)
        num_pages = self.cache.num_pages(max(num_tokens, end - 1))
        if num_pages > self.cache.most_pages:
            capacity = self.cache.most_pages * self.cache.page_size
            return f"{num_tokens} prompt tokens and {end - num_tokens} more do not fit a KV cache of {capacity} tokens"
        return None

    def _finish(self, request: Request, reason: FinishReason, error: str | None = None) -> GenerationOutput:
        """Ends a live request and frees what it holds. Returns its last output."""
        request.finish_reason = reason
        del self._requests[request.request_id]
        self._num_streaming -= request.first_token_s is not None
        if not self._pending.remove(request):
            self._scheduler.remove(request)
        self.cache.holds.release_of(request)
        for ended in self._ended:
            ended(request)
        output = request.take_output()
        output.error = error
        return output


def count_steps(counters: EngineStats, num_tokens: int, count: int = 1) -> None:
    """`count` steps of so many tokens each."""
    bucket = (num_tokens - 1).bit_length()
    counters.steps += count
    counters.step_tokens += count * num_tokens
    counters.steps_by_tokens += [0] * (bucket + 1 - len(counters.steps_by_tokens))
    counters.steps_by_tokens[bucket] += count
