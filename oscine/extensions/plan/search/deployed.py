"""A candidate as a deployment: the record of its deployment file, and the memory plan of its engines."""

from functools import cache

from oscine.checkpoint.hub import shapes_of
from oscine.executor.kv.fit import held_sequences, plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.extensions.plan.search.space import Candidate, Layout
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, QueueLimits, Replicas, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions

_SHORT = {size: f"openai/gpt-oss-{size}" for size in ("20b", "120b")}

_MOST_SEQS = 1024


def deployment_of(model: str, candidate: Candidate, users: int = 0) -> Deployment:
    """`users`: who may all send a request at the same time."""
    limits = {
        "max-num-seqs": candidate.max_num_seqs,
        "max-num-batched-tokens": candidate.max_num_batched_tokens,
    }
    role = _role(model, candidate.layout, SchedulerOptions.of(limits), candidate.replicas)
    queue = QueueLimits(max(users, QueueLimits().max_requests))
    return Deployment((ModelSpec((full_name(model),), (role,), queue=queue),))


def full_name(model: str) -> str:
    return _SHORT.get(model, model)


@cache
def memory_plan(model: str, layout: Layout, memory_bytes: int, context: int) -> MemoryPlan:
    """Of one GPU. The number of sequences follows from its memory; it may be above the default if the cache holds so
    many of this context. Raises ValueError with the arithmetic if it does not fit.
    """
    usual = _plan(model, layout, memory_bytes, {})
    limits = {"max-num-seqs": _MOST_SEQS, "max-num-batched-tokens": usual.max_num_batched_tokens * layout.sharing}
    try:
        more = _plan(model, layout, memory_bytes, limits)
    except ValueError:
        return usual
    options = EngineOptions(scheduler=SchedulerOptions.of(limits))
    return more if held_sequences(more, options, context) == _MOST_SEQS > usual.max_num_seqs else usual


def _plan(model: str, layout: Layout, memory_bytes: int, limits: dict[str, int]) -> MemoryPlan:
    options = _role(model, layout, SchedulerOptions.of(limits), 1).engines[0]
    if (config := shapes_of(options.model)) is None:
        raise ValueError(f"the sizes of {model} are not known")
    memory = DeviceMemory(memory_bytes, memory_bytes)
    hopper = layout.gpu.is_hopper
    return plan_on_gpus(config, options, memory, layout.ranks, hopper=hopper, num_sharing=layout.sharing)


def _role(model: str, layout: Layout, scheduler: SchedulerOptions, replicas: int) -> RoleSpec:
    activations = layout.source.activation_dtype
    options = ModelOptions(full_name(model), tensor_parallel_size=layout.ranks, activation_dtype=activations)
    return RoleSpec(
        engine=EngineOptions(options, scheduler=scheduler, quiet=True),
        replicas=Replicas(replicas, replicas),
        gpus=float(layout.gpus),
        data_parallel_size=layout.sharing,
        enable_expert_parallel=layout.sharing > 1,
    )
