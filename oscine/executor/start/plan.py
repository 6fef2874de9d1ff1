"""The first step of a start: what every rank will hold, by the rank that has the least memory."""

from collections.abc import Callable
from dataclasses import replace

import torch

from oscine.executor.kv.allocate import groups_of
from oscine.executor.kv.limits import with_fixed, with_sequences
from oscine.executor.kv.memory import SECOND_FORM_SHARE, MemoryPlan, OnHost, WeightBytes, leave_on_host, plan_memory
from oscine.executor.start.device_memory import Budget, device_memory, keep_to
from oscine.executor.start.host_memory import available_bytes
from oscine.executor.start.shared import Start
from oscine.kv_group import KVGroup
from oscine.ops.interface import Shapes
from oscine.ops.native.library import unavailable
from oscine.ops.platforms.table import describe
from oscine.settings.config import EngineOptions

_ROUNDING = 0.01  # of the allocator, which the reserve covers


def plan(start: Start) -> MemoryPlan:
    """The memory plan, the same for every rank. Reports it together with the backends of the ops."""
    opened, config, report = start.opened, start.config, start.report
    if start.on_gpu:
        keep_to(opened.device, device_memory(opened.device, start.options))
        start.budget = Budget(opened.device, start.options)
    weights = _weights(start)
    on_host = _leave_on_host(start, weights)
    if on_host.num_layers:
        start.keep_experts(on_host.num_layers)
    elif start.on_gpu:
        start.options = _with_sequences(start, weights.total - on_host.total, on_host)
    memory = _plan(start, weights.total - on_host.total, on_host)
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = Shapes(opened.dtype, memory.page_size, *heads, config.hidden_size, start.target.activation_dtype)
    if (num_ranks := start.shard.attention.num_ranks) > 1:
        report(f"{num_ranks} ranks compute the model together; this is the plan of each")
    report(f"{memory}\n{describe(start.choice, shapes)}")
    if drafts := start.drafting.most:
        report(f"{start.drafting.title} makes up to {drafts} drafts for a sequence per step")
    if start.platform.screens_projections and not start.projection_bytes:
        report(
            "attention projections stay in bfloat16: a copy in 12 bits, for steps of up to 32 tokens, would take more "
            f"than {SECOND_FORM_SHARE:.0%} of the memory that the other weights leave"
        )
    if start.on_gpu and not start.platform.uses_triton:
        report(f"no kernel and no CUDA graph is used: they are for bfloat16, not {opened.dtype}")
    if opened.device.type == "cpu" and (why := unavailable()) is not None:
        report(f"no native kernel is used, so steps are slow: {why}")
    if opened.kv_scales:
        report(
            f"{opened.kv_scales} calibrated scales of an FP8 KV cache are not needed: --kv-cache-dtype fp8 gives each "
            "token a scale of its own"
        )
    if start.kv_scales is not None:
        report(f"keys and values in FP8 have the calibrated scales of {start.kv_scales[0]}")
    start.watch.lap("open")
    return memory


def _weights(start: Start) -> WeightBytes:
    others = start.prepared_head_bytes + start.projection_bytes + start.drafting.num_bytes(start.prompt_sizes)
    others += start.adapting.num_bytes
    return WeightBytes.of(start.tensor_bytes, start.config.num_hidden_layers, others)


def _leave_on_host(start: Start, weights: WeightBytes) -> OnHost:
    options, opened = start.options, start.opened
    if start.platform.uses_triton and start.is_alone:
        gpu = device_memory(opened.device, options)
        return leave_on_host(opened.config, _groups(start), options, weights, opened.dtype.itemsize, gpu)
    if options.model.experts_on_host is not None:
        needs = "engines with their own experts" if start.lockstep.shares_experts else "a GPU and --dtype bfloat16"
        raise ValueError(f"--experts-on-host needs {needs}")
    return OnHost()


def _groups(start: Start) -> tuple[KVGroup, ...]:
    num_ranks = start.shard.attention.num_ranks
    groups = groups_of(start.opened.config, start.options.cache, start.opened.dtype, num_ranks)
    return start.drafting.beside(groups)


def _plan(start: Start, weights: int, on_host: OnHost, held: int = 0) -> MemoryPlan:
    """`weights`: bytes on the device. `held`: the part of them that is already there."""
    return _plan_of(start, weights, on_host, held)(start.options)


def _plan_of(start: Start, weights: int, on_host: OnHost, held: int = 0) -> Callable[[EngineOptions], MemoryPlan]:
    """The plan for some options, as _plan has it. All ranks call this together, and may plan alone then."""
    opened, gpu = start.opened, None
    if start.on_gpu:
        gpu = device_memory(opened.device, start.options, held)
        of_ranks = start.target.communicator.all_gather(torch.tensor([gpu.free]))
        gpu = replace(gpu, free=int(of_ranks.min()))
    host_bytes = available_bytes()
    own_bytes = None if host_bytes is None else host_bytes // start.shard.attention.num_ranks
    groups, itemsize, others = _groups(start), opened.dtype.itemsize, (on_host, start.projection_bytes)
    return lambda options: plan_memory(start.config, groups, options, weights, itemsize, gpu, own_bytes, *others)


def _with_sequences(start: Start, weights: int, on_host: OnHost) -> EngineOptions:
    """The number of sequences where it is left to memory: the least of what the ranks can hold."""
    if "max_num_seqs" not in start.options.scheduler.by_memory:
        return start.options
    own = with_sequences(start.options, _plan_of(start, weights, on_host)).scheduler.max_num_seqs
    return with_fixed(start.options, start.least_of_all(own))


def plan_again(start: Start, planned: MemoryPlan) -> MemoryPlan:
    """The plan for the weights as they are: a backend may pad what it repacks."""
    device = start.opened.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(device) - planned.on_host.workspace  # allocated together with the weights
    if held <= planned.weights * (1 + _ROUNDING):
        return planned
    plan = _plan(start, held, planned.on_host, held)
    start.report(f"repacked weights are larger\n{plan}")
    return plan
