"""Measures decode steps with drafts, before the first request: the controller chooses by these times (policy.py)."""

import itertools
import time
from contextlib import nullcontext

import numpy as np

from oscine.executor.runner import TorchExecutor
from oscine.executor.start.warm_up import GREEDY
from oscine.extensions.speculation.drafter import HostDrafter
from oscine.extensions.speculation.host_drafts import HostDrafts
from oscine.types import TIMED_CONTEXT, DecodeTimes, NewSequence, ScheduledSequence, StepPlan

_TIMED_ROWS = 1024  # the most rows of a step that is timed
# Up to how many sequences are few; steps per measurement with few sequences, and with more. The first is not timed.
_TIMED_STEPS = {"cuda": (32, 3, 2), "cpu": (8, 6, 3)}
_CPU_LIMIT_S = 0.5  # for all measurements together
_CPU_ENOUGH_S = 0.1  # a measurement that takes so long ends after three steps
_CPU_STEP_S = 0.1  # if a plain step takes longer, nothing is measured


def time_decodes(
    executor: TorchExecutor, max_num_batched_tokens: int, drafter: HostDrafter | None
) -> dict[int, DecodeTimes] | None:
    """Measures decode steps with 0, 1, ... drafts, by number of sequences: 1, 2, 4, ... and max_num_seqs.

    `drafter`: a new one like the executor's, used for this only; None if a head drafts. Ranks, and engines that share
    experts, call this together and run the same steps. Returns None if nothing was measured.
    """
    is_limited, most_rows = executor.device.type == "cpu", min(_TIMED_ROWS, max_num_batched_tokens)
    if executor.memory.max_model_len < 2 * TIMED_CONTEXT + executor.max_drafts:
        return None
    fixed = None if drafter is None else _FixedDrafter(drafter)
    steps, found, drafts = _TimedSteps(executor, fixed), {}, executor.drafts
    with drafts.drafting_with(fixed) if isinstance(drafts, HostDrafts) and fixed else nullcontext():
        for size in sizes_to_time(executor.max_num_seqs):
            most_drafts = min(executor.max_drafts, most_rows // size - 1)
            plain = steps.seconds(size, 0, asks=False)
            if most_drafts < 1 or (is_limited and plain > _CPU_STEP_S):
                break
            drafting = [steps.seconds(size, num_drafts, asks=True) for num_drafts in range(2)]
            for num_drafts in range(2, most_drafts + 1):
                if is_limited and steps.total_s > _CPU_LIMIT_S:
                    break
                drafting.append(steps.seconds(size, num_drafts, asks=True))
            found[size] = DecodeTimes(plain, tuple(drafting))
            if is_limited and steps.total_s > _CPU_LIMIT_S:
                break
    executor.forget_page_zero()
    return found or None


def sizes_to_time(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


class _FixedDrafter:
    """A HostDrafter that does the work of another, and then drafts `num_drafts` tokens."""

    def __init__(self, drafter: HostDrafter) -> None:
        self._drafter, self.num_drafts = drafter, 0

    def assign(self, new: NewSequence) -> None:
        self._drafter.assign(new)

    def keeps(self, slot: int) -> bool:
        return False

    def append(self, slot: int, token_ids: list[int]) -> None:
        self._drafter.append(slot, token_ids)

    def propose(self, slot: int, most: int, forced: list[int]) -> list[int]:
        self._drafter.propose(slot, most, forced)
        return [0] * self.num_drafts


class _TimedSteps:
    """Decode steps of dummy sequences. On a GPU two are in flight, as in the engine.

    All tokens are given and random, drafts too, so they choose different experts, as those of requests do. Contexts
    have a few tokens; the engine learns the cost of longer ones.
    """

    def __init__(self, executor: TorchExecutor, fixed: _FixedDrafter | None) -> None:
        self._executor, self._fixed, self._numbers = executor, fixed, itertools.count()
        self._began_s = time.perf_counter()

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._began_s

    def seconds(self, size: int, num_drafts: int, *, asks: bool) -> float:
        """Seconds of a step of `size` sequences. `asks`: whether the drafter works for them."""
        executor, ends_s = self._executor, list[float]()
        ahead = 0 if executor.device.type == "cpu" else 1  # a CPU has done a step when it is launched
        few, steps_of_few, steps_of_many = _TIMED_STEPS[executor.device.type]
        steps = steps_of_few if size <= few else steps_of_many
        length = TIMED_CONTEXT + steps + num_drafts
        pages = [[0] * -(-length // executor.memory.page_size) for _ in executor.memory.groups]
        draw = np.random.default_rng(size)
        new = [
            NewSequence(slot, tokens.tolist(), length, TIMED_CONTEXT, pages, GREEDY)
            for slot, tokens in enumerate(draw.integers(executor.config.vocab_size, size=(size, length)))
        ]
        if self._fixed is not None:
            self._fixed.num_drafts = num_drafts
        asked = max(num_drafts, 1) if asks and self._fixed is not None else num_drafts
        nothing: list[list[int]] = [[] for _ in pages]
        for i in range(steps):
            # A step with a new sequence fills the head's layer, without drafts.
            taken = new if i == 0 else new[:1] if asks and not asked else []
            sequences = [ScheduledSequence(one.slot, TIMED_CONTEXT + i, 1, True, nothing, asked) for one in new]
            executor.launch(StepPlan(next(self._numbers), taken, sequences))
            if i >= ahead:
                executor.collect()
                ends_s.append(time.perf_counter())
            if not ahead and len(ends_s) > 2 and ends_s[-1] - ends_s[0] > _CPU_ENOUGH_S:
                break
        for _ in range(ahead):
            executor.collect()
            ends_s.append(time.perf_counter())
        # On a CPU the first step may be recorded. On a GPU, a result that is read late makes the next step look short.
        return (
            min(b - a for a, b in itertools.pairwise(ends_s)) if not ahead else (ends_s[-1] - ends_s[0]) / (steps - 1)
        )
