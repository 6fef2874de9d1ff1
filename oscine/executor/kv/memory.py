"""How many pages each group of the KV cache gets, how long a sequence may be, and what that takes in bytes.

Arithmetic only: nothing is allocated here, and torch is not needed to read the plan.

All groups share the memory of the cache, in slots of equal size: the load decides which group has how many pages (see
oscine/engine/core/page_pool.py and decision 36). A page of full attention is held as long as its sequence. A page of a
group with a window is soon free again.

On a GPU the cache is what weights and workspace leave of --gpu-memory-utilization, or of --gpu-memory-bytes. By default
an engine that is alone on its GPU leaves a margin free. Beside other processes it leaves _LEFT_FREE, or less on a small
GPU: what they need does not grow with the GPU. Memory that GPU and CPU share has the least share, as it holds
everything else too.
The workspace is an estimate. By it the number of sequences is chosen, and it is checked that everything fits. The cache
itself gets what is really left once the largest step has run (oscine/executor/kv/late_cache.py).

The embedding and experts may stay in host memory (OnHost). Steps of many tokens stream such experts through a buffer on
the GPU, which counts as workspace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from oscine.kv_group import KVGroup, Slots, most_pages, shared, slots_of
from oscine.model.config import ModelConfig
from oscine.ops.linear.bf12_size import bf12_bytes
from oscine.settings.config import CPU_CACHE_BYTES, EngineOptions

_GIB = 1 << 30
# As many sequences may run as the cache holds prompts of this length. Those that grow too long are preempted, which
# costs less than running fewer of them (decision 29).
TYPICAL_TOKENS = 1024
# Tokens of the largest step with prompts that is a CUDA graph. A small GPU is slow, and memory is scarce there.
_GRAPH_TOKENS, _SMALL_GPU_GRAPH_TOKENS = 2048, 256
_DRAFTS = 8  # of a sequence in a step, by default
_DRAFTS_OF_GRAPHS = 5  # the same of an EAGLE-3 head on a GPU, where each number of drafts has CUDA graphs
LOGITS_AT_ONCE = 512  # rows whose logits exist together; a product of that many rows has the speed of a larger one
SAMPLED_AT_ONCE = 128  # rows that are sampled beyond greedy in one call
# Per row and token of the vocabulary while a row is sampled. In plain torch: sorted logits, noise, masks; by kernels:
# histories gathered for penalties, the logits after them and after a grammar's mask, log-probabilities.
_SAMPLING_BYTES, _SAMPLING_BYTES_ON_GPU = 56, 20
# For the CUDA context, compiled kernels, captured graphs and fragmentation. With small steps these take 1.2 GB.
_GPU_RESERVE_BYTES, _SMALL_GPU_RESERVE_BYTES = 3 * _GIB // 2, 5 * _GIB // 4
# Left free beside other processes: for them, and for errors of the estimates.
_LEFT_FREE, _LEAST_SHARE = 5 * _GIB, 0.92
_IN_USE_ALONE = _GIB  # by the system and this process's own CUDA context; more is of other processes
# Left free by an engine that is alone: for fragments of the allocator. 1.2 GiB of 80 GB.
_LEAST_MARGIN, _MARGIN_SHARE = _GIB // 4, 64
_STREAM_BUFFERS = 64 << 20  # of streamed experts, in addition to a buffer for the experts of one layer
_USUAL_TOKENS = 32768  # context that --experts-on-host auto makes room for, without --max-model-len
_PROJECTIONS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight")
SECOND_FORM_SHARE = 0.03  # of what the other weights leave, at most for the projections in 12 bits
# With a GPU of up to this size, and where it makes room for sequences, the embedding stays in host memory. A step reads
# one row per token from there.
_SMALL_GPU = 24 * _GIB


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU, before anything of the model is on it."""

    total: int
    free: int
    capped: bool = False  # by --gpu-memory-bytes, to `total`
    unified: bool = False  # GPU and CPU share one memory, so offloading saves nothing

    @property
    def is_small(self) -> bool:
        return self.total <= _SMALL_GPU

    @property
    def is_alone(self) -> bool:
        """Whether no other process uses the GPU."""
        return self.capped or (not self.unified and self.total - self.free <= _IN_USE_ALONE)

    @property
    def margin(self) -> int:
        """Bytes that stay free in any case."""
        return max(_LEAST_MARGIN, self.total // _MARGIN_SHARE)

    @property
    def reserve(self) -> int:
        """Bytes that the plan leaves free: see _GPU_RESERVE_BYTES."""
        return _SMALL_GPU_RESERVE_BYTES if self.is_small else _GPU_RESERVE_BYTES

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest step with prompts that is a CUDA graph."""
        return _SMALL_GPU_GRAPH_TOKENS if self.is_small else _GRAPH_TOKENS

    def allowed(self, options: EngineOptions) -> int:
        """Bytes that the engine may use."""
        if self.capped or options.cache.kv_cache_free_gpu_memory_fraction is not None:
            return self.free - self.margin
        return min(int(self.share(options) * self.total), self.free - self.margin)

    def share(self, options: EngineOptions) -> float:
        """Share of the GPU that the engine may use: --gpu-memory-utilization or its default."""
        asked = options.cache.gpu_memory_utilization
        if asked is not None:
            return asked
        if self.is_alone:
            return 1 - self.margin / self.total
        return _LEAST_SHARE if self.unified else max(_LEAST_SHARE, round(1 - _LEFT_FREE / self.total, 3))


@dataclass(frozen=True, slots=True)
class OnHost:
    """Weights that stay in host memory: the embedding, and the experts of the last layers. Sizes are in bytes."""

    embedding: int = 0
    num_layers: int = 0
    experts: int = 0  # all experts of these layers
    workspace: int = 0  # buffers on the GPU, for steps that stream these experts

    @property
    def total(self) -> int:
        return self.embedding + self.experts

    def __str__(self) -> str:
        experts = f"experts of {self.num_layers} layers" if self.num_layers else ""
        return " and ".join(filter(None, ("embedding" if self.embedding else "", experts)))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of a replica in bytes, and the number of tokens and pages that fit."""

    weights: int
    workspace: int  # an estimate: activations and logits of the largest step
    groups: Sequence[KVGroup]
    slots: Sequence[Slots]  # the memory of the groups
    max_model_len: int  # tokens
    model_limit: int  # tokens that the model itself can take
    on_host: OnHost = OnHost()
    second_form: int = 0  # of the weights: the projections of attention in 12 bits
    offload: int = 0  # of host memory, for evicted pages
    max_num_seqs: int = 0  # sequences that run at once, for which workspace and pages are planned
    max_num_batched_tokens: int = 0  # tokens of a step, likewise

    @property
    def total(self) -> int:
        return self.weights + self.kv_bytes + self.workspace

    @property
    def kv_bytes(self) -> int:
        return sum(slots.count * slots.slot_bytes for slots in self.slots)

    @property
    def num_pages(self) -> list[int]:
        """The most pages that each group can have."""
        found = {group: s.count * each for s in self.slots for group, each in zip(s.groups, s.per_slot, strict=True)}
        return [found[group] for group in range(len(found))]

    @property
    def page_size(self) -> int:
        """Tokens."""
        return self.groups[0].page_size

    def __str__(self) -> str:
        caches = [("KV cache", f"{_gib(s.count * s.slot_bytes)}  {_content(self.groups, s)}") for s in self.slots]
        own = "" if self.max_model_len == self.model_limit else f" (the model's own limit is {self.model_limit})"
        second = f"  with {_gib(self.second_form).strip()} of projections in 12 bits, for steps of up to 32 tokens"
        lines = [
            ("weights", _gib(self.weights) + (second if self.second_form else "")),
            *caches,
            ("workspace", f"{_gib(self.workspace)}  estimated"),
            ("total", _gib(self.total)),
            ("limits", f"{self.max_num_seqs} sequences, {self.max_num_batched_tokens} tokens per step"),
            ("context", f"{self.max_model_len} tokens{own}"),
        ]
        if self.on_host.total:
            lines.append(("host memory", f"{_gib(self.on_host.total)}  {self.on_host}"))
        if self.offload:
            lines.append(("KV offload", f"{_gib(self.offload)}  of host memory"))
        return "\n".join(("memory plan", *(f"  {name:<13} {value}" for name, value in lines)))


def second_form_bytes(
    gpu: DeviceMemory, options: EngineOptions, weights: int, shapes: Mapping[str, Sequence[int]]
) -> int:
    """Bytes of the projections of attention in 12 bits (oscine/ops/linear/hopper_bf12.py), beside bfloat16.

    0 if they would take more than SECOND_FORM_SHARE of the memory for the cache, and so of the sequences. How many may
    run does not matter: at times one runs alone. All ranks decide alike. weights: bytes of all other weights on the
    device. shapes: shapes of all tensors, by name.
    """
    wanted = sum(bf12_bytes(*shape) for name, shape in shapes.items() if name.endswith(_PROJECTIONS))
    left = int(gpu.share(options) * gpu.total) - weights
    return wanted if wanted <= SECOND_FORM_SHARE * left else 0


def plan_memory(
    config: ModelConfig,
    groups: Sequence[KVGroup],
    options: EngineOptions,
    weights: int,
    activation_bytes: int,
    gpu: DeviceMemory | None = None,
    host_bytes: int | None = None,
    on_host: OnHost = OnHost(),
    second_form: int = 0,
) -> MemoryPlan:
    """`weights`: bytes on the device. `activation_bytes`: bytes per element. `gpu`: None on a CPU. `second_form`: the
    part of `weights` that second_form_bytes gives.

    `host_bytes`: available host memory, for a model on a CPU or for offloaded experts, if known. Raises ValueError with
    the arithmetic if one sequence of the length asked for does not fit, or if everything together does not fit.
    """
    asked = options.model.max_model_len
    if asked is not None and asked > config.max_position_embeddings:
        raise ValueError(f"--max-model-len {asked} is above the model's own {config.max_position_embeddings}")
    workspace = workspace_bytes(config, options, activation_bytes, gpu) + on_host.workspace
    if gpu is not None:
        workspace += shared(groups).slot_bytes  # for padding
    slots = _slots(groups, options, _cache_bytes(options, weights, workspace, gpu))
    plan = MemoryPlan(
        weights=weights,
        workspace=workspace,
        groups=groups,
        slots=[slots],
        max_model_len=asked or longest(config, groups, slots),
        model_limit=config.max_position_embeddings,
        on_host=on_host,
        second_form=second_form,
        offload=options.cache.kv_offload_bytes or 0,
        max_num_seqs=options.scheduler.max_num_seqs,
        max_num_batched_tokens=options.scheduler.max_num_batched_tokens,
    )
    if gpu is None and host_bytes is not None and plan.total + plan.offload > host_bytes:
        raise ValueError(_no_host_memory(plan, host_bytes))
    if host_bytes is not None and on_host.total + plan.offload > host_bytes:
        raise ValueError(_no_memory_beside_gpu(plan, host_bytes))
    return plan


def leave_on_host(
    config: ModelConfig,
    groups: Sequence[KVGroup],
    options: EngineOptions,
    weights: "WeightBytes",
    activation_bytes: int,
    gpu: DeviceMemory,
) -> OnHost:
    """The embedding where memory is scarce, and the experts of as many layers as --experts-on-host says.

    Raises ValueError if the model has fewer layers, or if GPU and CPU share one memory.
    """
    asked, layers = options.model.experts_on_host or "0", weights.experts
    if gpu.unified and asked != "0":
        raise ValueError("--experts-on-host gains nothing here: this GPU and the host share one memory")
    scarce = gpu.is_small or _is_crowded(config, groups, options, weights.total, activation_bytes, gpu)
    embedding = weights.embedding if scarce and not gpu.unified else 0
    stream = max(layers) + _STREAM_BUFFERS
    if asked == "auto":
        held = weights.total - embedding + workspace_bytes(config, options, activation_bytes, gpu)
        wanted = _wanted_cache(config, groups, options) + shared(groups).slot_bytes  # for padding
        missing = held + wanted - gpu.allowed(options)
        fitting = (count for count in range(1, len(layers)) if sum(layers[-count:]) >= missing + stream)
        count = next(fitting, len(layers)) if missing > 0 else 0
    else:
        count = int(asked)
        if count > len(layers):
            raise ValueError(f"--experts-on-host {asked} is above the model's number of layers, {len(layers)}")
    return OnHost(embedding, count, sum(layers[-count:]), stream) if count else OnHost(embedding)


def _is_crowded(
    config: ModelConfig,
    groups: Sequence[KVGroup],
    options: EngineOptions,
    weights: int,
    activation_bytes: int,
    gpu: DeviceMemory,
) -> bool:
    """Whether fewer sequences than may run find room beside all weights, with prompts and answers of TYPICAL_TOKENS."""
    if options.cache.kv_cache_bytes is not None:
        return False
    wanted, slots = min(options.scheduler.most_seqs, options.scheduler.max_num_batched_tokens), shared(groups)
    all_of_them = replace(options, scheduler=replace(options.scheduler, max_num_seqs=wanted))
    workspace = workspace_bytes(config, all_of_them, activation_bytes, gpu)
    pages = typical_pages(options, groups, with_answers=True)
    needed = slots_of(groups, slots, wanted, pages, drafts=options.speculation.is_on)
    return gpu.allowed(options) - weights - workspace < needed * slots.slot_bytes


def typical_pages(options: EngineOptions, groups: Sequence[KVGroup], *, with_answers: bool = False) -> int:
    """Pages of full attention of a prompt of TYPICAL_TOKENS, or of the longest one there may be.

    with_answers: and of an answer as long.
    """
    tokens = TYPICAL_TOKENS * (2 if with_answers else 1)
    return ceil(min(options.model.max_model_len or tokens, tokens) / groups[0].page_size)


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of the weights of one rank."""

    total: int
    embedding: int
    experts: Sequence[int]  # per layer, packed

    @classmethod
    def of(cls, tensors: Mapping[str, int], num_layers: int, others: int) -> "WeightBytes":
        """`tensors`: bytes by name. `others`: bytes that backends prepare in addition."""
        experts = [0] * num_layers
        for name, size in tensors.items():
            if name.endswith(("_blocks", "_scales")):
                experts[int(name.split(".")[2])] += size
        return cls(sum(tensors.values()) + others, tensors["model.embed_tokens.weight"], experts)


def _wanted_cache(config: ModelConfig, groups: Sequence[KVGroup], options: EngineOptions) -> int:
    """Bytes that --experts-on-host auto reserves for the KV cache: --kv-cache-bytes, or one sequence of
    --max-model-len, or one of _USUAL_TOKENS."""
    if options.cache.kv_cache_bytes is not None:
        return options.cache.kv_cache_bytes
    tokens = options.model.max_model_len or min(config.max_position_embeddings, _USUAL_TOKENS)
    slots = shared(groups)
    return slots_of(groups, slots, 1, ceil(tokens / groups[0].page_size)) * slots.slot_bytes


def _cache_bytes(options: EngineOptions, weights: int, workspace: int, gpu: DeviceMemory | None) -> int:
    """Bytes of all page groups: --kv-cache-bytes, or the memory that is left."""
    asked = options.cache.kv_cache_bytes
    if gpu is None:
        return CPU_CACHE_BYTES if asked is None else asked
    of_free, ours = options.cache.kv_cache_free_gpu_memory_fraction, gpu.allowed(options)
    left = ours - weights - workspace
    if left < (asked or 1):
        raise ValueError(_no_room(options, weights, workspace, ours, gpu))
    if asked is not None:
        return asked
    return left if of_free is None else int(of_free * left)


def most_drafts(options: EngineOptions, *, on_gpu: bool) -> int:
    """Drafts of a sequence in a step, at most."""
    speculation = options.speculation
    if not speculation.is_on:
        return 0
    has_graphs = speculation.method == "eagle3" and on_gpu
    return speculation.max_drafts or (_DRAFTS_OF_GRAPHS if has_graphs else _DRAFTS)


def workspace_bytes(
    config: ModelConfig, options: EngineOptions, activation_bytes: int, gpu: DeviceMemory | None = None
) -> int:
    """Bytes of the largest step besides weights and cache. An upper bound of:

    logits       [rows, V] float32, at most LOGITS_AT_ONCE rows, once in a graph's memory and once outside; a row for
                 each sequence and each of its drafts
    sampling     of at most SAMPLED_AT_ONCE rows of them; log-probabilities of prompts take less, in pieces
    activations  per token: x, normed x, residual and output; q, k, v and heads; per routed copy, on a GPU sorted
                 input (H), h (I) and output (H), else input, gate_up (2 I), h and the output in float32 (2 H); of the
                 largest step, and in the memory of CUDA graphs, of the largest one
    rotary table [max positions, D] float32
    """
    tokens = options.scheduler.max_num_batched_tokens
    rows = min(options.scheduler.max_num_seqs * (1 + most_drafts(options, on_gpu=gpu is not None)), tokens)
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    copy = (2, 1) if gpu else (3, 3)  # H, I
    routed = config.num_experts_per_tok * (copy[0] * config.hidden_size + copy[1] * config.intermediate_size)
    logits = 2 * 4 * min(rows, LOGITS_AT_ONCE) * config.vocab_size
    sampling = (_SAMPLING_BYTES_ON_GPU if gpu else _SAMPLING_BYTES) * min(rows, SAMPLED_AT_ONCE) * config.vocab_size
    of_graphs = min(tokens, gpu.graph_tokens) if gpu and options.cuda_graphs else 0
    activations = (tokens + of_graphs) * (4 * config.hidden_size + 2 * heads + routed) * activation_bytes
    rotary = 4 * config.max_position_embeddings * config.head_dim
    reserve = gpu.reserve if gpu else 0
    return logits + sampling + activations + rotary + reserve


def longest(config: ModelConfig, groups: Sequence[KVGroup], slots: Slots) -> int:
    """The most tokens of a sequence, by the model and by the memory of the cache."""
    return min(config.max_position_embeddings, most_pages(groups, [slots]) * groups[0].page_size)


def _slots(groups: Sequence[KVGroup], options: EngineOptions, cache_bytes: int) -> Slots:
    """As many as fit. Raises ValueError if one sequence does not."""
    empty = shared(groups)
    slots = replace(empty, count=cache_bytes // empty.slot_bytes)
    wanted = ceil((options.model.max_model_len or 1) / groups[0].page_size)
    if (needed := slots_of(groups, slots, 1, wanted)) > slots.count:
        given = "--kv-cache-bytes is" if options.cache.kv_cache_bytes else "the KV cache has"
        raise ValueError(
            f"one sequence of {wanted * groups[0].page_size} tokens needs {needed} x {slots.slot_bytes} = "
            f"{needed * slots.slot_bytes} bytes of KV cache; {given} {cache_bytes}"
        )
    return slots


def _no_room(options: EngineOptions, weights: int, workspace: int, ours: int, gpu: DeviceMemory) -> str:
    asked, share = options.cache.kv_cache_bytes, gpu.share(options)
    cache = "any KV cache" if asked is None else f"a KV cache of {asked} bytes"
    limit = f"of {gpu.total} bytes, {gpu.free} are free"
    if gpu.capped:
        limit = f"--gpu-memory-bytes allows {gpu.total}, of which {gpu.total - gpu.free} are in use"
    elif options.cache.kv_cache_free_gpu_memory_fraction is None:
        limit += f", and --gpu-memory-utilization {share} allows {int(share * gpu.total)}"
    return (
        f"weights of {weights} bytes + workspace of {workspace} bytes + {cache} do not fit {ours} bytes of the GPU: "
        f"{limit}; the workspace shrinks with --max-num-seqs and --max-num-batched-tokens, and --experts-on-host auto "
        f"keeps experts in host memory"
    )


def _no_memory_beside_gpu(plan: MemoryPlan, host_bytes: int) -> str:
    on_host, free = plan.on_host, f"{host_bytes / _GIB:.1f} GiB are free"
    sizes = f"{on_host}, together {on_host.total / _GIB:.1f} GiB," if on_host.total else ""
    offload = f"--kv-offload-bytes, {plan.offload / _GIB:.1f} GiB," if plan.offload else ""
    return f"{' and '.join(filter(None, (sizes, offload)))} do not fit the host memory: {free}"


def _no_host_memory(plan: MemoryPlan, host_bytes: int) -> str:
    gib = [f"{part / _GIB:.1f} GiB" for part in (plan.weights, plan.kv_bytes, plan.workspace)]
    offload = f" + {plan.offload / _GIB:.1f} GiB of --kv-offload-bytes" if plan.offload else ""
    return (
        f"weights of {gib[0]} + KV cache of {gib[1]} + workspace of {gib[2]}{offload} = "
        f"{(plan.total + plan.offload) / _GIB:.1f} GiB do not fit the memory: {host_bytes / _GIB:.1f} GiB are free; "
        f"the KV cache shrinks with --kv-cache-bytes, the workspace with --max-num-seqs and --max-num-batched-tokens"
    )


def _content(groups: Sequence[KVGroup], slots: Slots) -> str:
    """The number of slots, and what one of them can be."""
    kinds = []
    for place, count in zip(slots.groups, slots.per_slot, strict=True):
        group = groups[place]
        name = group.dtype.describe(group.name)
        kinds.append(name if max(slots.per_slot) == 1 else f"{count} {name}")
    return f"{slots.count} slots for pages of {groups[0].page_size} tokens: {' or '.join(kinds)}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:9.3f} GiB"
