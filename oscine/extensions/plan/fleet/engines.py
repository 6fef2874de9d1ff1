"""The engines of a simulation: what a role of a deployment file says, sized by the table of step times or by a GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oscine.checkpoint.hub import shapes_of
from oscine.engine.build import SPECULATION
from oscine.engine.core.extension import MakeExtension
from oscine.engine.core.loop import EngineLoop, Parts
from oscine.engine.core.scheduler import Scheduler
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory, most_drafts
from oscine.extensions.plan.clock.agenda import NEVER, Clock
from oscine.extensions.plan.engine.cohort import CohortScheduler
from oscine.extensions.plan.engine.cohort_loop import CohortLoop
from oscine.extensions.plan.engine.drafts import Drafting, decode_times
from oscine.extensions.plan.engine.timed import TimedExecutor
from oscine.extensions.plan.engine.tokens import AddressedIndex
from oscine.extensions.plan.sources.gpus import is_hopper
from oscine.extensions.replicas.spec.deployment import RoleSpec
from oscine.kv_group import KVGroup, Slots, shared
from oscine.model.config import ModelConfig
from oscine.settings.config import NANO, EngineOptions, ModelOptions
from oscine.system.extensions import load
from oscine.timing.table import StepTable
from oscine.types import EngineInfo

Way = Literal["steps", "cohort", "jumps"]  # of running an engine, slowest first; all have the same results
_DTYPE = "bfloat16"
_CPU = "cpu"  # in place of a GPU's name
_IDLE_NS = 200_000  # as in EngineLoop
_SEED = "00"  # of page addresses, which are not hashed here


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Of all replicas of a role."""

    options: EngineOptions
    groups: Sequence[KVGroup]
    memory: Sequence[Slots]
    max_model_len: int
    table: StepTable
    drafting: Drafting | None = None  # of engines with speculation

    @property
    def info(self) -> EngineInfo:
        scheduler = self.options.scheduler
        limits = scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        return EngineInfo(self.options.model.model, self.max_model_len, 0, self.groups[0].page_size, *limits)

    def loop(self, clock: Clock, way: Way, extensions: Sequence[MakeExtension] = (), *, number: int = 0) -> EngineLoop:
        """An extension needs every step; drafts are one. `number`: of the replica, which draws what is accepted."""

        def idle() -> None:
            clock.ns += _IDLE_NS

        drafts = None
        if self.drafting is not None:
            extensions = [*extensions, load(SPECULATION)(self.drafting, self.options)]
            drafts = self.drafting.drafts(number)
        is_cohort = way != "steps" and not extensions
        made = CohortLoop if is_cohort else EngineLoop
        peers = replace(self.options.peers, prefix_seed=_SEED)
        # Tokens are delivered with the first and the last one of a request: those between them change nothing.
        scheduler = replace(self.options.scheduler, stream_interval=NEVER)
        return made(
            TimedExecutor(clock, self.table, drafts),
            replace(self.options, scheduler=scheduler, peers=peers),
            groups=self.groups,
            memory=self.memory,
            max_model_len=self.max_model_len,
            extensions=extensions,
            parts=Parts(CohortScheduler if is_cohort else Scheduler, AddressedIndex, clock, idle),
        )


