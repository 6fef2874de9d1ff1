"""Brings a model onto its device and an executor over it, in four steps between which the ranks of a model meet.

    plan      what every rank will hold, by the rank that has the least memory
    load      the weights, and the executor over them
    compile   every kernel, by one rank; the others find them in Triton's cache
    capture   CUDA graphs, and the largest step

Knows the order and what to tell about it. Nothing big is allocated before the memory plan is reported.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from oscine.checkpoint.opened import open_model
from oscine.executor.kv.allocate import allocate_kv, dtype_name, groups_of
from oscine.executor.kv.late_cache import LateCache, filled
from oscine.executor.kv.limits import prompt_sizes_up_to, sizes_up_to, with_fixed, with_sequences, with_step_tokens
from oscine.executor.kv.memory import (
    SECOND_FORM_SHARE,
    MemoryPlan,
    OnHost,
    WeightBytes,
    leave_on_host,
    most_drafts,
    plan_memory,
    second_form_bytes,
)
from oscine.executor.masks import TOKENIZER
from oscine.executor.rules import NewRules, grammar_rules
from oscine.executor.runner import TorchExecutor
from oscine.executor.start.device_memory import Budget, device_memory, keep_to, smallest_gpu
from oscine.executor.start.host_memory import available_bytes
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.warm_up import (
    KERNEL_SAMPLINGS,
    MASKED,
    SAMPLINGS,
    prompts,
    rehearse,
    time_decodes,
    warm_up,
)
from oscine.extensions.parallel.start.communicator import MakeCommunicator, least_of
from oscine.extensions.parallel.start.share import open_lockstep
from oscine.extensions.speculation.eagle.drafter import EagleDrafter
from oscine.extensions.speculation.eagle.find import find_draft_head
from oscine.extensions.speculation.lookup import PromptLookup, run_lengths
from oscine.extensions.speculation.ops.table import resolve_draft
from oscine.kv_group import KVGroup
from oscine.model.config import ModelConfig
from oscine.model.gpt_oss import GptOss
from oscine.model.packed import PackedFiles
from oscine.model.tensors import Part, Shard, TensorSpec
from oscine.ops.comm.collectives import CollectiveCommunicator
from oscine.ops.interface import KVCache, Ops, Shapes
from oscine.ops.moe.on_host import MOST_TOKENS, HostLayers
from oscine.ops.native.library import unavailable
from oscine.ops.native.recording import NotRecordable
from oscine.ops.platforms.table import choose, describe, platform_of, resolve
from oscine.ops.target import Target
from oscine.ops.triton_range import check_triton
from oscine.settings.config import EngineOptions
from oscine.system.environment import Environment
from oscine.types import Seat

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.ops.compile_together import Compilers

Report = Callable[[str], None]
RulesOf = Callable[[Path | None, int], NewRules]  # of the tokenizer's file, if known, and the size of the vocabulary
_GIB = 1 << 30
_LARGE_BYTES = 1 << 30  # packed weights of at least this size are kept in files
_MOST_DRAFTING = 512  # sequences that draft in one CUDA graph
_FEW_DRAFTING = 64  # up to here there are such graphs of all sizes, above in multiples of it
_MOST_VERIFYING = 1024  # rows of the graphs that only drafts need
_ROUNDING = 0.01  # of the allocator, which the reserve covers
_DENSE = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lm_head.weight")


class Start:
    """What the steps of a start share. Every rank has its own."""

    def __init__(
        self,
        options: EngineOptions,
        report: Report,
        watch: Stopwatch,
        communicator: MakeCommunicator | None,
        rules_of: RulesOf,
        seat: Seat | None,
    ) -> None:
        """Raises ValueError for what is wrong with the model."""
        self.report, self.watch, self.rules_of = report, watch, rules_of
        self.opened = open_model(options.model)
        if self.opened.device.type == "cuda":
            options = with_step_tokens(options, smallest_gpu([self.opened.device], options))
        self.options = options
        if platform_of(Target.of(self.opened.device), self.opened.dtype).uses_triton:
            check_triton(report)
        self.lockstep = None if seat is None else open_lockstep(seat, self.opened, options)
        exchange = None if self.lockstep is None else self.lockstep.exchange
        target = Target.of(self.opened.device, communicator and communicator(self.opened), exchange)
        if isinstance(target.communicator, CollectiveCommunicator):
            report(_without_peer_access(self.opened.config))
        made = options.model.cpu_weights, options.model.activation_dtype
        self.target = replace(target, cpu_weights=made[0], activation_dtype=made[1])
        self.platform = platform_of(self.target, self.opened.dtype)
        hidden = self.opened.config.hidden_size
        keys = options.cache.kv_dtype(dtype_name(self.opened.dtype))
        if lacking := self.platform.lacking_for_keys(self.target, keys):
            raise ValueError(f"--kv-cache-dtype {options.cache.kv_cache_dtype} needs {lacking}")
        if options.model.activation_dtype != "auto" and (lacking := self.platform.lacking_for_fp8_experts(hidden)):
            raise ValueError(f"--activation-dtype {options.model.activation_dtype} needs {lacking}")
        self.shard = Shard.of_everything(self.target.communicator.rank, self.target.communicator.num_ranks)
        if seat is not None:
            self.shard = Shard(experts=Part(seat.rank, seat.num_ranks))
        self.config = self.shard.config(self.opened.config)
        alone = self.lockstep is None and self.target.communicator.num_ranks == 1
        self.head = find_draft_head(options, self.opened, alone=alone)
        self.choice = choose(self.platform.name)  # op -> backend
        self.ops = resolve(self.target, self.choice)
        self.projection_bytes = self._projection_bytes()
        self.ops = self._with_projections(self.ops)
        self.on_host: HostLayers | None = None
        self.budget: Budget | None = None  # of a GPU
        self.cache: LateCache | None = None  # that gets its memory when all else has its own

    @property
    def on_gpu(self) -> bool:
        return self.opened.device.type == "cuda"

    def rehearsal(self) -> AbstractContextManager[None]:
        return nullcontext() if self.lockstep is None else self.lockstep.exchange.rehearsal()

    def serve(self) -> None:
        """Returns when all engines of a group are ready."""
        if self.lockstep is not None:
            self.lockstep.clock.serve()
            self.lockstep.exchange.serve()

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights on the device, by tensor name."""
        dtype, specs = self.opened.dtype, self.shard.specs(self.opened.config)
        if self.platform.has_c_kernels:
            return native_bytes(specs, self.target.cpu_weights)
        return torch_bytes(specs, dtype)

    @property
    def prepared_head_bytes(self) -> int:
        """The most bytes that the chooser needs in addition to this rank's head."""
        return self.ops.chooser.prepared_bytes(*self.shard.specs(self.opened.config)["lm_head.weight"].shape)

    def _projection_bytes(self) -> int:
        """Bytes of the projections' second form (12 bits); 0 where there is none."""
        if not self.platform.screens_projections:
            return 0
        gpu, specs = device_memory(self.opened.device, self.options), self.shard.specs(self.opened.config)
        weights = sum(self.tensor_bytes.values()) + self.prepared_head_bytes
        return second_form_bytes(gpu, self.options, weights, {name: spec.shape for name, spec in specs.items()})

    @property
    def draft_head_bytes(self) -> int:
        """Of the head that drafts: its weights, and what steps make for it."""
        if self.head is None:
            return 0
        dtype = self.opened.dtype
        most_tokens = self.options.scheduler.max_num_batched_tokens
        return self.head.num_bytes(dtype) + self.head.step_bytes(most_tokens, self.prompt_sizes, dtype)

    @property
    def decode_sizes(self) -> list[int]:
        """Rows of CUDA graphs: sequences, and with drafts more. Reference attention and experts have none, as they wait
        for values on the host."""
        capturable = self.on_gpu and "reference" not in (self.choice["attention"], self.choice["moe"])
        scheduler = self.options.scheduler
        with_drafts = scheduler.max_num_seqs * (1 + most_drafts(self.options, on_gpu=self.on_gpu))
        most = max(scheduler.max_num_seqs, min(with_drafts, _MOST_VERIFYING, scheduler.max_num_batched_tokens))
        if self.on_host is not None:
            most = min(most, MOST_TOKENS)
        return sizes_up_to(most) if capturable else []

    @property
    def prompt_sizes(self) -> list[int]:
        """Tokens of CUDA graphs of steps with prompts.

        There are none where engines share experts, as their steps would have to fit one graph, and where experts stay
        on the host, from where larger steps copy them.
        """
        if not (self.decode_sizes and self.options.cuda_graphs and self.lockstep is None and self.on_host is None):
            return []
        gpu = device_memory(self.opened.device, self.options)
        return prompt_sizes_up_to(min(gpu.graph_tokens, self.options.scheduler.max_num_batched_tokens))

    def keep_experts(self, num_layers: int) -> None:
        """Offloads the experts of the last layers to host memory. Raises ValueError without the native kernels."""
        if (why := unavailable()) is not None:
            raise ValueError(f"--experts-on-host needs the native kernels for CPUs: {why}")
        config, threads = self.config, self.options.num_threads
        layers = range(config.num_hidden_layers - num_layers, config.num_hidden_layers)
        self.on_host = HostLayers(self.target, layers, config.hidden_size, config.num_experts_per_tok, threads)
        ops = self._with_projections(resolve(self.target, self.choice, leave_choice=False))
        self.ops = replace(ops, moe=self.on_host.beside(ops.moe))

    def _with_projections(self, ops: Ops) -> Ops:
        """Without a second form of the projections, where there is no room for it."""
        return ops if self.projection_bytes else replace(ops, prepare_projection=ops.prepare_dense)


