"""A loop on a PagedExecutor, requests for it, and the checks that hold for every run."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from oscine.engine.core.extension import EngineExtension, MakeExtension
from oscine.engine.core.kv_cache_manager import KVCacheManager
from oscine.engine.core.loop import EngineLoop, Parts
from oscine.engine.core.request import Request
from oscine.kv_group import KVGroup, Slots, apart
from oscine.settings.config import CacheOptions, EngineOptions, SchedulerOptions
from oscine.types import GenerationOutput, GenerationRequest, SamplingParams, StepPlan

from .paged_executor import PagedExecutor, logprobs_of, naive_tokens
from .pool_check import check_pools

PAGE = 16


@dataclass(frozen=True)
class Setting:
    """Everything a run depends on but the requests."""

    max_num_seqs: int = 4
    max_num_batched_tokens: int = 64
    max_waiting: int = 100
    stream_interval: int = 1
    overlap: bool = False
    lazy: bool = False  # of the executor, see there
    prefix_caching: bool = True
    windows: tuple[int, ...] = (24,)  # of the groups after full attention; two pages or three are read
    num_full_pages: int = 64
    num_sliding_pages: int = 64  # of each group with a window
    num_slots: int = 0  # of memory that all groups share; 0: each has its own
    per_slot: tuple[int, ...] = (1, 1)  # pages of each group in a slot of it
    max_model_len: int = 160
    max_attended: int | None = None
    most_drafts: int = 0

    @property
    def groups(self) -> list[KVGroup]:
        return [KVGroup(window, (i,), 1, PAGE, 2, "uint8") for i, window in enumerate([None, *self.windows])]

    @property
    def memory(self) -> list[Slots]:
        if self.num_slots:
            return [Slots(tuple(range(len(self.per_slot))), self.per_slot, self.num_slots)]
        return apart([self.num_full_pages, *[self.num_sliding_pages] * len(self.windows)])

    @property
    def num_pages(self) -> list[int]:
        sizes = [(slots.count * each) for slots in self.memory for each in slots.per_slot]
        return sizes  # groups are in order, whether they share memory or not


class SomeDrafts(EngineExtension):
    """Another number of drafts for each request and step."""

    def __init__(self, most: int) -> None:
        self.most, self.num_decisions = most, 0
        self.num_noted = 0  # drafts of the step that is committed

    def first_token(self, request: Request) -> None:
        request.num_drafts = self.most

    def before_step(self, running: Collection[Request]) -> None:
        self.num_decisions += 1
        for request in running:
            request.num_drafts = hash((self.num_decisions, request.slot)) % (self.most + 1)

    def after_drafts(self, request: Request, most: int, num_drafted: int, num_accepted: int) -> None:
        assert 0 <= num_accepted <= num_drafted <= self.most
        self.num_noted += num_drafted

    def after_step(self, plan: StepPlan, num_drafted: int, seconds: float, *, in_vain: bool) -> None:
        if in_vain:
            return
        assert self.num_noted <= num_drafted <= sum(sequence.num_drafts for sequence in plan.sequences)
        self.num_noted = 0


@dataclass
class Run:
    """Drives a loop, collects its outputs and knows what they must be."""

    setting: Setting = field(default_factory=Setting)
    outputs: dict[str, list[GenerationOutput]] = field(default_factory=dict)
    requests: dict[str, GenerationRequest] = field(default_factory=dict)
    extensions: Sequence[MakeExtension] = ()
    now: float = 0.0  # the clock: one second a step
    ended_s: float = 0.0  # from the first token to the last, of requests that have ended
    live: set[Request] = field(default_factory=set)  # when the next were counted
    finished: list[str] = field(default_factory=list)  # in the order in which they finished

    def __post_init__(self) -> None:
        s = self.setting
        self.executor = PagedExecutor(
            page_size=PAGE,
            windows=[None, *s.windows],
            num_slots=s.max_num_seqs,
            memory=s.memory,
            max_num_tokens=s.max_num_batched_tokens,
            most_drafts=s.most_drafts,
            lazy=s.lazy,
        )
        self.loop = EngineLoop(
            self.executor,
            EngineOptions(
                cache=CacheOptions(page_size=PAGE, prefix_caching=s.prefix_caching),
                scheduler=SchedulerOptions(
                    max_num_seqs=s.max_num_seqs,
                    max_num_batched_tokens=s.max_num_batched_tokens,
                    max_waiting=s.max_waiting,
                    stream_interval=s.stream_interval,
                    overlap=s.overlap,
                ),
            ),
            groups=s.groups,
            memory=s.memory,
            max_model_len=s.max_model_len,
            max_attended=s.max_attended,
            extensions=[*self.extensions, *([lambda loop: SomeDrafts(s.most_drafts)] if s.most_drafts else ())],
            parts=Parts(clock=lambda: self.now),
        )

    @property
    def cache(self) -> KVCacheManager:
        return self.loop.cache

    def add(
        self, request_id: str, prompt: list[int], max_tokens: int = 8, priority: int = 0, **sampling: object
    ) -> None:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        self.submit(GenerationRequest(request_id, prompt, params, priority))

    def add_cut(self, request_id: str, prompt: list[int], cut: int, max_tokens: int = 8, **sampling: object) -> None:
        """A request that another engine has lost after `cut` tokens, or at its end."""
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        generated = naive_tokens(prompt, params, self.setting.max_model_len)[0][:cut]
        self.submit(GenerationRequest(request_id, prompt, params, generated_token_ids=generated))

    def submit(self, request: GenerationRequest) -> None:
        request_id = request.request_id
        self.requests[request_id] = request
        self.outputs[request_id] = []
        self.loop.add(request)

    def step(self) -> None:
        self.now += 1.0
        self._note_ended()  # the cancelled ones
        self._take(self.loop.step())
        self._note_ended()
        self.check_pages()
        self.check_statistics()

    def finish(self) -> None:
        """Runs until idle. What every request waits for is bounded, so is the number of steps."""
        limit = 20 + 4 * sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in self.requests.values())
        for _ in range(limit):
            if not self.loop.has_work:
                break
            self.step()
        assert not self.loop.has_work, "no progress"
        stats = self.loop.stats()
        assert stats.num_running == stats.num_waiting == stats.full_pages_used == stats.sliding_pages_used == 0
        for request_id in self.requests:
            self.check_outputs(request_id)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def cached(self, request_id: str) -> int:
        return self.outputs[request_id][0].num_cached_tokens

    def is_done(self, request_id: str) -> bool:
        return bool(self.outputs[request_id]) and self.outputs[request_id][-1].finish_reason is not None

    def _take(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            assert not self.is_done(output.request_id), "an output after the last one"
            self.outputs[output.request_id].append(output)
            if output.finish_reason is not None:
                self.finished.append(output.request_id)

    def check_pages(self) -> None:
        """Page ownership adds up: holders are the running requests, each page is held, cached or free, once."""
        running = self.loop._scheduler.running.values()
        groups = range(len(self.cache.pools))
        check_pools(
            self.cache.pools,
            [Counter(page for r in running for page in r.pages[group][r.first_held[group] :]) for group in groups],
        )
        for group, pool in enumerate(self.cache.pools):
            indexed = {page for page in range(pool.num_pages) if pool._indexed[page]}
            assert indexed == {page for page in range(pool.num_pages) if self.cache.index.digest(group, page)}
            enough = [-1, *(2 + (window - 1) // PAGE for window in self.setting.windows)][group]
            steady = [
                r.first_held[group] >= r.num_hit_pages and len(r.pages[group]) - r.first_held[group] == enough
                for r in running
            ]
            assert pool.num_growing == steady.count(False)

    def _note_ended(self) -> None:
        """Adds the times of the requests that have ended since the last call."""
        there = set(self.loop._requests.values())
        ended_s = [self.loop._committed_s - r.first_token_s for r in self.live - there if r.first_token_s is not None]
        self.live, self.ended_s = there, self.ended_s + sum(ended_s)

    def check_statistics(self) -> None:
        """Sums that are kept are those that a look at every request finds."""
        loop, stats = self.loop, self.loop.stats()
        running, waiting = loop._scheduler.running.values(), loop._scheduler.waiting + loop._pending.waiting()
        missing = [request.num_missing for request in running]
        assert stats.active_tokens == sum(len(request.token_ids) for request in running)
        assert stats.queued_tokens == sum(len(r.token_ids) for r in waiting) + sum(n for n in missing if n > 1)
        streaming = [r for r in loop._requests.values() if r.first_token_s is not None]
        assert loop._num_streaming == len(streaming)
        now = loop._committed_s
        live_s = sum(now - request.first_token_s for request in streaming if request.first_token_s is not None)
        assert stats.inter_token_s == self.ended_s + live_s  # whole seconds: exact

    def check_outputs(self, request_id: str) -> None:
        """One stream of outputs is what the naive loop generates, cut as the stream interval says."""
        request, outputs = self.requests[request_id], self.outputs[request_id]
        sampling, reason = request.sampling, outputs[-1].finish_reason
        if reason == "error":
            assert len(outputs) == 1
            return
        tokens = self.tokens(request_id)
        expected, expected_reason = naive_tokens(request.prompt_token_ids, sampling, self.setting.max_model_len)
        given = request.prompt_token_ids + request.generated_token_ids
        expected = expected[len(request.generated_token_ids) :]
        if reason == "cancelled":
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, expected_reason)
        self._check_intervals(outputs)
        everything = given + tokens
        if sampling.logprobs is None:
            assert all(output.logprobs is None for output in outputs)
        else:
            found = [entry for output in outputs for entry in output.logprobs or []]
            assert found == logprobs_of(everything, len(given))
        if request.generated_token_ids:
            assert outputs[0].prompt_logprobs is None
        elif sampling.prompt_logprobs is not None and reason != "cancelled":
            assert outputs[0].prompt_logprobs == logprobs_of(request.prompt_token_ids, 1)
            assert outputs[0].num_cached_tokens == 0

    def _check_intervals(self, outputs: list[GenerationOutput]) -> None:
        assert all(output.finish_reason is None for output in outputs[:-1])
        if not self.setting.most_drafts:
            sizes = [len(output.token_ids) for output in outputs]
            interval = self.setting.stream_interval
            assert sizes[0] <= 1
            assert all(size == interval for size in sizes[1:-1])
            assert sizes[-1] <= interval
        for output in outputs[1:]:
            assert output.prompt_logprobs is None
            assert (output.num_cached_tokens, output.queue_s) == (0, 0.0)
        assert outputs[0].num_cached_tokens <= len(self.requests[outputs[0].request_id].prompt_token_ids)
