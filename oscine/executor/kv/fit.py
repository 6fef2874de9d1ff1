"""The memory plan of a model on GPUs that are only described: it loads no weights, and imports no torch."""

from bisect import bisect_right
from math import ceil

from oscine.executor.kv.limits import with_sequences, with_step_tokens
from oscine.executor.kv.memory import (
    DeviceMemory,
    MemoryPlan,
    OnHost,
    WeightBytes,
    leave_on_host,
    plan_memory,
    second_form_bytes,
)
from oscine.kv_group import slots_of
from oscine.model.config import ModelConfig
from oscine.model.tensors import Part, Shard
from oscine.ops.choose.screen_size import screen_bytes
from oscine.settings.config import EngineOptions

_DTYPE, _BYTES = "bfloat16", 2


def plan_on_gpus(
    config: ModelConfig,
    options: EngineOptions,
    gpu: DeviceMemory,
    num_ranks: int = 1,
    host_bytes: int | None = None,
    *,
    hopper: bool = False,
    num_sharing: int = 1,
) -> MemoryPlan:
    """The plan of one rank in bfloat16. Raises ValueError with the arithmetic if it does not fit.

    hopper: GPUs of compute capability 9.0, whose kernels may have projections in a second form. num_sharing: engines
    that share experts.
    """
    options = with_step_tokens(options, gpu.total)
    shard = Shard.of_everything(0, num_ranks) if num_sharing == 1 else Shard(experts=Part(0, num_sharing))
    own = shard.config(config)
    groups = config.kv_groups(options.cache.page_size, options.cache.kv_dtype(_DTYPE), num_ranks)
    specs = shard.specs(config)
    sizes = {name: spec.num_bytes for name, spec in specs.items()}
    shapes = {name: spec.shape for name, spec in specs.items()}
    head = screen_bytes(*shapes["lm_head.weight"])
    second_form = second_form_bytes(gpu, options, sum(sizes.values()) + head, shapes) if hopper else 0
    weights = WeightBytes.of(sizes, config.num_hidden_layers, head + second_form)
    alone = num_ranks == num_sharing == 1
    on_host = leave_on_host(own, groups, options, weights, _BYTES, gpu) if alone else OnHost()

    def plan_of(options: EngineOptions) -> MemoryPlan:
        host = host_bytes if alone else None
        others = on_host, second_form
        return plan_memory(own, groups, options, weights.total - on_host.total, _BYTES, gpu, host, *others)

    return plan_of(options if on_host.num_layers else with_sequences(options, plan_of))


def held_sequences(plan: MemoryPlan, options: EngineOptions, tokens: int) -> int:
    """The number of sequences of `tokens` that run at once, by the limit and by the memory of the cache."""
    (slots,), pages, drafts = plan.slots, ceil(tokens / plan.page_size), options.speculation.is_on

    def needed(count: int) -> int:
        return slots_of(plan.groups, slots, count, pages, drafts=drafts)

    return bisect_right(range(1, plan.max_num_seqs + 1), slots.count, key=needed)