def load_executor(
    options: EngineOptions,
    report: Report,
    watch: Stopwatch,
    communicator: MakeCommunicator | None = None,
    rules_of: RulesOf = grammar_rules,
    seat: Seat | None = None,
) -> TorchExecutor:
    """`communicator`: for one of several ranks. `rules_of`: grammars of this process, unless they are rank 0's. `seat`:
    among engines that share experts; returns when all have loaded.

    Raises ValueError for what is wrong with the model or does not fit.
    """
    start = Start(options, report, watch, communicator, rules_of, seat)
    memory = plan(start)
    if not start.on_gpu:
        executor = load(start, memory)
        record(start, executor)
        time_drafts(start, executor)
        start.serve()
        return executor
    from oscine.ops.compile_together import Compilers

    workers = None if start.shard.experts.rank == 0 else 0
    with closing(Compilers(workers)) as compilers:  # they get ready while the weights are loaded
        executor = load(start, memory)
        with start.rehearsal():
            compile_kernels(start, executor, compilers)
    capture(start, executor)
    fill_cache(start, executor)
    time_drafts(start, executor)
    start.serve()
    return executor


def plan(start: Start) -> MemoryPlan:
    """The memory plan, the same for every rank. Reports it together with the backends of the ops."""
    opened, config, report = start.opened, start.config, start.report
    if start.on_gpu:
        keep_to(opened.device, device_memory(opened.device, start.options))
        start.budget = Budget(opened.device, start.options)
    weights = _weights(start)
    on_host = _leave_on_host(start, weights)
    if on_host.num_layers:
        start.keep_experts(on_host.num_layers)
    elif start.on_gpu:
        start.options = _with_sequences(start, weights.total - on_host.total, on_host)
    memory = _plan(start, weights.total - on_host.total, on_host)
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    shapes = Shapes(opened.dtype, memory.page_size, *heads, config.hidden_size)
    if (num_ranks := start.shard.attention.num_ranks) > 1:
        report(f"{num_ranks} ranks compute the model together; this is the plan of each")
    report(f"{memory}\n{describe(start.choice, shapes)}")
    if drafts := most_drafts(start.options, on_gpu=start.on_gpu):
        method = "prompt lookup" if start.head is None else "EAGLE-3"
        report(f"{method} makes up to {drafts} drafts for a sequence per step")
    if start.platform.screens_projections and not start.projection_bytes:
        report(
            "attention projections stay in bfloat16: a copy in 12 bits, for steps of up to 32 tokens, would take more "
            f"than {SECOND_FORM_SHARE:.0%} of the memory that the other weights leave"
        )
    if start.on_gpu and not start.platform.uses_triton:
        report(f"no kernel and no CUDA graph is used: they are for bfloat16, not {opened.dtype}")
    if opened.device.type == "cpu" and (why := unavailable()) is not None:
        report(f"no native kernel is used, so steps are slow: {why}")
    if opened.kv_scales:
        report(
            f"{opened.kv_scales} calibrated scales of an FP8 KV cache are not needed: --kv-cache-dtype fp8 gives each "
            "token a scale of its own"
        )
    start.watch.lap("open")
    return memory


