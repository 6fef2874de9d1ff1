"""An executor without a model, which checks every page of a plan, and the naive loop that computes the expected tokens.

The "KV" of a position is a hash of all tokens up to it, since in a real model it depends on all of them. It is written
to the pages of the plan. Before a token is sampled, everything that attention would read is compared with the expected
hashes. So a page that is freed too early, shared wrongly or never filled is an AssertionError.
"""

from collections import deque
from collections.abc import Sequence

from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan, StepResult, TokenLogprobs

VOCAB = 50


def chain(tokens: list[int]) -> list[int]:
    """The hash of every prefix of tokens."""
    hashes: list[int] = []
    for token in tokens:
        hashes.append(hash((hashes[-1] if hashes else 17, token)))
    return hashes


def next_token(prefix_hash: int, seed: int) -> int:
    return hash((prefix_hash, seed)) % VOCAB


def naive_tokens(prompt: list[int], sampling: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """What one request alone generates, and why it ends."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + sampling.max_tokens, max_model_len):
        tokens.append(next_token(chain(tokens)[-1], sampling.seed))
        if tokens[-1] in sampling.stop_token_ids:
            return tokens[len(prompt) :], "stop"
    return tokens[len(prompt) :], "length"


class Slot:
    def __init__(self, new: NewSequence) -> None:
        self.sampling = new.sampling
        self.num_prompt_tokens = new.num_prompt_tokens
        self.tokens = new.token_ids  # its own from here on, like all lists of a plan
        self.hashes = chain(self.tokens)
        self.num_computed = new.num_cached_tokens
        self.tables = new.pages

    def sample(self) -> int:
        self.tokens.append(next_token(self.hashes[-1], self.sampling.seed))
        self.hashes.append(hash((self.hashes[-1], self.tokens[-1])))
        return self.tokens[-1]


class PagedExecutor:
    """`burst` tokens are sampled at once, as after an accepted draft. It runs a plan as early
    as it can (when launched) or as late as it may (when collected)."""

    def __init__(
        self,
        *,
        page_size: int,
        windows: Sequence[int | None],
        num_slots: int,
        num_pages: Sequence[int],
        max_num_tokens: int,
        burst: int = 1,
        lazy: bool = False,
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self.max_num_tokens = max_num_tokens
        self.burst = burst
        self.lazy = lazy
        self.slots: list[Slot | None] = [None] * num_slots
        self.memory = [[[0] * page_size for _ in range(count)] for count in num_pages]  # per group
        self.num_steps = 0
        self.num_computed = 0
        self.plans: list[StepPlan] = []
        self._queue: deque[StepPlan | StepResult] = deque()

    def prepare(self, sampling: SamplingParams) -> bool:
        return True

    def launch(self, plan: StepPlan) -> None:
        self._queue.append(plan if self.lazy else self.execute(plan))

    def collect(self) -> StepResult:
        oldest = self._queue.popleft()
        return self.execute(oldest) if isinstance(oldest, StepPlan) else oldest

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.num_steps
        assert 0 < plan.num_tokens <= self.max_num_tokens
        slots = [s.slot for s in plan.sequences]
        assert len(set(slots)) == len(slots), "a slot twice in a step"
        assert {new.slot for new in plan.new} <= set(slots), "a new sequence that computes nothing"
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        self.plans.append(plan)
        for new in plan.new:
            assert [new.num_cached_tokens] * len(self.memory) == [len(pages) * self.page_size for pages in new.pages]
            assert new.num_cached_tokens < len(new.token_ids)
            self.slots[new.slot] = Slot(new)
        for sequence in plan.sequences:
            self._write(sequence)
        for sequence in plan.sequences:
            self._check(sequence)
        return StepResult(plan.step, *self._sample(plan))

    def _slot(self, sequence: ScheduledSequence) -> Slot:
        slot = self.slots[sequence.slot]
        assert slot is not None
        return slot

    def _write(self, sequence: ScheduledSequence) -> None:
        slot = self._slot(sequence)
        end = sequence.start + sequence.num_tokens
        assert sequence.num_tokens >= 1
        assert sequence.start == slot.num_computed
        assert end <= len(slot.tokens)
        assert sequence.sample == (end == len(slot.tokens) and slot.sampling.max_tokens > 0)
        for table, pages in zip(slot.tables, sequence.pages, strict=bool(sequence.pages)):
            table += pages
        for memory, table in zip(self.memory, slot.tables, strict=True):
            assert len(table) == -(-end // self.page_size), "pages appended too early or too late"
            for position in range(sequence.start, end):
                page = memory[table[position // self.page_size]]
                page[position % self.page_size] = slot.hashes[position]
        slot.num_computed = end

    def _check(self, sequence: ScheduledSequence) -> None:
        """Every key that the tokens of this step attend to is where the page tables say."""
        slot = self._slot(sequence)
        for window, memory, table in zip(self.windows, self.memory, slot.tables, strict=True):
            first = 0 if window is None else max(0, sequence.start - window + 1)
            for i in range(first // self.page_size, len(table)):
                low = max(first, i * self.page_size)
                high = min(slot.num_computed, (i + 1) * self.page_size)
                found = memory[table[i]][low - i * self.page_size : high - i * self.page_size]
                assert table[i] >= 0
                assert found == slot.hashes[low:high], f"wrong page {i} of window {window} of slot {sequence.slot}"

    def _sample(
        self, plan: StepPlan
    ) -> tuple[list[list[int]], list[list[TokenLogprobs] | None], dict[int, list[TokenLogprobs]]]:
        token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for sequence in plan.sequences:
            slot = self._slot(sequence)
            if slot.sampling.prompt_logprobs is not None:
                end = min(sequence.start + sequence.num_tokens + 1, slot.num_prompt_tokens)
                prompt_logprobs[sequence.slot] = logprobs_of(slot.tokens[:end], sequence.start + 1)
            num_known = len(slot.tokens)
            token_ids.append([slot.sample() for _ in range(self.burst if sequence.sample else 0)])
            logprobs.append(logprobs_of(slot.tokens, num_known) if slot.sampling.logprobs is not None else None)
        return token_ids, logprobs, prompt_logprobs


def logprobs_of(tokens: list[int], start: int) -> list[TokenLogprobs]:
    """Made-up log-probabilities that name their position."""
    return [TokenLogprobs(tokens[i], -float(i), ()) for i in range(start, len(tokens))]
