"""The memory plan of a model on a machine that is only described: what would fit, without loading anything."""

import torch

from oscine.config import EngineOptions
from oscine.executor.kv.allocate import groups_of
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
from oscine.executor.start.load import native_bytes, weight_bytes
from oscine.model.config import ModelConfig
from oscine.model.weights import Shard, tensor_specs
from oscine.ops.choose.screen_size import screen_bytes
from oscine.ops.table import lacking_for_fp8_experts


def plan_on_gpus(
    config: ModelConfig,
    options: EngineOptions,
    gpu: DeviceMemory,
    num_ranks: int = 1,
    host_bytes: int | None = None,
    *,
    hopper: bool = False,
) -> MemoryPlan:
    """The plan of one rank in bfloat16. Raises ValueError with the arithmetic if it does not fit.

    hopper: GPUs of compute capability 9.0, whose kernels may have projections in a second form.
    """
    options = with_step_tokens(options, gpu.total)
    dtype, shard = torch.bfloat16, Shard.of_everything(0, num_ranks)
    own = shard.config(config)
    groups = groups_of(config, options.cache, dtype, num_ranks)
    specs = shard.specs(config)
    head = screen_bytes(*specs["lm_head.weight"].shape)
    total = weight_bytes(config, dtype, shard) + head
    shapes = {name: spec.shape for name, spec in specs.items()}
    second_form = second_form_bytes(gpu, options, total, shapes) if hopper else 0
    total += second_form
    experts = [0] * config.num_hidden_layers
    for name, spec in specs.items():
        if name.endswith(("_blocks", "_scales")):
            experts[int(name.split(".")[2])] += spec.num_bytes
    weights = WeightBytes(total, specs["model.embed_tokens.weight"].num_bytes, experts)
    on_host = OnHost() if num_ranks > 1 else leave_on_host(own, groups, options, weights, dtype.itemsize, gpu)

    def plan_of(options: EngineOptions) -> MemoryPlan:
        host = None if num_ranks > 1 else host_bytes
        others = on_host, second_form
        return plan_memory(own, groups, options, total - on_host.total, dtype.itemsize, gpu, host, *others)

    return plan_of(options if on_host.num_layers else with_sequences(options, plan_of))


def plan_on_cpu(config: ModelConfig, options: EngineOptions, host_bytes: int | None) -> MemoryPlan:
    """With the C kernels. Raises ValueError with the arithmetic if it does not fit."""
    if options.cache.fp8:
        raise ValueError(f"--kv-cache-dtype {options.cache.kv_cache_dtype} needs a GPU, as the C kernels have no FP8")
    if (lacking := lacking_for_fp8_experts("native", config.hidden_size)) and options.model.activation_dtype != "auto":
        raise ValueError(f"--activation-dtype {options.model.activation_dtype} needs {lacking}")
    groups = groups_of(config, options.cache, torch.float32)
    weights = sum(native_bytes(tensor_specs(config), options.model.cpu_weights).values())
    return plan_memory(config, groups, options, weights, torch.float32.itemsize, host_bytes=host_bytes)