def load(start: Start, memory: MemoryPlan) -> TorchExecutor:
    """Returns when every rank has its weights."""
    opened, config, options = start.opened, start.config, start.options
    tokenizer = None if opened.tokenizer is None else opened.tokenizer / TOKENIZER
    new_rules = start.rules_of(tokenizer, config.vocab_size)  # which reads it while the weights are loaded
    weights = opened.load(
        ops=start.ops,
        shard=start.shard,
        on_host=start.on_host,
        embedding_on_host=memory.on_host.embedding > 0,
        files=_packed_files(start),
        progress=not options.quiet,
    )
    if (error := opened.quantization_error) is not None:
        start.report(
            f"experts were quantised to MXFP4, with a relative error of {error.relative:.1%}: `oscine convert` does it "
            "once for all starts"
        )
    if start.prepared_head_bytes and weights.prepared_head is None:
        lost = "it does not suit the weights of this head, so all logits are made"
        start.report(f"chooser={start.choice['chooser']} is not used: {lost}")
    if start.on_gpu:
        memory = _plan_again(start, memory)
    start.target.communicator.barrier()
    start.watch.lap("weights")
    kv = _cache(start, memory)
    if start.cache is not None:  # page tables for any length that there may be room for
        memory = replace(memory, max_model_len=options.model.max_model_len or config.max_position_embeddings)
    model, most = GptOss(config, weights, start.ops), options.scheduler.max_num_seqs
    others = start.target.communicator, start.lockstep, _drafter(start), most_drafts(start.options, on_gpu=start.on_gpu)
    executor = TorchExecutor(model, memory, kv, most, new_rules, *others)
    if start.head is not None:
        head = start.head.load(opened, model, resolve_draft(start.target, start.platform))
        group, pages = start.head.pages(memory.groups, kv)
        executor.draft_with(EagleDrafter(head, executor.state, pages, group, records=start.platform.has_c_kernels))
        start.watch.lap("draft head")
    return executor


