"""The executor that the options name, ready to run, and what its user must know of it. Imports torch only if needed."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscine.checkpoint.hub import check_ranks, config_at, find_model, find_tokenizer
from oscine.executor.fake import FakeExecutor, Script
from oscine.executor.kv.fake_memory import FakePages
from oscine.executor.sampling.masks import TOKENIZER, GrammarCache
from oscine.executor.start.parts import (
    FAKE_SLEEPER,
    FAKE_STORE,
    FAKE_TRANSFERS,
    LOAD_RANKS,
    RANK_PROCESSES,
    STORE,
    TRANSFERS,
    check_parts,
)
from oscine.executor.start.stopwatch import Stopwatch
from oscine.kv_group import KVGroup, Slots, apart
from oscine.settings.config import EngineOptions
from oscine.settings.devices import devices_of
from oscine.system.environment import Environment
from oscine.system.extensions import part
from oscine.timing.kinds import NO_GRAPHS, GraphSizes
from oscine.timing.read import read_table
from oscine.types import DecodeTimes, EngineInfo, Executor, RankHandle

if TYPE_CHECKING:  # they need torch
    from oscine.executor.sleeper import Sleeper
    from oscine.executor.start.load import Loaded
    from oscine.executor.threaded import ThreadedExecutor

_FAKE_TOKENS_PER_SEQUENCE = 4096
# The first 1,024 tokens of a prompt, or 35 tokens after 100,000 others: some seconds on one slow core.
_CPU_ATTENDED = 1 << 23


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    executor: Executor
    info: EngineInfo
    groups: Sequence[KVGroup]
    slots: Sequence[Slots]  # the memory of the groups
    max_attended: int | None = None  # query-key pairs that the prompts of one step may have; None: no limit
    transfers: Any = None  # of the extension disaggregation, where the options want pages to move between engines
    ranks: Any = None  # of the extension parallel, where the model has several ranks
    # With other engines, whose experts compute the tokens of this one too: the extension's lockstep, and what runs a
    # step without sequences if one is awaited.
    expert_peers: tuple[Any, Callable[[], None]] | None = None
    store: Any = None  # of the extension offload: of pages that the cache evicts, where the options want them kept
    max_drafts: int = 0  # per sequence and step; 0: it has no drafter
    decode_times: Mapping[int, DecodeTimes] | None = None  # by number of sequences; None if not measured
    graphs: GraphSizes = NO_GRAPHS
    kv: Any = None  # the pages of each group on this device, as tensors
    sleeper: "Sleeper | None" = None  # frees the memory while the engine sleeps, where the options want it


def build_executor(options: EngineOptions, handle: RankHandle | None = None) -> BuiltExecutor:
    """Loads the model (its memory plan and progress go to stderr, unless quiet). `handle`: as of load_executor.

    Raises ValueError for what the user can mend: an unknown model, a broken file, memory that does not suffice.
    """
    check_parts(options)
    return _build_fake(options) if options.executor == "fake" else _build_torch(options, handle)


def _build_torch(options: EngineOptions, handle: RankHandle | None) -> BuiltExecutor:
    watch = Stopwatch()
    check_ranks(options.model)
    devices = _devices(options)
    ranks = None if len(devices) == 1 else part(RANK_PROCESSES)(len(devices))
    try:
        return _load_torch(options, devices, ranks, watch, handle)
    except BaseException:
        if ranks is not None:
            with closing(ranks):
                ranks.check()  # what another rank failed with is the cause
        raise


def _devices(options: EngineOptions) -> list[str]:
    """One for each rank."""
    model = options.model
    if model.tensor_parallel_size == 1:
        return [model.device]
    return devices_of(model.device, 1, model.tensor_parallel_size, Environment().num_gpus)[0]


def _load_torch(
    options: EngineOptions,
    devices: list[str],
    ranks: Any,
    watch: Stopwatch,
    handle: RankHandle | None,
) -> BuiltExecutor:
    from oscine.executor.start.load import load_executor
    from oscine.executor.start.torch_process import use_threads
    from oscine.executor.threaded import ThreadedExecutor
    from oscine.model.tensors import size_of

    def report(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    use_threads(options.num_threads)
    watch.lap("import")
    steps: Executor
    if ranks is None:
        loaded = load_executor(options, report, watch, handle=handle)
        steps = loaded.executor
    else:
        loaded, steps = part(LOAD_RANKS)(options, devices, ranks, report, watch)
    report(str(watch))
    executor = loaded.executor
    plan, config = executor.memory, executor.config
    threaded = options.scheduler.overlap and executor.device.type == "cpu"  # a GPU runs beside the host anyway
    runner = ThreadedExecutor(steps) if threaded else None
    return BuiltExecutor(
        executor=runner or steps,
        info=EngineInfo(
            model=options.model.random_weights or options.model.model,
            max_model_len=plan.max_model_len,
            vocab_size=config.vocab_size,
            page_size=plan.page_size,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.max_num_batched_tokens,
            size=size_of(config, on_gpu=executor.device.type == "cuda"),
            gpus=_uuids([str(executor.device)] if ranks is None else devices),
        ),
        groups=plan.groups,
        slots=plan.slots,
        max_attended=_CPU_ATTENDED if executor.device.type == "cpu" else None,
        transfers=part(TRANSFERS)(options, executor, ranks) if options.peers.kv_transfer else None,
        ranks=ranks,
        expert_peers=_expert_peers(loaded, runner),
        store=part(STORE)(options, executor) if options.cache.kv_offload_bytes else None,
        max_drafts=executor.max_drafts,
        decode_times=loaded.decode_times,
        graphs=executor.graphs.sizes,
        kv=executor.kv,
        sleeper=loaded.sleeper,
    )


def _uuids(devices: Sequence[str]) -> tuple[str, ...]:
    """Of the GPUs among these devices of torch, as NVML knows them."""
    import torch

    gpus = [device for device in devices if device.startswith("cuda")]
    return tuple(f"GPU-{torch.cuda.get_device_properties(gpu).uuid}" for gpu in gpus)


def _expert_peers(loaded: "Loaded", runner: "ThreadedExecutor | None") -> tuple[Any, Callable[[], None]] | None:
    """`runner`: the thread in which the executor runs, if it has one."""
    if not loaded.lockstep.shares_experts:
        return None
    take_part = loaded.executor.take_part
    return loaded.lockstep, take_part if runner is None else partial(runner.call, take_part)


def _build_fake(options: EngineOptions) -> BuiltExecutor:
    """Without offloading, pages are only numbers. Unless their memory is given, there are as many as the sequences
    that run at once could need."""
    if options.model.random_weights is not None:
        raise ValueError("--executor fake needs a tokenizer, and --random-weights has none")
    for option, is_given in (
        (f"--kv-cache-dtype {options.cache.kv_cache_dtype}", options.cache.kv_cache_dtype != "auto"),
        (f"--activation-dtype {options.model.activation_dtype}", options.model.activation_dtype != "auto"),
        (f"--experts-on-host {options.model.experts_on_host}", options.model.experts_on_host is not None),
        (f"--speculative-config {options.speculation.method}", options.speculation.is_on),
    ):
        if is_given:
            raise ValueError(f"{option} needs a model: --executor fake has none")
    config, tokenizer = config_at(find_model(options.model)), find_tokenizer(options.model)
    groups = config.kv_groups(options.cache.page_size, "uint8")
    max_model_len = options.model.max_model_len or config.max_position_embeddings
    num_pages = [_fake_pages(options, groups, max_model_len)] * len(groups)
    pages = FakePages(groups, num_pages) if options.cache.kv_offload_bytes else None
    grammars = GrammarCache(tokenizer / TOKENIZER, config.vocab_size)
    table = None if options.fake_steps is None else read_table(Path(options.fake_steps), scaled=True)
    script = Script.from_folder(tokenizer)
    return BuiltExecutor(
        executor=FakeExecutor(script, options.fake_step_s, grammars, options.fake_token_s, pages, table),
        info=EngineInfo(
            model=options.model.model,
            max_model_len=max_model_len,
            vocab_size=config.vocab_size,
            page_size=options.cache.page_size,
            max_num_seqs=options.scheduler.max_num_seqs,
            max_num_batched_tokens=options.scheduler.max_num_batched_tokens,
        ),
        groups=groups,
        slots=apart(num_pages),
        transfers=part(FAKE_TRANSFERS)(options, config, groups, num_pages[0]) if options.peers.kv_transfer else None,
        store=None if pages is None else part(FAKE_STORE)(options, groups, pages),
        sleeper=part(FAKE_SLEEPER)(options) if options.sleep_mode else None,
    )


def _fake_pages(options: EngineOptions, groups: Sequence[KVGroup], max_model_len: int) -> int:
    """Of each group."""
    page_size, most = options.cache.page_size, ceil(max_model_len / options.cache.page_size)
    if options.cache.kv_offload_bytes and options.cache.kv_cache_bytes is not None:
        return options.cache.kv_cache_bytes // sum(group.page_bytes for group in groups)
    per_sequence = ceil(min(max_model_len, _FAKE_TOKENS_PER_SEQUENCE) / page_size)
    return max(options.scheduler.max_num_seqs * per_sequence, most)
