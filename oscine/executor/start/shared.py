"""What the steps of a start share: the model, its device, the ops that suit it, and what extensions make."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from oscine.checkpoint.opened import OpenedModel, open_model
from oscine.executor.adapters import Adapting, MakeAdapting
from oscine.executor.kv.allocate import dtype_name
from oscine.executor.kv.late_cache import LateCache
from oscine.executor.kv.limits import prompt_sizes_up_to, sizes_up_to, with_step_tokens
from oscine.executor.kv.memory import second_form_bytes
from oscine.executor.lockstep import OwnSteps
from oscine.executor.sampling.rules import NewRules
from oscine.executor.sleeper import Sleeper
from oscine.executor.start.device_memory import Budget, device_memory, smallest_gpu
from oscine.executor.start.drafting import Drafting, MakeDrafting
from oscine.executor.start.parts import ADAPTERS, DRAFTING, EXPERTS_ON_HOST, KV_SCALES, LOCKSTEP, SLEEPER
from oscine.executor.start.stopwatch import Stopwatch
from oscine.executor.start.weight_bytes import native_bytes, torch_bytes
from oscine.kv_dtype import KVDtype
from oscine.kv_group import heads_of_rank
from oscine.model.packed import PackedFiles
from oscine.model.tensors import Part, Shard
from oscine.model.weights import HostPlace
from oscine.ops.interface import Ops
from oscine.ops.native.library import unavailable
from oscine.ops.platforms.table import after_trial, choose, platform_of, resolve
from oscine.ops.target import Communicator, Target
from oscine.ops.triton_range import check_triton
from oscine.settings.config import NO_SCALES, EngineOptions
from oscine.system.environment import Environment
from oscine.system.extensions import is_there, part
from oscine.timing.kinds import GraphSizes
from oscine.types import RankHandle

Report = Callable[[str], None]
MakeCommunicator = Callable[[OpenedModel], Communicator]
# Arguments: the tokenizer's file, if known; the size of the vocabulary; whether to read it at once (grammar_rules)
RulesOf = Callable[[Path | None, int, bool], NewRules]
_LARGE_BYTES = 1 << 30  # packed weights of at least this size are kept in files
_MAX_VERIFYING = 1024  # rows of the graphs that only drafts need


class Start:
    """What the steps of a start share. Every rank has its own."""

    def __init__(
        self,
        options: EngineOptions,
        report: Report,
        watch: Stopwatch,
        communicator: MakeCommunicator | None,
        rules_of: RulesOf,
        handle: RankHandle | None,
    ) -> None:
        """Raises ValueError for what is wrong with the model."""
        self.report, self.watch, self.rules_of = report, watch, rules_of
        self.opened = open_model(options.model)
        if self.opened.device.type == "cuda":
            options = with_step_tokens(options, smallest_gpu([self.opened.device], options))
        self.options = options
        if platform_of(Target.of(self.opened.device), self.opened.dtype).uses_triton:
            check_triton(report)
        self.lockstep = OwnSteps() if handle is None else part(LOCKSTEP)(handle, self.opened, options)
        target = Target.of(self.opened.device, communicator and communicator(self.opened), self.lockstep.exchange)
        made = options.model.cpu_weights, options.model.activation_dtype
        self.target = replace(target, cpu_weights=made[0], activation_dtype=made[1])
        self.platform = platform_of(self.target, self.opened.dtype)
        hidden = self.opened.config.hidden_size
        keys = options.cache.kv_dtype(dtype_name(self.opened.dtype))
        if lacking := self.platform.lacking_for_keys(self.target, keys):
            raise ValueError(f"--kv-cache-dtype {options.cache.kv_cache_dtype} needs {lacking}")
        if options.model.activation_dtype != "auto" and (lacking := self.platform.lacking_for_fp8_experts(hidden)):
            raise ValueError(f"--activation-dtype {options.model.activation_dtype} needs {lacking}")
        self.platform, self.target = after_trial(self.platform, self.target, report)
        self.shard = Shard.of_everything(self.target.communicator.rank, self.target.communicator.num_ranks)
        if handle is not None:
            self.shard = Shard(experts=Part(handle.rank, handle.num_ranks))
        self.config = self.shard.config(self.opened.config)
        self.kv_scales: tuple[Path, list[list[list[int]]]] | None = None  # file; exponents [layers][2][KV heads]
        if keys is KVDtype.FP8 and options.cache.kv_scales != NO_SCALES and is_there(KV_SCALES.name):
            self.kv_scales = part(KV_SCALES)(options.cache.kv_scales, self.opened.path, self.opened.config)
        self.drafting = Drafting()
        if options.speculation.is_on:
            make: MakeDrafting = part(DRAFTING)
            self.drafting = make(options, self.opened, self.target, self.platform, self.is_alone)
        self.adapting = Adapting()
        if options.adapters.enable_lora:
            adapting: MakeAdapting = part(ADAPTERS)
            self.adapting = adapting(self)
        self.choice = choose(self.platform.name)  # op -> backend
        self.ops = resolve(self.target, self.choice)
        self.projection_bytes = self._projection_bytes()
        self.ops = self._with_projections(self.ops)
        self.on_host: HostPlace | None = None
        self.budget: Budget | None = None  # of a GPU
        self.cache: LateCache | None = None  # that gets its memory when all else has its own
        self.sleeper: Sleeper | None = part(SLEEPER)(options, self.opened.device) if options.sleep_mode else None

    @property
    def on_gpu(self) -> bool:
        return self.opened.device.type == "cuda"

    @property
    def is_alone(self) -> bool:
        """The model is on one device, and shares no experts."""
        return self.target.communicator.num_ranks == 1 and not self.lockstep.shares_experts

    def least_of_all(self, number: int) -> int:
        """The least number of all ranks of a model on GPUs, and of all engines that share its experts."""
        return self.lockstep.least_of_all(int(self.target.communicator.all_gather(torch.tensor([number])).min()))

    def kv_exponents(self) -> list[torch.Tensor] | None:
        """Calibrated exponents of this rank's KV heads: [2, G] per layer, on the device. None: per-token scales."""
        if self.kv_scales is None:
            return None
        part, num_heads = self.shard.attention, self.opened.config.num_key_value_heads
        own = heads_of_rank(num_heads, part.num_ranks, part.rank)
        rows = ([kind[own.start : own.stop] for kind in layer] for layer in self.kv_scales[1])
        return [torch.tensor(row, dtype=torch.uint8, device=self.opened.device) for row in rows]

    @property
    def shapes_of_kernels(self) -> str:
        """What decides which kernels a start compiles, and more: a change of it costs the next start some seconds."""
        options, gpu = self.options, torch.cuda.get_device_properties(self.opened.device)
        parts = options.cache, options.scheduler, options.speculation, options.adapters, options.cuda_graphs
        chip = gpu.name, gpu.major, gpu.minor, self.target.communicator.num_ranks
        models = self.config.to_dict(), self.drafting.shapes
        return repr((replace(options.model, device=""), *parts, *models, *chip))

    @property
    def tensor_bytes(self) -> dict[str, int]:
        """Bytes of this rank's weights on the device, by tensor name."""
        dtype, specs = self.opened.dtype, self.shard.specs(self.opened.config)
        if self.platform.has_c_kernels:
            return native_bytes(specs, self.target.cpu_weights)
        return torch_bytes(specs, dtype)

    @property
    def packed_files(self) -> PackedFiles | None:
        """The files of packed weights: for large models from a checkpoint, on a CPU with native kernels. Else None.

        With them the checkpoint's own files need not stay in memory.
        """
        num_bytes = sum(self.tensor_bytes.values())
        if not self.platform.has_c_kernels or num_bytes < _LARGE_BYTES:
            return None
        name = self.opened.packed_name(self.target.cpu_weights, self.shard)
        return None if name is None else PackedFiles(Environment().packed_folder / name, num_bytes, self.report)

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
    def decode_sizes(self) -> list[int]:
        """Rows of CUDA graphs: sequences, and with drafts more. Reference attention and experts have none, as they wait
        for values on the host."""
        capturable = self.on_gpu and "reference" not in (self.choice["attention"], self.choice["moe"])
        scheduler = self.options.scheduler
        with_drafts = scheduler.max_num_seqs * (1 + self.drafting.most)
        most = max(scheduler.max_num_seqs, min(with_drafts, _MAX_VERIFYING, scheduler.max_num_batched_tokens))
        if self.on_host is not None:
            most = min(most, self.on_host.max_tokens)
        return sizes_up_to(most) if capturable else []

    @property
    def prompt_sizes(self) -> list[int]:
        """Tokens of CUDA graphs of steps with prompts.

        There are none where engines share experts, as their steps would have to fit one graph, and where experts stay
        on the host, from where larger steps copy them.
        """
        shares = self.lockstep.shares_experts
        if not (self.decode_sizes and self.options.cuda_graphs and not shares and self.on_host is None):
            return []
        gpu = device_memory(self.opened.device, self.options)
        return prompt_sizes_up_to(min(gpu.graph_tokens, self.options.scheduler.max_num_batched_tokens))

    @property
    def graph_sizes(self) -> GraphSizes:
        """Of CUDA graphs. Those of prompts have room for as many sequences as the largest one of decodes."""
        decode = tuple(self.decode_sizes)
        return GraphSizes(decode, tuple(self.prompt_sizes), max(decode, default=0))

    @property
    def adapted_ops(self) -> Ops:
        """Of steps with adapters. Where these read which experts a token has, that is known before the experts run."""
        leave_choice = self.on_host is None and not self.adapting.reads_choice
        ops = self._with_projections(resolve(self.target, self.choice, leave_choice=leave_choice))
        return ops if self.on_host is None else replace(ops, moe=self.on_host.beside(ops.moe))

    def keep_experts(self, num_layers: int) -> None:
        """Offloads the experts of the last layers to host memory. Raises ValueError without the native kernels."""
        if (why := unavailable()) is not None:
            raise ValueError(f"--experts-on-host needs the native kernels for CPUs: {why}")
        config, threads = self.config, self.options.num_threads
        layers = range(config.num_hidden_layers - num_layers, config.num_hidden_layers)
        on_host: HostPlace = part(EXPERTS_ON_HOST)(
            self.target, layers, config.hidden_size, config.num_experts_per_tok, threads
        )
        self.on_host = on_host
        ops = self._with_projections(resolve(self.target, self.choice, leave_choice=False))
        self.ops = replace(ops, moe=on_host.beside(ops.moe))

    def _with_projections(self, ops: Ops) -> Ops:
        """Without a second form of the projections, where there is no room for it."""
        return ops if self.projection_bytes else replace(ops, prepare_projection=ops.prepare_dense)
