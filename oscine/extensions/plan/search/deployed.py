"""A candidate as a deployment: the record of its deployment file, and the memory plan of its engines."""

from functools import cache

from oscine.checkpoint.hub import shapes_of
from oscine.executor.kv.fit import plan_on_gpus
from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.extensions.plan.search.space import Candidate, Layout
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, QueueLimits, Replicas, RoleSpec
from oscine.settings.config import EngineOptions, ModelOptions, SchedulerOptions

_SHORT = {size: f"openai/gpt-oss-{size}" for size in ("20b", "120b")}


def deployment_of(model: str, candidate: Candidate, users: int = 0) -> Deployment:
    """`users`: that may all ask at the same time."""
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
def memory_plan(model: str, layout: Layout, memory_bytes: int) -> MemoryPlan:
    """Of one GPU, with the limits that its memory gives. Raises ValueError with the arithmetic if it does not fit."""
    role = _role(model, layout, SchedulerOptions.of({}), 1)
    options = role.engines[0]
    if (config := shapes_of(options.model)) is None:
        raise ValueError(f"the sizes of {model} are not known")
    memory = DeviceMemory(memory_bytes, memory_bytes)
    hopper = layout.gpu.is_hopper
    return plan_on_gpus(config, options, memory, layout.ranks, hopper=hopper, num_sharing=layout.sharing)


def _role(model: str, layout: Layout, scheduler: SchedulerOptions, replicas: int) -> RoleSpec:
    options = ModelOptions(full_name(model), tensor_parallel_size=layout.ranks)
    return RoleSpec(
        engine=EngineOptions(options, scheduler=scheduler, quiet=True),
        replicas=Replicas(replicas, replicas),
        gpus=float(layout.gpus),
        data_parallel_size=layout.sharing,
        enable_expert_parallel=layout.sharing > 1,
    )