def _cache(start: Start, memory: MemoryPlan) -> KVCache:
    """The KV cache. A GPU's cache gets its memory at the end of the start (late_cache.py), or at once in four cases.

    Its size is given in bytes; other engines read it, and cannot read memory that is mapped later; engines share
    experts; the GPU is integrated.
    """
    options, device = start.options, start.opened.device
    late = start.on_gpu and options.cache.kv_cache_bytes is None and not options.peers.kv_transfer
    if not late or start.lockstep is not None or torch.cuda.get_device_properties(device).is_integrated:
        return allocate_kv(memory, device, padding=start.lockstep is not None or bool(start.prompt_sizes))
    start.cache = LateCache(memory, device)
    return start.cache.kv


def _drafter(start: Start) -> PromptLookup | None:
    options = start.options.speculation
    if options.method in ("none", "eagle3"):
        return None
    return PromptLookup(start.options.scheduler.max_num_seqs, run_lengths(options.lookup_min, options.lookup_max))


def record(start: Start, executor: TorchExecutor) -> None:
    """Replaces a decode step by one call, if the C kernels do all of its work."""
    lone = start.target.communicator.num_ranks == 1 and start.lockstep is None
    if lone and start.options.cuda_graphs and start.platform.has_c_kernels:
        try:
            executor.record_steps()
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
        layers.run_graphs_eagerly(*sizes)
    start.target.communicator.barrier()
    start.watch.lap("kernels")
    warm_up(layers, most_tokens, SAMPLINGS)
    layers.run_graphs_eagerly(*sizes)
    start.watch.lap("rehearsal")


def capture(start: Start, executor: TorchExecutor) -> None:
    """The steps that become CUDA graphs, then the largest step. Leaves page 0 as it was."""
    if start.options.cuda_graphs and start.decode_sizes:
        if start.head is not None:
            most = min(_MOST_DRAFTING, start.options.scheduler.max_num_seqs)
            sizes = [size for size in start.decode_sizes if size <= _FEW_DRAFTING or size % _FEW_DRAFTING == 0]
            executor.capture_drafts([*(size for size in sizes if size < most), most])
            executor.run_graphs_eagerly(start.decode_sizes[:1], start.prompt_sizes)  # kernels of the head
        executor.capture(start.decode_sizes, start.prompt_sizes)
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
    count = least_of(room, start.target.communicator, shares_experts=False)
    executor.memory = filled(executor.memory, start.config, start.options.model.max_model_len, count)
    start.cache.fill(count)
    sizes = executor.memory.kv_bytes, workspace, torch.cuda.mem_get_info(start.opened.device)[0]
    start.report(
        "the KV cache has {:.2f} GiB; graphs and steps took {:.2f} GiB, {:.2f} GiB stay free".format(
            *(size / _GIB for size in sizes)
        )
    )
    start.watch.lap("cache")


def time_drafts(start: Start, executor: TorchExecutor) -> None:
    """Measures steps with drafts, from which the engine chooses the number of drafts."""
    if executor.max_drafts:
        most_tokens = start.options.scheduler.max_num_batched_tokens
        executor.decode_times = time_decodes(executor, most_tokens, _drafter(start))
        start.watch.lap("times of drafts")


def _without_peer_access(config: ModelConfig) -> str:
    return (
        f"these GPUs cannot reach each other's memory: the {2 * config.num_hidden_layers + 1} messages of a step go "
        "through NCCL, and take 7 us or more each instead of 2; engines of one GPU (--data-parallel-size) need none"
    )


