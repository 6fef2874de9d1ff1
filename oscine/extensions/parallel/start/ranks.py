"""Rank 0 of a model on several ranks: it starts like a model on one device, together with the others."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from oscine.executor.kv.limits import with_step_tokens
from oscine.executor.sampling.rules import NewRules, grammar_rules
from oscine.executor.start.device_memory import smallest_gpu
from oscine.executor.start.load import Loaded, load_executor
from oscine.executor.start.shared import Report
from oscine.executor.start.stopwatch import Stopwatch
from oscine.extensions.parallel.comm.host import HostCommunicator
from oscine.extensions.parallel.processes import RankProcesses
from oscine.extensions.parallel.ranked import RankedExecutor
from oscine.extensions.parallel.ring import RingWriter
from oscine.extensions.parallel.rules import SentRules
from oscine.extensions.parallel.shared import SharedMemory, bytes_of_all
from oscine.extensions.parallel.start.communicator import between_ranks
from oscine.settings.config import CPU_CACHE_BYTES, EngineOptions


def load_ranks(
    options: EngineOptions, devices: list[str], ranks: RankProcesses, report: Report, watch: Stopwatch
) -> tuple[Loaded, RankedExecutor]:
    """Rank 0's own executor, and the executor over all ranks. Raises as load_executor does, for any rank."""
    os.ftruncate(ranks.memory, bytes_of_all(ranks.num_ranks))
    shared, num_threads = SharedMemory(ranks.memory, ranks.num_ranks), None
    if devices[0] == "cpu":
        num_threads = max(1, torch.get_num_threads() // ranks.num_ranks)
        torch.set_num_threads(num_threads)
        size = (options.cache.kv_cache_bytes or CPU_CACHE_BYTES) // ranks.num_ranks
        options = replace(options, cache=replace(options.cache, kv_cache_bytes=size))
    else:
        gpus = [torch.device(device) for device in devices]
        options = with_step_tokens(options, smallest_gpu(gpus, options))  # all ranks make buffers for as many
    own, *others = (replace(options, model=replace(options.model, device=device)) for device in devices)
    ranks.launch([replace(other, quiet=True) for other in others], num_threads)
    host = HostCommunicator(0, ranks.num_ranks, shared.slots, ranks.watch)
    ring = RingWriter(shared.ring, ranks.wakers, ranks.watch)

    def sent(tokenizer_file: Path | None, vocab_size: int, at_once: bool) -> NewRules:
        new_rules = grammar_rules(tokenizer_file, vocab_size, at_once)
        return lambda num_slots, device: SentRules(new_rules(num_slots, device), ring)

    loaded = load_executor(own, report, watch, between_ranks(host, ranks.store, own, report), sent)
    ranks.serve()
    return loaded, RankedExecutor(loaded.executor, ranks, ring)
