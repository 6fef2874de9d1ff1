"""An executor without a model, which checks every page of a plan, and the naive loop that computes the expected tokens.

The "KV" of a position is a hash of all tokens up to it, since in a real model it depends on all of them. It is written
to the pages of the plan. Before a token is sampled, everything that attention would read is compared with the expected
hashes. So a page that is freed too early, shared wrongly or never filled is an AssertionError.
"""

from collections import deque
from collections.abc import Sequence
from math import lcm

import numpy as np
from numpy.typing import NDArray

from oscine.kv_group import Slots
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
        self.num_computed = self.start = new.num_cached_tokens
        self.tables = new.pages

    def sample(self) -> int:
        self.tokens.append(next_token(self.hashes[-1], self.sampling.seed))
        self.hashes.append(hash((self.hashes[-1], self.tokens[-1])))
        return self.tokens[-1]


def _pages(slots: Slots, page_size: int) -> list[NDArray[np.int64]]:
    """[pages, page_size] for each group; all groups have the same memory."""
    data = np.zeros((slots.count, lcm(*slots.per_slot) * page_size), np.int64)
    return [data.reshape(slots.count * each, -1)[:, :page_size] for each in slots.per_slot]


class PagedExecutor:
    """Where a plan allows drafts, it verifies some, and accepts some of these. It runs a plan as early as it can (when
    launched) or as late as it may (when collected)."""

    def __init__(
        self,
        *,
        page_size: int,
        windows: Sequence[int | None],
        num_slots: int,
        memory: Sequence[Slots],
        max_num_tokens: int,
        most_drafts: int = 0,
        lazy: bool = False,
    ) -> None:
        self.page_size = page_size
        self.windows = windows
        self.max_num_tokens = max_num_tokens
        self.most_drafts = most_drafts
        self.lazy = lazy
        self.slots: list[Slot | None] = [None] * num_slots
        self.memory = [pages for slots in memory for pages in _pages(slots, page_size)]  # groups are in order
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
        assert 0 < plan.num_tokens + sum(s.num_drafts for s in plan.sequences) <= self.max_num_tokens
        slots = [s.slot for s in plan.sequences]
        assert len(set(slots)) == len(slots), "a slot twice in a step"
        assert {new.slot for new in plan.new} <= set(slots), "a new sequence that computes nothing"
        self.num_steps += 1
        self.num_computed += plan.num_tokens
        self.drafted = [self._drafts(sequence) for sequence in plan.sequences]
        self.plans.append(plan)
        for new in plan.new:
            assert [new.num_cached_tokens] * len(self.memory) == [len(pages) * self.page_size for pages in new.pages]
            assert new.num_cached_tokens < len(new.token_ids)
            self.slots[new.slot] = Slot(new)
        self._plan = plan
        for sequence in plan.sequences:
            self._write(sequence)
        for sequence in plan.sequences:
            self._check(sequence)
        drafted = [len(drafts) for drafts in self.drafted] if any(self.drafted) else None
        return StepResult(plan.step, *self._sample(plan), num_drafted=drafted)

    def _drafts(self, sequence: ScheduledSequence) -> list[bool]:
        """For each draft that is verified, whether it is right: up to the first that is not."""
        assert sequence.num_drafts <= self.most_drafts
        if not sequence.num_drafts:
            return []
        draw = hash((self.num_steps, sequence.slot))
        count = draw % (sequence.num_drafts + 1)
        num_right = draw // 7 % (count + 1)
        return [i < num_right for i in range(count)]

    def _slot(self, sequence: ScheduledSequence) -> Slot:
        slot = self.slots[sequence.slot]
        assert slot is not None
        return slot

    def _write(self, sequence: ScheduledSequence) -> None:
        slot = self._slot(sequence)
        drafts = self.drafted[self._plan.sequences.index(sequence)]
        late = slot.num_computed - sequence.start  # accepted in a step that the scheduler had not seen yet
        assert 0 <= late <= (self.most_drafts if sequence.num_tokens == 1 else 0)
        slot.start = slot.num_computed
        end = slot.start + sequence.num_tokens
        assert sequence.num_tokens >= 1
        assert end <= len(slot.tokens)
        assert sequence.sample == (end == len(slot.tokens) and slot.sampling.max_tokens > 0)
        for table, pages in zip(slot.tables, sequence.pages, strict=bool(sequence.pages)):
            table += pages
        for memory, table in zip(self.memory, slot.tables, strict=True):
            need, most = (-(-tokens // self.page_size) for tokens in (end + len(drafts), end + 2 * self.most_drafts))
            assert need <= len(table) <= most, "pages appended too early or too late"
            for position in range(slot.start, end):
                page = memory[table[position // self.page_size]]
                page[position % self.page_size] = slot.hashes[position]
            for position in range(end, end + len(drafts)):
                page = memory[table[position // self.page_size]]
                page[position % self.page_size] = 1 + position  # what is right is written when it is accepted
        slot.num_computed = end

    def _accept(self, slot: Slot) -> None:
        """A right draft: its keys are those of the token that was just sampled."""
        position = slot.num_computed
        for memory, table in zip(self.memory, slot.tables, strict=True):
            memory[table[position // self.page_size]][position % self.page_size] = slot.hashes[position]
        slot.num_computed += 1

    def _check(self, sequence: ScheduledSequence) -> None:
        """Every key that the tokens of this step attend to is where the page tables say."""
        slot = self._slot(sequence)
        for window, memory, table in zip(self.windows, self.memory, slot.tables, strict=True):
            first = 0 if window is None else max(0, slot.start - window + 1)
            for i in range(first // self.page_size, len(table)):
                low = max(first, i * self.page_size)
                high = max(low, min(slot.num_computed, (i + 1) * self.page_size))
                found = memory[table[i]][low - i * self.page_size : high - i * self.page_size]
                assert table[i] >= 0
                assert found.tolist() == slot.hashes[low:high], (
                    f"wrong page {i} of window {window} of slot {sequence.slot}"
                )

    def _sample(
        self, plan: StepPlan
    ) -> tuple[list[list[int]], list[list[TokenLogprobs] | None], dict[int, list[TokenLogprobs]]]:
        token_ids: list[list[int]] = []
        logprobs: list[list[TokenLogprobs] | None] = []
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        for sequence, drafts in zip(plan.sequences, self.drafted, strict=True):
            slot = self._slot(sequence)
            if slot.sampling.prompt_logprobs is not None:
                end = min(sequence.start + sequence.num_tokens + 1, slot.num_prompt_tokens)
                prompt_logprobs[sequence.slot] = logprobs_of(slot.tokens[:end], sequence.start + 1)
            num_known = len(slot.tokens)
            token_ids.append([slot.sample()] if sequence.sample else [])
            for is_right in drafts:
                if is_right:
                    self._accept(slot)
                    token_ids[-1].append(slot.sample())
            logprobs.append(logprobs_of(slot.tokens, num_known) if slot.sampling.logprobs is not None else None)
        return token_ids, logprobs, prompt_logprobs


def logprobs_of(tokens: list[int], start: int) -> list[TokenLogprobs]:
    """Made-up log-probabilities that name their position."""
    return [TokenLogprobs(tokens[i], -float(i), ()) for i in range(start, len(tokens))]
