"""Brings a model onto its device and an executor over it, in four steps between which the ranks of a model meet.

    plan      what every rank will hold, by the rank that has the least memory
    load      the weights, and the executor over them
    compile   every kernel, by one rank, if Triton's cache may lack some; then all ranks run them
    capture   CUDA graphs, and the largest step

Knows the order and what to tell about it. Nothing big is allocated before the memory plan is reported.
"""

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from oscine.checkpoint.quantize import described
from oscine.executor.kv.memory import MemoryPlan
from oscine.executor.lockstep import OwnSteps
from oscine.executor.runner import TorchExecutor
from oscine.executor.sampling.masks import TOKENIZER
from oscine.executor.sampling.rules import grammar_rules
from oscine.executor.sleeper import Sleeper
from oscine.executor.start.capture import (
    allocate_cache,
    await_vocabulary,
    capture,
    compile_kernels,
    fill_cache,
    record,
    rehearse_kernels,
)
from oscine.executor.start.plan import plan, plan_again
from oscine.executor.start.shared import MakeCommunicator, Report, RulesOf, Start
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.warm_up import MASKED
from oscine.model.gpt_oss import GptOss
from oscine.settings.config import EngineOptions
from oscine.types import DecodeTimes, RankHandle


class Loaded(NamedTuple):
    """An executor that is ready to run."""

    executor: TorchExecutor
    lockstep: OwnSteps
    decode_times: Mapping[int, DecodeTimes] | None  # by number of sequences; None if not measured
    sleeper: Sleeper | None = None  # where the options want it


def load_executor(
    options: EngineOptions,
    report: Report,
    watch: Stopwatch,
    communicator: MakeCommunicator | None = None,
    rules_of: RulesOf = grammar_rules,
    handle: RankHandle | None = None,
) -> Loaded:
    """`communicator`: for one of several ranks. `rules_of`: grammars of this process, unless they are rank 0's.
    `handle`: among engines that share experts; returns when all have loaded.

    Raises ValueError for what is wrong with the model or does not fit.
    """
    start = Start(options, report, watch, communicator, rules_of, handle)
    memory = plan(start)
    if start.on_gpu:
        executor = _load_on_gpu(start, memory)
    else:
        executor = load(start, memory)
        record(start, executor)
    times = None
    if start.drafting.most:
        times = start.drafting.time(executor, start.options.scheduler.max_num_batched_tokens)
        watch.lap("times of drafts")
    start.lockstep.serve()
    return Loaded(executor, start.lockstep, times, start.sleeper)


def _load_on_gpu(start: Start, memory: MemoryPlan) -> TorchExecutor:
    from oscine.ops.compile_together import Compilers, Stamp

    stamp = Stamp.of(start.shapes_of_kernels)
    if start.least_of_all(int(stamp.holds())):
        executor = load(start, memory)
        executor.prepare(MASKED)  # begins to read the vocabulary
        with start.lockstep.rehearsal():
            rehearse_kernels(start, executor)
    else:
        workers = None if start.shard.experts.rank == 0 else 0
        with closing(Compilers(workers)) as compilers:  # they get ready beside the weights
            executor = load(start, memory)
            with start.lockstep.rehearsal():
                compile_kernels(start, executor, compilers)
                rehearse_kernels(start, executor)
        stamp.leave(compilers)
    capture(start, executor)
    fill_cache(start, executor)
    await_vocabulary(start, executor)
    return executor


def load(start: Start, memory: MemoryPlan) -> TorchExecutor:
    """Returns when every rank has its weights."""
    opened, config, options = start.opened, start.config, start.options
    tokenizer = None if opened.tokenizer is None else opened.tokenizer / TOKENIZER
    # The library that reads the vocabulary holds Python's lock. On a CPU it is read while C code prepares the weights,
    # on a GPU while nothing else waits (_load_on_gpu).
    new_rules = start.rules_of(tokenizer, config.vocab_size, not start.on_gpu)
    weights = opened.load(
        ops=start.ops,
        shard=start.shard,
        on_host=start.on_host,
        embedding_on_host=memory.on_host.embedding > 0,
        files=start.packed_files,
        progress=not options.quiet,
    )
    if errors := opened.quantization_errors:
        start.report(f"experts were quantised to MXFP4: `oscine convert` does it once; {described(errors)}")
    if start.prepared_head_bytes and weights.prepared_head is None:
        start.report("the head has no screen, as it does not suit these weights: all logits are made")
    if start.on_gpu:
        memory = plan_again(start, memory)
    if start.sleeper is not None:
        weights = start.sleeper.keep(weights)
    start.target.communicator.barrier()
    start.watch.lap("weights")
    kv = allocate_cache(start, memory)
    if start.cache is not None:  # page tables for any length that there may be room for
        memory = replace(memory, max_model_len=options.model.max_model_len or config.max_position_embeddings)
    model, most = GptOss(config, weights, start.ops, start.kv_exponents()), options.scheduler.max_num_seqs
    make_drafts = start.drafting.load(model, memory.groups, kv)
    if start.drafting.has_head:
        start.watch.lap("draft head")
    adapters = start.adapting.load(model, start.adapted_ops, most) if start.adapting.is_on else None
    others = start.target.communicator, start.lockstep, make_drafts, start.drafting.most, adapters
    return TorchExecutor(model, memory, kv, most, new_rules, *others)
