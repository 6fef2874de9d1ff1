"""Brings a model onto its device and an executor over it: plan, load, allocate, warm up, capture.

Knows the order and what to tell about it. Nothing big is allocated before the memory plan is reported.
"""

from collections.abc import Callable, Mapping
from contextlib import closing
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from oscine.config import EngineOptions
from oscine.executor.cuda_graphs import sizes_up_to
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan, plan_memory
from oscine.executor.masks import TOKENIZER, GrammarCache
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.host_memory import available_bytes
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.warm_up import KERNEL_SAMPLINGS, MASKED, SAMPLINGS, run_largest, warm_up
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss, kv_shape
from oscine.model.opened import OpenedModel, open_model
from oscine.model.weights import tensor_specs
from oscine.ops.interface import KVCache
from oscine.ops.table import choose, describe, platform, resolve
from oscine.ops.target import Target

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.ops.compile_together import Compilers

Report = Callable[[str], None]
_ROUNDING = 0.01  # of the allocator, which the reserve covers


def load_executor(options: EngineOptions, report: Report, watch: Stopwatch) -> TorchExecutor:
    """Raises ValueError for what is wrong with the model or does not fit."""
    opened = open_model(options.model)
    target = Target.of(opened.device)
    choice = choose(platform(target, opened.dtype))
    if opened.device.type != "cuda":
        return _load(opened, target, choice, options, report, watch)
    from oscine.ops.compile_together import Compilers

    decode_sizes = sizes_up_to(options.scheduler.max_num_seqs) if is_capturable(choice) else []
    with closing(Compilers()) as compilers:  # they get ready while the weights are loaded
        executor = _load(opened, target, choice, options, report, watch)
        _rehearse(executor.of_first_layers(2), compilers, options, decode_sizes, watch)
    if options.cuda_graphs and decode_sizes:
        executor.capture(decode_sizes)
        watch.lap(f"{len(decode_sizes)} graphs")
    run_largest(executor, options.scheduler.max_num_batched_tokens)  # at last: a capture gives cached memory back
    executor.forget_page_zero()
    torch.cuda.synchronize(opened.device)
    watch.lap("largest step")
    return executor


def _load(
    opened: OpenedModel,
    target: Target,
    choice: Mapping[str, str],
    options: EngineOptions,
    report: Report,
    watch: Stopwatch,
) -> TorchExecutor:
    """`choice`: the backends of the ops."""
    ops = resolve(target, choice)
    vocab, hidden = opened.config.vocab_size, opened.config.hidden_size
    weight_total = weight_bytes(opened.config, opened.dtype) + ops.chooser.prepared_bytes(vocab, hidden)
    memory = _plan(opened, options, weight_total)
    report(f"{memory}\nops: {describe(choice)}")
    watch.lap("open")
    tokenizer = None if opened.tokenizer is None else opened.tokenizer / TOKENIZER
    grammars = GrammarCache(tokenizer, opened.config.vocab_size)  # which reads it while the weights are loaded
    weights = opened.load(ops=ops, progress=not options.quiet)
    if opened.device.type == "cuda":
        memory = _plan_again(opened, options, memory, report)
    watch.lap("weights")
    kv = allocate_kv(opened.config, memory, opened.device, opened.dtype)
    return TorchExecutor(GptOss(opened.config, weights, ops), memory, kv, options.scheduler.max_num_seqs, grammars)


def _rehearse(
    layers: TorchExecutor, compilers: "Compilers", options: EngineOptions, decode_sizes: list[int], watch: Stopwatch
) -> None:
    """On two layers, one of each kind, all kernels are compiled, then loaded and run."""
    most_tokens = options.scheduler.max_num_batched_tokens
    layers.touch_state()
    with compilers.compile_together():
        warm_up(layers, most_tokens, (*KERNEL_SAMPLINGS, MASKED))
        layers.run_decodes(decode_sizes)
    watch.lap("kernels")
    warm_up(layers, most_tokens, SAMPLINGS)
    layers.run_decodes(decode_sizes)
    watch.lap("rehearsal")


def is_capturable(choice: Mapping[str, str]) -> bool:
    """Whether a step may become a CUDA graph: the reference attention and experts look at numbers on the host."""
    return "reference" not in (choice["attention"], choice["moe"])


def allocate_kv(config: ModelConfig, memory: MemoryPlan, device: torch.device, dtype: torch.dtype) -> KVCache:
    """Zeros, not garbage: attention multiplies what it masks by zero, and zero times NaN is NaN."""

    def group(num_layers: int, num_pages: int) -> Tensor:
        return _zeros(kv_shape(config, num_layers, num_pages, memory.page_size), dtype, device)

    return KVCache(
        full=group(config.num_full_layers, memory.num_full_pages),
        sliding=group(config.num_sliding_layers, memory.num_sliding_pages),
    )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, the system gives the memory when it is first used: none of it is waited for, or taken in vain."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


def weight_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """On the device: MXFP4 stays packed, everything else is cast to dtype."""
    return sum(
        spec.num_bytes if spec.dtype == "U8" else prod(spec.shape) * dtype.itemsize
        for spec in tensor_specs(config).values()
    )


def _plan(opened: OpenedModel, options: EngineOptions, weights: int, held: int = 0) -> MemoryPlan:
    """`held`: bytes of the weights that are on the device already."""
    gpu = None
    if opened.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(opened.device)
        gpu = DeviceMemory(total, free + held)
    return plan_memory(opened.config, options, weights, opened.dtype.itemsize, gpu, available_bytes())


def _plan_again(opened: OpenedModel, options: EngineOptions, planned: MemoryPlan, report: Report) -> MemoryPlan:
    """The plan for the weights as they are: a backend may pad what it repacks."""
    torch.cuda.synchronize(opened.device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(opened.device)
    if held <= planned.weights * (1 + _ROUNDING):
        return planned
    plan = _plan(opened, options, held, held)
    report(f"repacked weights are larger\n{plan}")
    return plan
