"""Where the cache is, and the last steps of a start: kernels, CUDA graphs, and memory for the cache."""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from oscine.executor.kv.allocate import allocate_kv
from oscine.executor.kv.late_cache import LateCache, filled
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.runner import TorchExecutor
from oscine.executor.sampling.rules import OpenRules
from oscine.executor.start.shared import Start
from oscine.executor.start.warm_up import (
    KERNEL_SAMPLINGS,
    MASKED,
    SAMPLINGS,
    masked_errors,
    prompts,
    rehearse,
    warm_up,
)
from oscine.ops.interface import KVCache
from oscine.ops.native.recording import NotRecordable
from oscine.types import SamplingParams

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.ops.compile_together import Compilers

_GIB = 1 << 30


def allocate_cache(start: Start, memory: MemoryPlan) -> KVCache:
    """The KV cache. A GPU's cache gets its memory at the end of the start (late_cache.py), or at once in four cases.

    Its size is given in bytes; other engines read it, and cannot read memory that is mapped later; engines share
    experts; the GPU is integrated.
    """
    options, device = start.options, start.opened.device
    late = start.on_gpu and options.cache.kv_cache_bytes is None and not options.peers.kv_transfer
    shares = start.lockstep.shares_experts
    sleeper = start.sleeper
    if not late or shares or torch.cuda.get_device_properties(device).is_integrated:
        allocate = allocate_kv if sleeper is None else sleeper.allocate
        return allocate(memory, device, padding=shares or bool(start.prompt_sizes))
    start.cache = LateCache(memory, device)
    if sleeper is not None:
        sleeper.free_asleep(start.cache.reserved)
    return start.cache.kv


def record(start: Start, executor: TorchExecutor) -> None:
    """Replaces a decode step by one call, if the C kernels do all of its work."""
    if start.is_alone and start.options.cuda_graphs and start.platform.has_c_kernels:
        try:
            executor.graphs.record()
            executor.forget_page_zero()
        except NotRecordable as error:
            start.report(f"decode steps are not recorded, so each calls its ops from Python: {error}")


def compile_kernels(start: Start, executor: TorchExecutor, compilers: "Compilers") -> None:
    """Compiles all kernels: those of one layer of each kind. Reading the vocabulary begins when each has a worker.

    One rank compiles for all; the compilers of the other ranks have no workers.
    """
    layers = _of_each_kind(start, executor)
    with compilers.compile_together(partial(executor.prepare, MASKED)):
        _warm_up(start, layers, (*KERNEL_SAMPLINGS, MASKED))
    start.watch.lap("kernels")


def rehearse_kernels(start: Start, executor: TorchExecutor) -> None:
    """Loads all kernels from Triton's cache and runs them on one layer of each kind.

    Begins when all ranks and engines have come so far: one of them compiles for all.
    """
    start.least_of_all(0)
    _warm_up(start, _of_each_kind(start, executor), SAMPLINGS)
    start.watch.lap("rehearsal")


def _warm_up(start: Start, layers: TorchExecutor, samplings: Sequence[SamplingParams]) -> None:
    most_tokens, adapted = start.options.scheduler.max_num_batched_tokens, start.adapting.is_on
    warm_up(layers, most_tokens, samplings, start.graph_sizes, adapted=adapted)


def _of_each_kind(start: Start, executor: TorchExecutor) -> TorchExecutor:
    """An executor of one layer of each kind, on the same weights and cache. Its grammars need no vocabulary."""
    layers = executor.of_each_kind(partial(OpenRules, start.config.vocab_size))
    layers.state.touch()
    return layers


def capture(start: Start, executor: TorchExecutor) -> None:
    """The steps that become CUDA graphs, then the largest step. Leaves page 0 as it was."""
    sizes = start.graph_sizes
    if start.options.cuda_graphs and sizes.decode:
        executor.drafts.capture(sizes.decode)
        executor.graphs.capture(sizes, adapted=start.adapting.is_on)
        start.watch.lap(f"{(len(sizes.decode) + len(sizes.prompts)) * (1 + start.adapting.is_on)} graphs")
    # A capture gives cached memory back.
    executor.execute(prompts(executor, start.options.scheduler.max_num_batched_tokens, adapted=start.adapting.is_on))
    executor.forget_page_zero()
    torch.cuda.synchronize(start.opened.device)
    start.target.communicator.barrier()
    start.watch.lap("largest step")


def fill_cache(start: Start, executor: TorchExecutor) -> None:
    """Gives the KV cache what weights, graphs and the largest steps leave. All ranks get the same."""
    if start.cache is None or start.budget is None:
        return
    rehearse(executor, start.options.scheduler.max_num_batched_tokens, adapted=start.adapting.is_on)
    executor.forget_page_zero()
    held = start.cache.num_bytes
    workspace = start.budget.taken - held - executor.memory.weights
    room = start.cache.room(start.budget.cache_bytes(held))
    count = start.least_of_all(room)
    executor.memory = filled(executor.memory, start.config, start.options.model.max_model_len, count)
    start.cache.fill(count)
    sizes = executor.memory.kv_bytes, workspace, torch.cuda.mem_get_info(start.opened.device)[0]
    start.report(
        "the KV cache has {:.2f} GiB; graphs and steps took {:.2f} GiB, {:.2f} GiB stay free".format(
            *(size / _GIB for size in sizes)
        )
    )
    start.watch.lap("cache")


def await_vocabulary(start: Start, executor: TorchExecutor) -> None:
    """The vocabulary of grammars was read beside the steps before this one. Without it, other requests run."""
    for error in masked_errors(executor):
        start.report(f"requests with a grammar will fail: {error}")
    executor.forget_page_zero()
    start.watch.lap("vocabulary")
