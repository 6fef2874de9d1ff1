"""Runs steps of a given shape through an executor, and takes their times.

Each sequence has pages of its own, so no cache of the device holds what all of them read. A context costs nothing: the
executor believes that pages hold it. The next step is launched before the last one is collected, as in the engine, and
a time is that between the ends of two steps.
"""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from oscine.executor.start.build import BuiltExecutor
from oscine.extensions.profile.grid import Limits, Shape, page_span
from oscine.system.nvml import Energy
from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan

DROPPED = 3  # steps at the beginning
_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
_AHEAD = 1  # steps in flight beside the one that is collected
_FILLED_TOKENS, _FILLING_STEPS = 1 << 18, 128  # at most


class Times(NamedTuple):
    """Milliseconds of each step, and of the host alone; mean watts if the device counts its energy."""

    ms: list[float]
    host_ms: list[float]
    watts: float | None = None


@dataclass(slots=True)
class Steps:
    """The executor of this process."""

    built: BuiltExecutor
    limits: Limits
    energy: Energy
    numbers: Iterator[int]

    @classmethod
    def of(cls, built: BuiltExecutor) -> "Steps":
        """Limits are those of the executor and of its memory."""
        info, pages = built.info, [0] * len(built.groups)
        for slots in built.slots:
            for group, each in zip(slots.groups, slots.per_slot, strict=True):
                pages[group] = slots.count * each
        windows = tuple(group.window for group in built.groups)
        sizes = info.max_num_seqs, info.max_num_batched_tokens, info.max_model_len, info.page_size
        limits = Limits(*sizes, tuple(pages), windows, built.graphs)
        return cls(built, limits, Energy(info.gpus), itertools.count())

    @property
    def gpus(self) -> Sequence[str]:
        return self.built.info.gpus

    def measure(self, shape: Shape, count: int) -> Times:
        """`count` steps, of which the first DROPPED are not returned."""
        executor, new = self.built.executor, self._sequences(shape, count)
        ends_s, host_ms, launched = list[float](), list[float](), 0
        nothing: list[list[int]] = [[] for _ in self.limits.pages]
        before_j, began_s = None, 0.0
        for i in range(count + _AHEAD):
            if i < count:
                plan = StepPlan(next(self.numbers), new if i == 0 else [], self._scheduled(shape, new, i, nothing))
                launched_s = time.perf_counter()
                executor.launch(plan)
                host_ms.append((time.perf_counter() - launched_s) * 1e3)
                launched += 1
            if launched > _AHEAD or i >= count:
                executor.collect()
                launched -= 1
                ends_s.append(time.perf_counter())
            if len(ends_s) == DROPPED and before_j is None:
                before_j, began_s = self.energy.joules(), time.perf_counter()
        after_j, took_s = self.energy.joules(), time.perf_counter() - began_s
        watts = None if before_j is None or after_j is None else (after_j - before_j) / took_s
        ms = [(b - a) * 1e3 for a, b in itertools.pairwise(ends_s)]
        return Times(ms[DROPPED - 1 :], host_ms[DROPPED:], watts)

    def fill(self, pages: Sequence[int]) -> str:
        """Fills the KV cache of GPUs with computed prompts of random tokens: a context decides which experts it takes.

        A single process copies them to all other pages; with several ranks these keep zeros, which take less power.
        `pages`: of each group, that these prompts may take. Engines that share experts must be given the same, so that
        they make the same steps. Returns what the cache holds.
        """
        import torch

        if not self.gpus:
            return "zeros"
        executor, is_alone = self.built.executor, self.built.ranks is None
        length = min(self.limits.step_tokens, self.limits.max_model_len - 1, 8192, min(pages) * self.limits.page_size)
        each = -(-length // self.limits.page_size)
        count = min(_FILLED_TOKENS // length, _FILLING_STEPS, *(available // each for available in pages))
        for i in range(count):
            own = [[*range(i * each, (i + 1) * each)] for _ in pages]
            tokens = random.Random(i).choices(range(self.built.info.vocab_size), k=length)
            new = NewSequence(0, tokens, length, 0, [[] for _ in own], _GREEDY)
            plan = StepPlan(next(self.numbers), [new], [ScheduledSequence(0, 0, length, True, own)])
            executor.launch(plan)
            executor.collect()
        if is_alone:
            with torch.inference_mode():
                for memory, available in zip(self.built.kv, self.limits.pages, strict=True):
                    for first in range(count * each, available, count * each):
                        own_pages = memory[first : min(first + count * each, available)]
                        own_pages.copy_(memory[: len(own_pages)])
        return f"computed, {count * length} tokens{'' if is_alone else '; else zeros'}"

    def _sequences(self, shape: Shape, room: int) -> list[NewSequence]:
        """Decodes first, then chunks, each in its own slot. All pages come at once. `room`: for tokens to come."""
        draw, taken, found = random.Random(repr(shape)), [0] * len(self.limits.pages), list[NewSequence]()
        spans = [(context, context + room) for context in shape.contexts()]
        spans += [(shape.start, shape.start + length) for length in shape.lengths()]
        for slot, (begin, end) in enumerate(spans):
            pages = [self._own_pages(group, begin, end, taken) for group in range(len(taken))]
            known = begin + 1 if slot < shape.rows else end
            tokens = [draw.randrange(self.built.info.vocab_size)] * begin
            tokens += draw.choices(range(self.built.info.vocab_size), k=known - begin)
            found.append(NewSequence(slot, tokens, known, begin, pages, _GREEDY))
        return found

    def _own_pages(self, group: int, begin: int, end: int, taken: list[int]) -> list[int]:
        """-1 where a window does not reach."""
        span = page_span(begin, end, self.limits.windows[group], self.limits.page_size)
        first, taken[group] = taken[group], taken[group] + len(span)
        return [-1] * span.start + [*range(first, taken[group])]

    def _scheduled(
        self, shape: Shape, new: list[NewSequence], step: int, nothing: list[list[int]]
    ) -> list[ScheduledSequence]:
        """Decodes go on; chunks are computed again and again."""
        found = [
            ScheduledSequence(one.slot, one.num_cached_tokens + step, 1, True, nothing) for one in new[: shape.rows]
        ]
        lengths: Any = zip(new[shape.rows :], shape.lengths(), strict=True)
        return found + [ScheduledSequence(one.slot, shape.start, length, True, nothing) for one, length in lengths]
