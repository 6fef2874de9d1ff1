"""The memory plan of a model on a CPU that is only described: it loads no weights."""

import torch

from oscine.executor.kv.allocate import groups_of
from oscine.executor.kv.memory import MemoryPlan, plan_memory
from oscine.executor.start.weight_bytes import native_bytes
from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs
from oscine.ops.choose.native import prepared_bytes
from oscine.ops.platforms import native
from oscine.ops.target import Target
from oscine.settings.config import EngineOptions


def plan_on_cpu(config: ModelConfig, options: EngineOptions, host_bytes: int | None) -> MemoryPlan:
    """With the C kernels. Raises ValueError with the arithmetic if it does not fit."""
    platform, target = native.PLATFORM, Target(torch.device("cpu"))
    if lacking := platform.lacking_for_keys(target, options.cache.kv_dtype("float32")):
        raise ValueError(f"--kv-cache-dtype {options.cache.kv_cache_dtype} needs {lacking}")
    lacking = platform.lacking_for_fp8_experts(config.hidden_size)
    if lacking and options.model.activation_dtype != "auto":
        raise ValueError(f"--activation-dtype {options.model.activation_dtype} needs {lacking}")
    groups = groups_of(config, options.cache, torch.float32)
    specs, kind = tensor_specs(config), options.model.cpu_weights
    weights = sum(native_bytes(specs, kind).values()) + prepared_bytes(kind, *specs["lm_head.weight"].shape)
    return plan_memory(config, groups, options, weights, torch.float32.itemsize, host_bytes=host_bytes)
