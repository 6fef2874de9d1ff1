"""How many pages each group of the KV cache gets, how long a sequence may be, and what that takes in bytes.

Arithmetic only: nothing is allocated here, and torch is not needed to read the plan.

A full page is held as long as its sequence. A sliding page is soon free again: a running sequence needs the pages that
its window touches and the one it grows into, and a chunk of a prompt its own until it is computed. So the sliding
group gets that for every sequence, once more the windows for cached prefixes, and never more pages than
the full group; the full group gets the rest.
"""

from dataclasses import dataclass
from math import ceil

from oscine.config import CacheOptions, EngineOptions
from oscine.model.config import ModelConfig

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a replica will hold, in bytes, and what fits its KV cache."""

    weights: int
    kv_full: int
    kv_sliding: int
    workspace: int  # an estimate: activations and logits of the largest step
    num_full_pages: int
    num_sliding_pages: int
    page_size: int  # tokens
    max_model_len: int  # tokens
    model_limit: int  # tokens that the model itself can take

    @property
    def total(self) -> int:
        return self.weights + self.kv_full + self.kv_sliding + self.workspace

    def __str__(self) -> str:
        size = self.page_size
        lines = [
            f"  weights     {_gib(self.weights)}",
            f"  KV full     {_gib(self.kv_full)}  {self.num_full_pages} pages of {size} tokens",
            f"  KV sliding  {_gib(self.kv_sliding)}  {self.num_sliding_pages} pages of {size} tokens",
            f"  workspace   {_gib(self.workspace)}  estimated",
            f"  total       {_gib(self.total)}",
            f"  context     {self.max_model_len} tokens{self._limit_note()}",
        ]
        return "\n".join(("memory plan", *lines))

    def _limit_note(self) -> str:
        if self.max_model_len == self.model_limit:
            return ""
        return f" (the model's own limit is {self.model_limit}; more of it needs --max-model-len and --kv-cache-bytes)"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of one page of each group."""

    full: int
    sliding: int


def page_bytes(config: ModelConfig, page_size: int, element_bytes: int) -> PageBytes:
    """Keys and values of page_size tokens in all layers of a group."""
    layer = 2 * config.num_key_value_heads * page_size * config.head_dim * element_bytes
    return PageBytes(config.num_full_layers * layer, config.num_sliding_layers * layer)


def plan_memory(config: ModelConfig, options: EngineOptions, weights: int, element_bytes: int) -> MemoryPlan:
    """`weights` in bytes; `element_bytes` of one activation or KV element.

    Raises ValueError, with the arithmetic, when not even one sequence of the length asked for fits.
    """
    cache, page = options.cache, page_bytes(config, options.cache.page_size, element_bytes)
    if not (page.full and page.sliding):
        raise ValueError("layer_types must hold both sliding_attention and full_attention layers")
    asked = options.model.max_model_len
    if asked is not None and asked > config.max_position_embeddings:
        raise ValueError(f"--max-model-len {asked} is above the model's own {config.max_position_embeddings}")
    num_full, num_sliding = _share(config, options, page)
    needed = ceil((asked or 1) / cache.page_size)
    if num_full < needed:
        num_full, num_sliding = needed, (cache.kv_cache_bytes - needed * page.full) // page.sliding
    window_pages = pages_of_window(config, cache.page_size) + 1
    if num_sliding < window_pages:
        raise ValueError(_does_not_fit(cache, page, needed, window_pages))
    return MemoryPlan(
        weights=weights,
        kv_full=num_full * page.full,
        kv_sliding=num_sliding * page.sliding,
        workspace=workspace_bytes(config, options, element_bytes),
        num_full_pages=num_full,
        num_sliding_pages=num_sliding,
        page_size=cache.page_size,
        max_model_len=asked or min(config.max_position_embeddings, num_full * cache.page_size),
        model_limit=config.max_position_embeddings,
    )


def pages_of_window(config: ModelConfig, page_size: int) -> int:
    """The most pages that the window of one token touches."""
    return ceil((config.sliding_window - 1) / page_size) + 1


def workspace_bytes(config: ModelConfig, options: EngineOptions, element_bytes: int) -> int:
    """Logits twice in float32, the widest activations of a full step, and the rotary table."""
    rows, tokens = options.scheduler.max_num_seqs, options.scheduler.max_num_batched_tokens
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    routed = config.num_experts_per_tok * 3 * config.intermediate_size
    logits = 2 * 4 * rows * config.vocab_size
    activations = tokens * (4 * config.hidden_size + 2 * heads + routed) * element_bytes
    return logits + activations + 4 * config.max_position_embeddings * config.head_dim


def _share(config: ModelConfig, options: EngineOptions, page: PageBytes) -> tuple[int, int]:
    """Pages of the full and of the sliding group."""
    size, scheduler = options.cache.page_size, options.scheduler
    of_window = pages_of_window(config, size)
    running = scheduler.max_num_seqs * (of_window + 1) + ceil(scheduler.max_num_batched_tokens / size)
    cached = scheduler.max_num_seqs * of_window if options.cache.prefix_caching else 0
    num_sliding = min(running + cached, options.cache.kv_cache_bytes // (page.full + page.sliding))
    return (options.cache.kv_cache_bytes - num_sliding * page.sliding) // page.full, num_sliding


def _does_not_fit(cache: CacheOptions, page: PageBytes, full: int, sliding: int) -> str:
    total = full * page.full + sliding * page.sliding
    return (
        f"one sequence of {full * cache.page_size} tokens needs {full} full pages x {page.full} bytes + {sliding} "
        f"sliding pages x {page.sliding} bytes = {total} bytes; --kv-cache-bytes is {cache.kv_cache_bytes}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:9.3f} GiB"
