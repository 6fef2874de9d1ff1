"""From options to an engine that runs in this process: evaluation and benchmarks use it directly, no socket needed."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from oscine.engine.core.loop import EngineLoop
from oscine.executor.start.build import build_executor
from oscine.extensions.disaggregation.transfers import Transfers
from oscine.extensions.offload.manager import Offload
from oscine.extensions.offload.page_files import seed_of
from oscine.extensions.offload.page_store import PageStore
from oscine.extensions.speculation.policy import SpeculationController
from oscine.settings.config import EngineOptions, SchedulerOptions
from oscine.types import ModelSize, Seat

if TYPE_CHECKING:  # it needs msgspec
    from oscine.extensions.parallel.processes import RankProcesses


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    loop: EngineLoop
    model: str  # as loaded
    max_model_len: int  # tokens
    vocab_size: int
    size: ModelSize = field(default_factory=ModelSize)
    transfers: Transfers | None = None  # where the options want pages to move between engines
    ranks: "RankProcesses | None" = None  # where the model has several ranks
    offload: Offload | None = None  # where the options want evicted pages kept
    gpus: tuple[str, ...] = ()  # UUIDs of those that compute the model
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)  # with the limits that there is room for


def build_engine(options: EngineOptions, seat: Seat | None = None) -> BuiltEngine:
    """Loads the model and puts a loop over it. Raises ValueError as build_executor does."""
    options = with_prefix_seed(options)
    built = build_executor(options, seat)
    options = replace(options, scheduler=built.scheduler)
    loop = EngineLoop(
        built.executor,
        options,
        groups=built.groups,
        memory=built.slots,
        max_model_len=built.max_model_len,
        max_attended=built.max_attended,
    )
    loop.partners = built.partners
    offload = None if built.store is None else _offload(loop, built.store, options)
    loop.offload = offload
    if built.max_drafts:
        has_head = options.speculation.method == "eagle3"
        loop.speculation = SpeculationController(built.max_drafts, built.decode_times, certain=has_head)
    facts = built.model, built.max_model_len, built.vocab_size, built.size
    return BuiltEngine(loop, *facts, built.transfers, built.ranks, offload, built.gpus, built.scheduler)


def with_prefix_seed(options: EngineOptions) -> EngineOptions:
    """Digests of pages in files must mean the same after a restart. Raises ValueError for an unusable folder."""
    folder, peers = options.cache.kv_offload_dir, options.peers
    if folder is None or peers.prefix_seed:
        return options
    return replace(options, peers=replace(peers, prefix_seed=seed_of(Path(folder))))


def _offload(loop: EngineLoop, store: PageStore, options: EngineOptions) -> Offload:
    """Raises ValueError for a limit of the disk that no file fits."""

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    tokens, disk_bytes = options.scheduler.max_num_batched_tokens, options.cache.kv_offload_disk_bytes
    return Offload(loop, store, step_tokens=tokens, disk_bytes=disk_bytes, report=report)
