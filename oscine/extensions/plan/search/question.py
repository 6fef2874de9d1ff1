"""The question that a plan answers: model, GPUs, load, goals, prices, and where step times come from."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from oscine.extensions.bench.cli.load_options import Reporting, Sending, Workload
from oscine.extensions.plan.clock.agenda import NS
from oscine.extensions.plan.run.scenario import Scenario, Simulated
from oscine.extensions.plan.search.deployed import deployment_of
from oscine.extensions.plan.search.estimate import Demand
from oscine.extensions.plan.search.goals import Goals
from oscine.extensions.plan.search.space import Candidate
from oscine.extensions.plan.sources.gpus import Gpu
from oscine.extensions.plan.sources.origin import Source
from oscine.extensions.plan.traffic.trace import read_trace
from oscine.settings.config import CacheOptions


@dataclass(frozen=True)
class Traffic:
    """The load that a plan must serve."""

    workload: Workload
    sending: Sending
    users: int | None = None
    rate: float | None = None
    trace: Path | None = None

    def part(self, share: float) -> "Traffic":
        """Of the users or of the rate."""
        users = None if self.users is None else max(1, round(self.users * share))
        return replace(self, users=users, rate=None if self.rate is None else self.rate * share)

    def demand(self) -> Demand:
        """Raises ValueError and OSError."""
        work = self.workload
        if self.trace is not None:
            arrivals = read_trace(self.trace, CacheOptions().page_size, speed=self.sending.trace_speed)
            turns = [turn for one in arrivals for turn in one.session]
            prompt = sum(turn.prompt_tokens for turn in turns) // len(turns)
            answer = sum(turn.max_tokens for turn in turns) // len(turns)
            seconds = max(arrivals[-1].ns * NS, 1.0)
            return Demand(max(prompt, 1), 0, max(answer, 1), rate=len(turns) / seconds)
        history = (work.turns - 1) * (work.isl + work.osl) / 2  # of earlier turns, on average
        think_s = work.think * (work.turns - 1) / work.turns
        rate = (self.rate or 0.0) * work.turns
        cached = work.shared_prefix + round(history)
        return Demand(work.isl, cached, work.osl, self.users, rate, think_s, self.sending.burst)


@dataclass(frozen=True)
class Question:
    """All that an answer depends on."""

    model: str
    hardware: tuple[tuple[Gpu, int], ...]  # alternatives: GPUs of one kind, and how many there are at most
    traffic: Traffic
    goals: Goals = field(default_factory=Goals)
    sources: tuple[Source, ...] = ()  # empty: what comes with the package
    prices: tuple[tuple[str, float], ...] = ()  # of a GPU and hour, by its name
    scaled: bool = False
    gpu_memory: int | None = None  # bytes
    seed: int = 0

    def price(self, gpu: Gpu) -> float | None:
        return dict(self.prices).get(gpu.name)

    def scenario(self, candidate: Candidate, requests: int | None, *, share: float = 1.0, seed: int = 0) -> Scenario:
        """The simulation of a candidate, or of a share of its replicas with the same share of the traffic."""
        traffic = self.traffic.part(share)
        some = replace(candidate, replicas=max(1, round(candidate.replicas * share)))
        deployment = deployment_of(self.model, some, traffic.users or 0)
        warm_up = 0 if requests is None else min(requests // 2, traffic.users or requests // 10)
        layout = candidate.layout
        memory = self.gpu_memory or (layout.gpu.memory_bytes if layout.source.file is not None else None)
        simulated = Simulated(self.seed + seed, requests, warm_up, gpu_memory=memory, scaled=self.scaled)
        return Scenario(
            deployment,
            deployment.models[0],
            (candidate.layout.source,),
            simulated,
            traffic.workload,
            traffic.sending,
            Reporting(),
            traffic.users,
            traffic.rate,
            traffic.trace,
        )
