"""What fits this machine, by the memory plan of the engine. Needs torch."""

from dataclasses import dataclass

from oscine.executor.kv.memory import DeviceMemory, MemoryPlan
from oscine.extensions.apis.conventions.profiles import Profile
from oscine.extensions.doctor.facts import Facts, GpuFacts
from oscine.settings.config import NANO, Config, EngineOptions

MODELS = ("gpt-oss-20b", "gpt-oss-120b")


@dataclass(frozen=True, slots=True)
class Fit:
    model: str
    where: str
    plan: MemoryPlan | None  # None: it does not fit
    why: str = ""  # it does not

    def __str__(self) -> str:
        plan = self.plan
        if plan is None:
            return f"does not fit: {self.why}"
        beside = f", with {plan.on_host} in host memory" if plan.on_host.num_layers else ""
        limits = f"{plan.max_num_seqs} sequences, {plan.max_num_batched_tokens:,} tokens per step"
        size = f"plan: {plan.total / (1 << 30):.1f} GiB"
        return f"fits, with a context of {plan.max_model_len:,} tokens, {limits}{beside} ({size})"


def fits(facts: Facts) -> list[Fit]:
    """Each published model on one GPU, on several as one engine, and on the CPU."""
    gpus = facts.gpus
    places = [(f"one {gpus[0].name}", 1)] if gpus else []
    places += [(f"{count} GPUs as one engine", count) for count in (2, 4, 8) if count <= len(gpus)]
    places.append(("the CPU", 0))
    return [fit(model, where, facts, count) for model in MODELS for where, count in places]


def fit(model: str, where: str, facts: Facts, num_ranks: int) -> Fit:
    """`num_ranks`: GPUs of one engine; 0: the CPU. What does not fit one GPU may fit with experts on the host."""
    tries: list[dict[str, str]] = [{}, {"experts-on-host": "auto"}] if num_ranks == 1 else [{}]
    why = ""
    for values in tries:
        try:
            return Fit(model, where, _plan(model, Config.of(values).engine, facts, num_ranks))
        except ValueError as error:
            why = str(error).partition(";")[0]
    return Fit(model, where, None, why)


def _plan(model: str, options: EngineOptions, facts: Facts, num_ranks: int) -> MemoryPlan:
    from oscine.checkpoint.hub import NANO_FOLDER, PUBLISHED, config_at
    from oscine.executor.kv.fit import plan_on_gpus
    from oscine.executor.start.fit import plan_on_cpu

    config = config_at(NANO_FOLDER) if model == NANO else PUBLISHED[model.rpartition("-")[2]]()
    if not num_ranks:
        return plan_on_cpu(config, options, facts.available)
    gpu = facts.gpus[0]
    return plan_on_gpus(config, options, _memory(gpu), num_ranks, facts.available, hopper=gpu.capability == "9.0")


def _memory(gpu: GpuFacts) -> DeviceMemory:
    return DeviceMemory(gpu.total, gpu.free, unified=gpu.unified)


def why_not(profile: Profile, facts: Facts) -> str | None:
    """Why a NIM profile does not run here; None if it does. A profile of one GPU may run on the CPU."""
    count = len(facts.gpus)
    if profile.num_gpus > max(count, 1):
        return f"it needs {profile.num_gpus} GPUs, and there are {count}"
    found = fit(profile.model, "", facts, profile.ranks if count else 0)
    return None if found.plan is not None else found.why
