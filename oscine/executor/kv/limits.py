"""How many sequences run at once on a GPU and how many tokens a step has, where no option says so.

Both follow from the GPU's memory; decisions/0029 has the reasons. The tokens of a step follow from its size alone, as
ranks need them before they can meet. The sequences are as many of TYPICAL_TOKENS as the KV cache holds. The cache is
what a plan for that many sequences leaves, so the largest number is searched whose own plan holds them.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from oscine.executor.kv.memory import MemoryPlan, typical_pages
from oscine.kv_group import slots_of
from oscine.settings.config import MAX_SEQS, MAX_STEP_TOKENS, STEP_TOKENS, EngineOptions

_GIB = 1 << 30
_LEAST_SEQS = 8
# Tokens of a step on GPUs of up to so many GiB, as they are sold: the activations take some 2 % of the memory.
_STEPS = {16: STEP_TOKENS, 24: 2048, 48: 4096}


def with_step_tokens(options: EngineOptions, gpu_bytes: int) -> EngineOptions:
    """Sets --max-num-batched-tokens where it is left to memory. `gpu_bytes`: of the smallest GPU of all ranks."""
    if "max_num_batched_tokens" not in options.scheduler.by_memory:
        return options
    found = next((tokens for gib, tokens in _STEPS.items() if gpu_bytes <= gib * _GIB), MAX_STEP_TOKENS)
    left, tokens = _without(options, "max_num_batched_tokens"), max(found, options.scheduler.max_num_seqs)
    return replace(options, scheduler=replace(options.scheduler, by_memory=left, max_num_batched_tokens=tokens))


def with_sequences(options: EngineOptions, plan_of: Callable[[EngineOptions], MemoryPlan]) -> EngineOptions:
    """Sets --max-num-seqs where it is left to memory: the largest size of a CUDA graph whose own plan holds as many.

    `plan_of`: the plan for options that have a value; it may raise ValueError. If no plan holds its sequences, the
    least number is set, and its plan has the error or the short context.
    """
    if "max_num_seqs" not in options.scheduler.by_memory:
        return options
    most = min(MAX_SEQS, options.scheduler.max_num_batched_tokens)

    def overflows(count: int) -> bool:
        try:
            plan = plan_of(with_fixed(options, count))
        except ValueError:
            return True
        (slots,) = plan.slots
        pages = typical_pages(options, plan.groups)
        return slots.count < slots_of(plan.groups, slots, count, pages, drafts=options.speculation.is_on)

    sizes = [size for size in sizes_up_to(most) if size >= min(_LEAST_SEQS, most)]
    # More sequences leave less memory and need more of it, so all sizes from the first that overflows on do.
    fitting = bisect_left(sizes, True, key=overflows)
    return with_fixed(options, sizes[max(fitting - 1, 0)])


def sizes_up_to(most: int) -> list[int]:
    """Graph sizes for steps of up to `most` sequences: padding adds little, and there are not too many to capture."""
    sizes = [1, 2, 3, 4, 6, 8, 12]
    for step, end in ((8, 64), (16, 256), (32, 512), (64, most)):
        sizes += range(-(-(sizes[-1] + 1) // step) * step, end + 1, step)
    return [*(size for size in sizes if size < most), most]


def prompt_sizes_up_to(most: int) -> list[int]:
    """Graph sizes for steps with prompts, in tokens."""
    sizes = [32, 64, 128, 192]
    for step, end in ((64, 512), (128, 1024), (256, most)):
        sizes += range(sizes[-1] + step, end + 1, step)
    return [*(size for size in sizes if size < most), most]


def with_fixed(options: EngineOptions, max_num_seqs: int) -> EngineOptions:
    """The options with this number of sequences, which is no longer left to memory."""
    left = _without(options, "max_num_seqs")
    return replace(options, scheduler=replace(options.scheduler, by_memory=left, max_num_seqs=max_num_seqs))


def _without(options: EngineOptions, field: str) -> tuple[str, ...]:
    return tuple(other for other in options.scheduler.by_memory if other != field)
