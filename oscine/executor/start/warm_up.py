"""Runs steps of all kinds before the first request does.

This compiles kernels and takes memory. Steps are plans, as those of the engine. Every page of the dummy sequences is
page 0.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from oscine.executor.kv.limits import sizes_up_to
from oscine.executor.kv.memory import SAMPLED_AT_ONCE
from oscine.executor.runner import TorchExecutor
from oscine.executor.sampling.masks import ANYTHING
from oscine.timing.kinds import NO_GRAPHS, GraphSizes
from oscine.types import AdapterPlace, NewSequence, SamplingParams, ScheduledSequence, StepPlan

_CHUNK = 128  # tokens of a prompt beside decodes: more than a step whose queries norm_qkv rotates
_MAX_LOGPROBS = 20  # of a token, that an API offers
GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# Sampling modes that have their own kernels. Warmed up once per row count; the results are not read. A bias needs all
# logits; temperature alone may not.
KERNEL_SAMPLINGS = (
    GREEDY,
    replace(GREEDY, logit_bias={0: 1.0}),
    SamplingParams(max_tokens=1),
    SamplingParams(max_tokens=1, logit_bias={0: 1.0}),
    SamplingParams(max_tokens=1, top_p=0.9),
)
MASKED = SamplingParams(max_tokens=1, grammar=ANYTHING)
SAMPLINGS = (
    *KERNEL_SAMPLINGS,
    MASKED,
    SamplingParams(max_tokens=1, presence_penalty=1.0, logit_bias={0: 1.0}, logprobs=1),
)


def warm_up(
    executor: TorchExecutor,
    max_num_batched_tokens: int,
    samplings: Sequence[SamplingParams],
    sizes: GraphSizes = NO_GRAPHS,
    *,
    adapted: bool = False,
) -> None:
    """Prompts of all sizes, decodes beside a prompt, steps and drafts that become CUDA graphs, and rows sampled in all
    ways.

    Kernels that take longest to compile come first. The order is always the same: before 3.9, Triton's hash of a kernel
    depends on which functions were hashed before.
    """
    run_sizes(executor, max_num_batched_tokens)
    executor.graphs.run_eagerly(sizes, adapted=adapted)
    if sizes.decode:
        executor.drafts.run_eagerly(sizes.decode)
    run_samplings(executor, samplings)
    if adapted:
        warm_up_adapters(executor, max_num_batched_tokens)


def run_sizes(executor: TorchExecutor, max_num_batched_tokens: int) -> None:
    """Prompts of all sizes, the largest first, and decodes beside a prompt."""
    for tokens in _sizes(max_num_batched_tokens):
        executor.execute(prompts(executor, tokens))
    for count in decode_counts(executor.max_num_seqs - 1):
        chunk = min(_CHUNK, executor.memory.max_model_len - 1, max_num_batched_tokens - count)
        if chunk > 1:
            executor.execute(_step(executor, [1] * count + [chunk], GREEDY))


def run_samplings(executor: TorchExecutor, samplings: Sequence[SamplingParams]) -> None:
    """Rows sampled in all ways."""
    few = min(executor.max_num_seqs, 3)
    for sampling in samplings:
        for count in row_counts(executor.max_num_seqs) if sampling in KERNEL_SAMPLINGS else {1, few}:
            executor.execute(_step(executor, [1] * count, sampling))


def masked_errors(executor: TorchExecutor) -> set[str]:
    """Samples one row with a grammar, as the first request with one would: waits for the vocabulary. Returns what is
    wrong with it."""
    return {*(executor.execute(_step(executor, [1], MASKED)).errors or {}).values()}


def warm_up_adapters(executor: TorchExecutor, max_num_batched_tokens: int) -> None:
    """Steps of all sizes whose sequences have an adapter, the largest first."""
    for tokens in _sizes(max_num_batched_tokens):
        executor.execute(prompts(executor, tokens, adapted=True))
    for count in decode_counts(executor.max_num_seqs):
        executor.execute(_step(executor, [1] * count, GREEDY, adapted=True))


def rehearse(executor: TorchExecutor, max_num_batched_tokens: int, *, adapted: bool = False) -> None:
    """The steps that take most memory: the longest prompts, also with log-probabilities, and all rows sampled in each
    way. What they took stays with the allocator."""
    torch.cuda.empty_cache()
    executor.execute(prompts(executor, max_num_batched_tokens))
    if adapted:
        executor.execute(prompts(executor, max_num_batched_tokens, adapted=True))
    executor.execute(prompts(executor, max_num_batched_tokens, replace(GREEDY, prompt_logprobs=_MAX_LOGPROBS)))
    for sampling in (*KERNEL_SAMPLINGS, replace(SAMPLINGS[-1], logprobs=_MAX_LOGPROBS, temperature=0.7, top_p=0.9)):
        executor.execute(_step(executor, [1] * executor.max_num_seqs, sampling))


def decode_counts(most: int) -> list[int]:
    """Decodes beside a prompt: their number decides which variant of the attention kernel runs."""
    return sorted({*(1 << power for power in range(most.bit_length())), most} - {0})


def row_counts(max_num_seqs: int) -> list[int]:
    """Rows sampled at once: their number decides which variants of kernels run."""
    return sizes_up_to(min(max_num_seqs, SAMPLED_AT_ONCE))


def _sizes(most: int) -> list[int]:
    """Tokens of one step: kernels are chosen by powers of two, and compiled anew for what 16 divides."""
    sizes = {1, most, most - 1}
    for power in range(1, most.bit_length()):
        sizes |= {(1 << power) - 1, 1 << power, (1 << power) + 1}
    return sorted((size for size in sizes if 1 <= size <= most), reverse=True)


def prompts(
    executor: TorchExecutor, num_tokens: int, sampling: SamplingParams = GREEDY, *, adapted: bool = False
) -> StepPlan:
    """As many tokens of prompts, or as many as fit: each leaves room for an answer."""
    longest = executor.memory.max_model_len - 1
    num_tokens = min(num_tokens, executor.max_num_seqs * longest)
    lengths = [min(num_tokens - start, longest) for start in range(0, num_tokens, longest)]
    return _step(executor, lengths, sampling, adapted=adapted)


def _step(executor: TorchExecutor, lengths: list[int], sampling: SamplingParams, *, adapted: bool = False) -> StepPlan:
    """A new sequence of each length, all computed at once. `adapted`: with the adapter in the first slot."""
    adapter = AdapterPlace(0, -1) if adapted else None
    plan = StepPlan(0, [], [])
    for slot, length in enumerate(lengths):
        pages = [[0] * -(-length // executor.memory.page_size) for _ in executor.memory.groups]
        plan.new.append(NewSequence(slot, [0] * length, length, 0, [[] for _ in pages], sampling, adapter=adapter))
        plan.sequences.append(ScheduledSequence(slot, 0, length, True, pages))
    return plan