def torch_bytes(specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> dict[str, int]:
    """Bytes by tensor name: MXFP4 stays packed, everything else is cast to dtype."""
    return {
        name: spec.num_bytes if spec.dtype == "U8" else prod(spec.shape) * dtype.itemsize
        for name, spec in specs.items()
    }


def _packed_files(start: Start) -> PackedFiles | None:
    """The files of packed weights: for large models from a checkpoint, on a CPU with native kernels. Else None.

    With them the checkpoint's own files need not stay in memory.
    """
    num_bytes = sum(start.tensor_bytes.values())
    if not start.platform.has_c_kernels or num_bytes < _LARGE_BYTES:
        return None
    name = start.opened.packed_name(start.target.cpu_weights, start.shard)
    return None if name is None else PackedFiles(Environment().packed_folder / name, num_bytes, start.report)


def native_bytes(specs: Mapping[str, TensorSpec], cpu_weights: str) -> dict[str, int]:
    """Bytes by tensor name for the C kernels: dense matrices in one of three types, the embedding in bfloat16."""
    of_dense = {"float32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32}

    def bytes_per_value(name: str, spec: TensorSpec) -> float:
        if spec.dtype == "U8":
            return 1
        if "embed_tokens" in name:
            return 2
        return of_dense[cpu_weights] if name.endswith(_DENSE) else 4

    return {name: int(prod(spec.shape) * bytes_per_value(name, spec)) for name, spec in specs.items()}


def _weights(start: Start) -> WeightBytes:
    others = start.prepared_head_bytes + start.projection_bytes + start.draft_head_bytes
    return WeightBytes.of(start.tensor_bytes, start.config.num_hidden_layers, others)


def _leave_on_host(start: Start, weights: WeightBytes) -> OnHost:
    options, opened = start.options, start.opened
    alone = start.target.communicator.num_ranks == 1 and start.lockstep is None
    if start.platform.uses_triton and alone:
        gpu = device_memory(opened.device, options)
        return leave_on_host(opened.config, _groups(start), options, weights, opened.dtype.itemsize, gpu)
    if options.model.experts_on_host is not None:
        needs = "engines with their own experts" if start.lockstep is not None else "a GPU and --dtype bfloat16"
        raise ValueError(f"--experts-on-host needs {needs}")
    return OnHost()


def _groups(start: Start) -> tuple[KVGroup, ...]:
    num_ranks = start.shard.attention.num_ranks
    groups = groups_of(start.opened.config, start.options.cache, start.opened.dtype, num_ranks)
    return groups if start.head is None else start.head.beside(groups)


def _plan(start: Start, weights: int, on_host: OnHost, held: int = 0) -> MemoryPlan:
    """`weights`: bytes on the device. `held`: the part of them that is already there."""
    return _plan_of(start, weights, on_host, held)(start.options)


def _plan_of(start: Start, weights: int, on_host: OnHost, held: int = 0) -> Callable[[EngineOptions], MemoryPlan]:
    """The plan for some options, as _plan has it. All ranks call this together, and may plan alone then."""
    opened, gpu = start.opened, None
    if start.on_gpu:
        gpu = device_memory(opened.device, start.options, held)
        of_ranks = start.target.communicator.all_gather(torch.tensor([gpu.free]))
        gpu = replace(gpu, free=int(of_ranks.min()))
    host_bytes = available_bytes()
    own_bytes = None if host_bytes is None else host_bytes // start.shard.attention.num_ranks
    groups, itemsize, others = _groups(start), opened.dtype.itemsize, (on_host, start.projection_bytes)
    return lambda options: plan_memory(start.config, groups, options, weights, itemsize, gpu, own_bytes, *others)


def _with_sequences(start: Start, weights: int, on_host: OnHost) -> EngineOptions:
    """The number of sequences where it is left to memory: the least of what the ranks can hold."""
    if "max_num_seqs" not in start.options.scheduler.by_memory:
        return start.options
    own = with_sequences(start.options, _plan_of(start, weights, on_host)).scheduler.max_num_seqs
    agreed = least_of(own, start.target.communicator, shares_experts=start.lockstep is not None)
    return with_fixed(start.options, agreed)


def _plan_again(start: Start, planned: MemoryPlan) -> MemoryPlan:
    """The plan for the weights as they are: a backend may pad what it repacks."""
    device = start.opened.device
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    held = torch.cuda.memory_allocated(device) - planned.on_host.workspace  # allocated together with the weights
    if held <= planned.weights * (1 + _ROUNDING):
        return planned
    plan = _plan(start, held, planned.on_host, held)
    start.report(f"repacked weights are larger\n{plan}")
    return plan