def spec_of(
    role: RoleSpec, table: StepTable, gpu_bytes: int | None = None, *, acceptance: float | None = None, seed: int = 0
) -> EngineSpec:
    """`gpu_bytes`: memory of a GPU. Without it, limits that the deployment leaves to memory are those of the table.

    `acceptance`: the probability that a draft is accepted, for engines with speculation; `seed`: of what is drawn.
    Raises ValueError.
    """
    options, *others = role.engines
    _check(role)
    num_sharing = 1 + len(others) if role.enable_expert_parallel else 1
    if (config := shapes_of(options.model)) is None:
        raise ValueError(f"the sizes of {options.model.model} are not known")
    ranks = options.model.tensor_parallel_size
    if gpu_bytes is not None:
        given, hopper = DeviceMemory(gpu_bytes, gpu_bytes), is_hopper(table.header.gpu)
        plan = plan_on_gpus(config, options, given, ranks, hopper=hopper, num_sharing=num_sharing)
        groups, memory, length = plan.groups, plan.slots, plan.max_model_len
        seqs, tokens = plan.max_num_seqs, plan.max_num_batched_tokens
    else:
        groups = config.kv_groups(options.cache.page_size, options.cache.kv_dtype(_DTYPE), ranks)
        memory = [_memory(groups, options, table)]
        length = min(_length(config, options.model), table.header.max_model_len or NEVER)
        seqs = _limit("max_num_seqs", options, table)
        tokens = max(seqs, _limit("max_num_batched_tokens", options, table))
    scheduler = replace(options.scheduler, by_memory=(), max_num_seqs=seqs, max_num_batched_tokens=tokens)
    drafting = _drafting(options, table, acceptance, seed)
    return EngineSpec(replace(options, scheduler=scheduler), groups, memory, length, table, drafting)


def _drafting(options: EngineOptions, table: StepTable, acceptance: float | None, seed: int) -> Drafting | None:
    if not options.speculation.is_on:
        return None
    assert acceptance is not None
    most, has_head = most_drafts(options, on_gpu=table.header.gpu != _CPU), options.speculation.method == "eagle3"
    times = decode_times(table, "eagle3" if has_head else "ngram")
    return Drafting(most, times, has_head, acceptance, seed)


def _check(role: RoleSpec) -> None:
    """Raises ValueError for what is not simulated."""
    options = role.engine
    speculation = options.speculation
    lacks_head = speculation.method == "eagle3" and speculation.model is None and options.model.model != NANO
    is_alone = options.model.tensor_parallel_size == 1 and not role.enable_expert_parallel
    for option, is_given in (
        ("scaling of replicas with several engines", role.replicas.scales and role.data_parallel_size > 1),
        ("eagle3 without `model`, the head,", lacks_head),
        ("an EAGLE-3 head of a model on several GPUs", options.speculation.method == "eagle3" and not is_alone),
        ("--kv-offload-dir", options.cache.kv_offload_dir is not None),
        ("--experts-on-host", options.model.experts_on_host is not None),
    ):
        if is_given:
            raise ValueError(f"{option} is not simulated")


def _length(config: ModelConfig, options: ModelOptions) -> int:
    return min(options.max_model_len or config.max_position_embeddings, config.max_position_embeddings)


def _memory(groups: Sequence[KVGroup], options: EngineOptions, table: StepTable) -> Slots:
    slots = shared(groups)
    if (given := options.cache.kv_cache_bytes) is not None:
        return replace(slots, count=given // slots.slot_bytes)
    if not table.header.kv_tokens:
        raise ValueError("the table of step times does not say how much its cache held: give --gpu-memory")
    pages = table.header.kv_tokens // groups[0].page_size
    return replace(slots, count=pages // slots.per_slot[0])


def _limit(name: str, options: EngineOptions, table: StepTable) -> int:
    given: int = getattr(options.scheduler, name)
    if name not in options.scheduler.by_memory:
        return given
    return int(getattr(table.header, name)) or given


def table_for(role: RoleSpec, tables: Sequence[StepTable]) -> StepTable:
    """The table for the role's type of activations; of several tables, the one that also has as many ranks.

    Raises ValueError for none or several.
    """
    activations, ranks = role.engine.model.activation_dtype, role.engine.model.tensor_parallel_size
    found = [table for table in tables if table.header.activation_dtype == activations]
    if len(tables) > 1:
        found = [table for table in found if table.header.tensor_parallel_size == ranks]
    if len(found) != 1:
        of = f"tensor-parallel-size {ranks} and activation-dtype {activations}"
        raise ValueError(f"{len(found)} of the tables of step times are of engines with {of}; one is needed")
    return found[0]
