"""The executor that the options name, ready to run, and what its user must know of it. Imports torch only if needed."""

import sys
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from oscine.config import EngineOptions
from oscine.executor.fake import FakeExecutor, Script
from oscine.executor.kv.page_layout import MemoryKind, RankMemory, Region, layouts_of
from oscine.executor.masks import TOKENIZER, GrammarCache
from oscine.executor.start.stopwatch import Stopwatch
from oscine.model.config import LayerType, ModelConfig
from oscine.model.hub import find_folder, find_tokenizer
from oscine.types import Executor

if TYPE_CHECKING:  # they need torch and NIXL
    from oscine.executor.kv.nixl_transfer import KVTransfer
    from oscine.executor.runner import TorchExecutor

_FAKE_TOKENS_PER_SEQUENCE = 4096
# The first 1,024 tokens of a prompt, or 35 tokens after 100,000 others: some seconds on one slow core.
_CPU_ATTENDED = 1 << 23


@dataclass(frozen=True, slots=True)
class BuiltExecutor:
    executor: Executor
    model: str  # as loaded
    vocab_size: int
    max_model_len: int  # tokens
    sliding_window: int  # tokens
    num_full_pages: int
    num_sliding_pages: int
    max_attended: int | None = None  # query-key pairs that the prompts of one step may have; None: no limit
    transfer: "KVTransfer | None" = None  # where the options want pages to move between engines


def build_executor(options: EngineOptions) -> BuiltExecutor:
    """Loads the model (its memory plan and progress go to stderr, unless quiet).

    Raises ValueError for whatever the user can mend: an unknown model, a broken file, memory that does not suffice.
    """
    return _build_fake(options) if options.executor == "fake" else _build_torch(options)


def _build_torch(options: EngineOptions) -> BuiltExecutor:
    watch = Stopwatch()
    from oscine.executor.start.load import load_executor
    from oscine.executor.threaded import ThreadedExecutor

    def report(text: str) -> None:
        if not options.quiet:
            print(text, file=sys.stderr, flush=True)

    watch.lap("import")
    executor = load_executor(options, report, watch)
    report(str(watch))
    plan, config = executor.memory, executor.config
    threaded = options.scheduler.overlap and executor.device.type == "cpu"  # a GPU runs beside the host anyway
    return BuiltExecutor(
        executor=ThreadedExecutor(executor) if threaded else executor,
        model=options.model.random_weights or options.model.model,
        vocab_size=config.vocab_size,
        max_model_len=plan.max_model_len,
        sliding_window=config.sliding_window,
        num_full_pages=plan.num_full_pages,
        num_sliding_pages=plan.num_sliding_pages,
        max_attended=_CPU_ATTENDED if executor.device.type == "cpu" else None,
        transfer=_kv_transfer(options, executor) if options.peers.kv_transfer else None,
    )


def _kv_transfer(options: EngineOptions, executor: "TorchExecutor") -> "KVTransfer":
    from oscine.executor.kv.nixl_transfer import KVTransfer
    from oscine.model.checkpoint import fingerprint

    kv, model = executor.kv, options.model
    dtype = str(kv.full.dtype).removeprefix("torch.")
    weights = "" if model.random_weights else fingerprint(find_folder(model))
    name = model.random_weights or model.model
    full, sliding = layouts_of(name, weights, executor.config, executor.memory.page_size, dtype, kv.full.element_size())
    kind: MemoryKind = "VRAM" if executor.device.type == "cuda" else "DRAM"
    regions = (Region(tensor.data_ptr(), len(tensor)) for tensor in (kv.full, kv.sliding))
    memory = RankMemory(b"", kind, executor.device.index or 0, *regions)
    return KVTransfer(full, sliding, memory, local=options.peers.is_local)


def _build_fake(options: EngineOptions) -> BuiltExecutor:
    """Pages are only numbers here: as many as the sequences that run at once could need."""
    if options.model.random_weights is not None:
        raise ValueError("--executor fake needs a tokenizer, and --random-weights has none")
    folder, tokenizer = find_folder(options.model), find_tokenizer(options.model)
    config = ModelConfig.from_file(folder / "config.json")
    max_model_len = options.model.max_model_len or config.max_position_embeddings
    per_sequence = ceil(min(max_model_len, _FAKE_TOKENS_PER_SEQUENCE) / options.cache.page_size)
    num_pages = max(options.scheduler.max_num_seqs * per_sequence, ceil(max_model_len / options.cache.page_size))
    return BuiltExecutor(
        executor=FakeExecutor(
            Script.from_folder(tokenizer), options.fake_step_s, GrammarCache(tokenizer / TOKENIZER, config.vocab_size)
        ),
        model=options.model.model,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        sliding_window=config.sliding_window,
        num_full_pages=num_pages,
        num_sliding_pages=num_pages,
        transfer=_fake_transfer(options, config, num_pages) if options.peers.kv_transfer else None,
    )


def _fake_transfer(options: EngineOptions, config: ModelConfig, num_pages: int) -> "KVTransfer":
    """Moves pages that nobody reads: one byte for a key, and one for a value."""
    from oscine.executor.kv.nixl_transfer import KVTransfer

    layers: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
    small = replace(config, num_hidden_layers=2, layer_types=layers, num_key_value_heads=1, head_dim=2)
    full, sliding = layouts_of(options.model.model, "", small, options.cache.page_size, "uint8", 1)
    memory = [np.zeros(num_pages * layout.rank_bytes, np.uint8) for layout in (full, sliding)]
    regions = (Region(pages.ctypes.data, num_pages) for pages in memory)
    return KVTransfer(full, sliding, RankMemory(b"", "DRAM", 0, *regions), owner=memory, local=options.peers.is_local)
