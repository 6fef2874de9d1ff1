"""How many pages each group of the KV cache gets, how long a sequence may be, and what that takes in bytes.

Arithmetic only: nothing is allocated here, and torch is not needed to read the plan.

A full page is held as long as its sequence. A sliding page is soon free again: a running sequence needs the pages that
its window touches and the one it grows into, and a chunk of a prompt its own until it is computed. So the sliding
group gets that for every sequence (where those are few, for two chunks in flight), once more the windows for cached
prefixes, and never more pages than the full group; the full group gets the rest.

On a GPU the cache is what weights and workspace leave of --gpu-memory-utilization.
"""

from dataclasses import dataclass
from math import ceil

from oscine.config import EngineOptions
from oscine.model.config import ModelConfig

_GIB = 1 << 30
_CPU_CACHE_BYTES = 1 * _GIB
_MOST_CACHED_WINDOWS = 256  # of prefixes; with more sequences than that, memory goes to those that run
SAMPLED_AT_ONCE = 128  # rows that are sampled beyond greedy in one call
# Per row and token of the vocabulary while a row is sampled. In plain torch: sorted logits, noise, masks; by kernels:
# histories gathered for penalties, the logits after them and after a grammar's mask, log-probabilities.
_SAMPLING_BYTES, _SAMPLING_BYTES_ON_GPU = 56, 20
_GPU_RESERVE_BYTES = 3 * _GIB // 2  # context, compiled kernels, captured graphs, fragmentation


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, before anything of the model is on it."""

    total: int
    free: int


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
        return f" (the model's own limit is {self.model_limit})"


@dataclass(frozen=True, slots=True)
class PageBytes:
    """Bytes of one page of each group."""

    full: int
    sliding: int


def page_bytes(config: ModelConfig, page_size: int, element_bytes: int) -> PageBytes:
    """Keys and values of page_size tokens in all layers of a group."""
    layer = 2 * config.num_key_value_heads * page_size * config.head_dim * element_bytes
    return PageBytes(config.num_full_layers * layer, config.num_sliding_layers * layer)


def plan_memory(
    config: ModelConfig,
    options: EngineOptions,
    weights: int,
    element_bytes: int,
    gpu: DeviceMemory | None = None,
    host_bytes: int | None = None,
) -> MemoryPlan:
    """`weights`: bytes. `element_bytes`: size of one activation or KV element. `gpu`: None on a CPU.

    `host_bytes`: the memory that a model on a CPU may take, if known. Raises ValueError, with the arithmetic, if one
    sequence of the length asked for does not fit, or if the whole does not fit the memory.
    """
    page_size, page = options.cache.page_size, page_bytes(config, options.cache.page_size, element_bytes)
    if not (page.full and page.sliding):
        raise ValueError("layer_types must hold both sliding_attention and full_attention layers")
    asked = options.model.max_model_len
    if asked is not None and asked > config.max_position_embeddings:
        raise ValueError(f"--max-model-len {asked} is above the model's own {config.max_position_embeddings}")
    workspace = workspace_bytes(config, options, element_bytes, gpu is not None)
    cache_bytes = _cache_bytes(options, weights, workspace, gpu)
    num_full, num_sliding = _share(config, options, page, cache_bytes)
    needed = ceil((asked or 1) / page_size)
    if num_full < needed:
        num_full, num_sliding = needed, (cache_bytes - needed * page.full) // page.sliding
    window_pages = pages_of_window(config, page_size) + 1
    if num_sliding < window_pages:
        raise ValueError(_does_not_fit(options, page, needed, window_pages, cache_bytes))
    plan = MemoryPlan(
        weights=weights,
        kv_full=num_full * page.full,
        kv_sliding=num_sliding * page.sliding,
        workspace=workspace,
        num_full_pages=num_full,
        num_sliding_pages=num_sliding,
        page_size=page_size,
        max_model_len=asked or min(config.max_position_embeddings, num_full * page_size),
        model_limit=config.max_position_embeddings,
    )
    if gpu is None and host_bytes is not None and plan.total > host_bytes:
        raise ValueError(_no_host_memory(plan, host_bytes))
    return plan


def _cache_bytes(options: EngineOptions, weights: int, workspace: int, gpu: DeviceMemory | None) -> int:
    """Bytes of both page groups: as asked for, or what there is."""
    asked = options.cache.kv_cache_bytes
    if gpu is None:
        return _CPU_CACHE_BYTES if asked is None else asked
    share, of_free = options.cache.gpu_memory_utilization, options.cache.kv_cache_free_gpu_memory_fraction
    ours = min(int(share * gpu.total), gpu.free) if of_free is None else gpu.free
    left = ours - weights - workspace
    if left < (asked or 1):
        raise ValueError(_no_room(options, weights, workspace, ours, gpu))
    if asked is not None:
        return asked
    return left if of_free is None else int(of_free * left)


def pages_of_window(config: ModelConfig, page_size: int) -> int:
    """The most pages that the window of one token touches."""
    return ceil((config.sliding_window - 1) / page_size) + 1


def workspace_bytes(config: ModelConfig, options: EngineOptions, element_bytes: int, on_gpu: bool = False) -> int:
    """What the largest step holds besides weights and cache. An upper bound of:

    logits       [max_num_seqs, V] float32, once in a graph's memory and once outside
    sampling     of at most SAMPLED_AT_ONCE rows of them; log-probabilities of prompts take less, in pieces
    activations  per token: x, normed x, residual and output; q, k, v and heads; per routed copy, on a GPU sorted
                 input (H), h (I) and output (H), else input, gate_up (2 I), h and the output in float32 (2 H)
    rotary table [max positions, D] float32
    """
    rows, tokens = options.scheduler.max_num_seqs, options.scheduler.max_num_batched_tokens
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    copy = (2, 1) if on_gpu else (3, 3)  # H, I
    routed = config.num_experts_per_tok * (copy[0] * config.hidden_size + copy[1] * config.intermediate_size)
    logits = 2 * 4 * rows * config.vocab_size
    sampling = (_SAMPLING_BYTES_ON_GPU if on_gpu else _SAMPLING_BYTES) * min(rows, SAMPLED_AT_ONCE) * config.vocab_size
    activations = tokens * (4 * config.hidden_size + 2 * heads + routed) * element_bytes
    rotary = 4 * config.max_position_embeddings * config.head_dim
    return logits + sampling + activations + rotary + (_GPU_RESERVE_BYTES if on_gpu else 0)


def _share(config: ModelConfig, options: EngineOptions, page: PageBytes, cache_bytes: int) -> tuple[int, int]:
    """Pages of the full and of the sliding group."""
    size, scheduler = options.cache.page_size, options.scheduler
    of_window = pages_of_window(config, size)
    chunk = ceil(scheduler.max_num_batched_tokens / size)
    # A second chunk of the same prompt may be launched before the pages of the first are free.
    running = max(scheduler.max_num_seqs * (of_window + 1) + chunk, of_window + 1 + 2 * chunk)
    cached = min(scheduler.max_num_seqs, _MOST_CACHED_WINDOWS) * of_window if options.cache.prefix_caching else 0
    num_sliding = min(running + cached, cache_bytes // (page.full + page.sliding))
    return (cache_bytes - num_sliding * page.sliding) // page.full, num_sliding


def _no_room(options: EngineOptions, weights: int, workspace: int, ours: int, gpu: DeviceMemory) -> str:
    asked, share = options.cache.kv_cache_bytes, options.cache.gpu_memory_utilization
    cache = "any KV cache" if asked is None else f"a KV cache of {asked} bytes"
    limit = f"of {gpu.total} bytes, {gpu.free} are free"
    if options.cache.kv_cache_free_gpu_memory_fraction is None:
        limit += f", and --gpu-memory-utilization {share} allows {int(share * gpu.total)}"
    return (
        f"weights of {weights} bytes + workspace of {workspace} bytes + {cache} do not fit {ours} bytes of the GPU: "
        f"{limit}; the workspace shrinks with --max-num-seqs and --max-num-batched-tokens"
    )


def _no_host_memory(plan: MemoryPlan, host_bytes: int) -> str:
    gib = [f"{part / _GIB:.1f} GiB" for part in (plan.weights, plan.kv_full + plan.kv_sliding, plan.workspace)]
    return (
        f"weights of {gib[0]} + KV cache of {gib[1]} + workspace of {gib[2]} = {plan.total / _GIB:.1f} GiB do not fit "
        f"the memory: {host_bytes / _GIB:.1f} GiB are free; the KV cache shrinks with --kv-cache-bytes, the workspace "
        f"with --max-num-seqs and --max-num-batched-tokens"
    )


def _does_not_fit(options: EngineOptions, page: PageBytes, full: int, sliding: int, cache_bytes: int) -> str:
    total = full * page.full + sliding * page.sliding
    given = "--kv-cache-bytes is" if options.cache.kv_cache_bytes else "the KV cache has"
    return (
        f"one sequence of {full * options.cache.page_size} tokens needs {full} full pages x {page.full} bytes + "
        f"{sliding} sliding pages x {page.sliding} bytes = {total} bytes; {given} {cache_bytes}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:9.3f} GiB"
