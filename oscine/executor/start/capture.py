"""The last steps of a start: kernels are compiled, steps become CUDA graphs, and the cache gets what is left."""

from typing import TYPE_CHECKING

import torch

from oscine.executor.kv.late_cache import filled
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.shared import Start
from oscine.executor.start.warm_up import KERNEL_SAMPLINGS, MASKED, SAMPLINGS, prompts, rehearse, warm_up
from oscine.ops.native.recording import NotRecordable

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.ops.compile_together import Compilers

_GIB = 1 << 30


def record(start: Start, executor: TorchExecutor) -> None:
    """Replaces a decode step by one call, if the C kernels do all of its work."""
    if start.is_alone and start.options.cuda_graphs and start.platform.has_c_kernels:
        try:
            executor.graphs.record()
            executor.forget_page_zero()
        except NotRecordable as error:
            start.report(f"decode steps are not recorded, so each calls its ops from Python: {error}")


def compile_kernels(start: Start, executor: TorchExecutor, compilers: "Compilers") -> None:
    """Compiles all kernels on one layer of each kind, then loads and runs them.

    One rank compiles for all; the compilers of the other ranks have no workers.
    """
    most_tokens, sizes = start.options.scheduler.max_num_batched_tokens, (start.decode_sizes, start.prompt_sizes)
    layers = executor.of_each_kind()
    layers.state.touch()
    with compilers.compile_together():
        warm_up(layers, most_tokens, (*KERNEL_SAMPLINGS, MASKED))
        layers.graphs.run_eagerly(*sizes)
    start.target.communicator.barrier()
    start.watch.lap("kernels")
    warm_up(layers, most_tokens, SAMPLINGS)
    layers.graphs.run_eagerly(*sizes)
    start.watch.lap("rehearsal")


def capture(start: Start, executor: TorchExecutor) -> None:
    """The steps that become CUDA graphs, then the largest step. Leaves page 0 as it was."""
    if start.options.cuda_graphs and start.decode_sizes:
        if start.drafting.has_head:
            executor.drafts.capture(start.decode_sizes)
            executor.graphs.run_eagerly(start.decode_sizes[:1], start.prompt_sizes)  # kernels of the head
        executor.graphs.capture(start.decode_sizes, start.prompt_sizes)
        start.watch.lap(f"{len(start.decode_sizes) + len(start.prompt_sizes)} graphs")
    # A capture gives cached memory back.
    executor.execute(prompts(executor, start.options.scheduler.max_num_batched_tokens))
    executor.forget_page_zero()
    torch.cuda.synchronize(start.opened.device)
    start.target.communicator.barrier()
    start.watch.lap("largest step")


def fill_cache(start: Start, executor: TorchExecutor) -> None:
    """Gives the KV cache what weights, graphs and the largest steps leave. All ranks get the same."""
    if start.cache is None or start.budget is None:
        return
    rehearse(executor, start.options.scheduler.max_num_batched_tokens)
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
