"""From options to an engine that runs in this process: evaluation and benchmarks use it directly, no socket needed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oscine.engine.core.extension import KVPublisher, MakeExtension
from oscine.engine.core.loop import EngineLoop
from oscine.executor.start.build import BuiltExecutor, build_executor
from oscine.settings.config import EngineOptions
from oscine.system.extensions import Place, load, part
from oscine.types import EngineInfo, RankHandle

# Extensions of the loop, in the order in which they admit requests: a function of the built executor and the options.
OFFLOAD = "oscine.extensions.offload.manager:of_engine"
REMOTE_PREFILLS = "oscine.extensions.disaggregation.remote_prefill:of_engine"
SPECULATION = "oscine.extensions.speculation.policy:of_engine"
EXPERT_PARALLEL_PEERS = "oscine.extensions.parallel.expert_peers:of_engine"
SEED_OF_FOLDER = Place("--kv-offload-dir", "oscine.extensions.offload.page_files:seed_of")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    loop: EngineLoop
    info: EngineInfo
    transfers: Any = None  # of the extension disaggregation, where the options want pages to move between engines
    ranks: Any = None  # of the extension parallel, where the model has several ranks
    sleeper: Any = None  # of the extension models, where the options want it: an oscine.executor.sleeper.Sleeper

    def sleep(self) -> None:
        """Frees memory. The loop has no work, and forgets what it has cached; it must get none until `wake`."""
        self.loop.cache.clear()
        self.sleeper.sleep()

    def wake(self) -> None:
        """Raises MemoryError if there is too little memory; then the engine sleeps on."""
        self.sleeper.wake()

    def announce(self, events: KVPublisher) -> None:
        """Reports page events to `events` from now on, and lets extensions report the pages that they have."""
        self.loop.cache.index.events = events
        for extension in self.loop.extensions:
            extension.announce()

    def flush(self, limit_s: float) -> None:
        """The engine ends: saves what it would lose, for so long at most."""
        for extension in self.loop.extensions:
            extension.flush(limit_s)


MakeFromBuilt = Callable[[BuiltExecutor, EngineOptions], MakeExtension]


def build_engine(
    options: EngineOptions, handle: RankHandle | None = None, *, speculation: MakeFromBuilt | None = None
) -> BuiltEngine:
    """Loads the model and puts a loop over it. `speculation`: another policy of drafts, where the options want drafts.

    Raises ValueError as build_executor does.
    """
    options = with_prefix_seed(options)
    built = build_executor(options, handle)
    seqs, tokens = built.info.max_num_seqs, built.info.max_num_batched_tokens
    scheduler = replace(options.scheduler, by_memory=(), max_num_seqs=seqs, max_num_batched_tokens=tokens)
    options = replace(options, scheduler=scheduler)
    loop = EngineLoop(
        built.executor,
        options,
        groups=built.groups,
        memory=built.slots,
        max_model_len=built.info.max_model_len,
        max_attended=built.max_attended,
        extensions=[*_extensions(built, options, speculation)],
    )
    return BuiltEngine(loop, built.info, built.transfers, built.ranks, built.sleeper)


def _extensions(
    built: BuiltExecutor, options: EngineOptions, speculation: MakeFromBuilt | None
) -> Iterator[MakeExtension]:
    if built.store is not None:
        yield load(OFFLOAD)(built, options)
    if built.transfers is not None:
        yield load(REMOTE_PREFILLS)(built, options)
    if built.max_drafts:
        yield (speculation or load(SPECULATION))(built, options)
    if built.expert_peers is not None:
        yield load(EXPERT_PARALLEL_PEERS)(built, options)


def with_prefix_seed(options: EngineOptions) -> EngineOptions:
    """Digests of pages in files must mean the same after a restart. Raises ValueError for an unusable folder."""
    folder, peers = options.cache.kv_offload_dir, options.peers
    if folder is None or peers.prefix_seed:
        return options
    return replace(options, peers=replace(peers, prefix_seed=part(SEED_OF_FOLDER)(Path(folder))))
