"""Runs steps of all kinds before the first request does, so that kernels are compiled and memory has been taken.

Goes through plans, as the engine does. Every page of the imagined sequences is page 0, which is zeroed in the end.
"""

from collections.abc import Iterator

from oscine.executor.runner import TorchExecutor
from oscine.types import NewSequence, SamplingParams, ScheduledSequence, StepPlan

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
SAMPLINGS = (  # what the sampling op tells apart
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, top_p=0.9),
    SamplingParams(max_tokens=1, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1),
)


def warm_up(executor: TorchExecutor, max_num_batched_tokens: int) -> None:
    """The largest step first: what comes later finds its memory."""
    for number, plan in enumerate(_plans(executor, max_num_batched_tokens)):
        executor.execute(StepPlan(number, plan.new, plan.sequences))
    executor.forget_page_zero()


def _plans(executor: TorchExecutor, max_num_batched_tokens: int) -> Iterator[StepPlan]:
    length, slots = executor.memory.max_model_len, executor.max_num_seqs
    page_size = executor.memory.page_size
    for tokens in _sizes(min(max_num_batched_tokens, slots * (length - 1))):
        yield _step([min(tokens - start, length - 1) for start in range(0, tokens, length - 1)], page_size, GREEDY)
    for sampling in SAMPLINGS:
        yield _step([1], page_size, sampling)
        yield _step([1] * min(slots, 3), page_size, sampling)
    if slots > 1:
        yield _step([1, min(page_size, length - 1)], page_size, GREEDY)


def _sizes(most: int) -> Iterator[int]:
    """Tokens of one step: kernels are chosen by powers of two, and compiled anew for what 16 divides."""
    size = most
    while size > 1:
        yield size
        if size % 16 == 0:
            yield size - 1
        size = 1 << ((size - 1).bit_length() - 1)
    yield 1


def _step(lengths: list[int], page_size: int, sampling: SamplingParams) -> StepPlan:
    """A new sequence of each length, all computed at once."""
    plan = StepPlan(0, [], [])
    for slot, length in enumerate(lengths):
        pages = [0] * -(-length // page_size)
        plan.new.append(NewSequence(slot, [0] * length, length, 0, [], [], sampling))
        plan.sequences.append(ScheduledSequence(slot, 0, length, True, pages, pages))
    return plan
