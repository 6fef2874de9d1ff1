"""The options of `oscine simulate`, and the simulation that they describe."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oscine.extensions.bench.cli.load_options import Reporting, Sending, Workload
from oscine.settings.option import BYTES, OptionError, Options, option, require

if TYPE_CHECKING:
    from oscine.extensions.bench.serve.arrival import Arrival
    from oscine.extensions.plan.fleet.clients import Traffic
    from oscine.extensions.plan.fleet.engines import EngineSpec
    from oscine.extensions.plan.fleet.simulation import Outcome
    from oscine.extensions.plan.sources.noted import NotedTable
    from oscine.extensions.plan.sources.origin import Source
    from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, RoleSpec
    from oscine.timing.table import StepTable
    from oscine.types import Role

_PER_USER, _OPEN_S = 10, 60
_MOST_S = 1e9  # of a virtual clock


@dataclass(frozen=True)
class Simulated(Options, group="simulation"):
    """The options of the simulation itself."""

    seed: int = option(0, "seed of lengths, arrivals, failures and accepted drafts", "SEED", at_least=0)
    requests: int | None = option(
        None,
        "number of requests; each turn of a session is one",
        "N",
        shown=f"{_PER_USER} sessions per user; with --rate, the arrivals of {_OPEN_S} seconds; with --trace, all",
        at_least=1,
    )
    warm_up: int = option(0, "number of first requests that are not measured", "N", at_least=0)
    served: str | None = option(None, "model of the deployment that gets the requests", "NAME", shown="the only one")
    gpu_memory: int | None = option(
        None,
        "memory of a GPU, from which the size of a cache follows",
        BYTES,
        shown="of the GPU that --steps names, or the cache of the table",
        above=0,
    )
    scaled: bool = option(False, "extrapolate step times beyond the measured ones")
    acceptance: float | None = option(
        None,
        "probability that a draft is accepted if those before it are; needed for engines with speculative-config",
        "SHARE",
        shown="none",
        at_least=0,
        at_most=1,
    )
    start_time: float = option(60.0, "seconds from the order of a replica to a ready one", "SECONDS", at_least=0)
    failures: tuple[str, ...] = option(
        (), "times at which a replica is lost, in seconds from the start", "SECONDS", nargs="+", shown="none"
    )
    until: float | None = option(None, "virtual time at which the simulation ends", "SECONDS", above=0, shown="no end")

    def failures_s(self) -> tuple[float, ...]:
        """Raises OptionError."""
        found: list[float] = []
        for text in self.failures:
            try:
                found.append(float(text))
            except ValueError:
                require(False, "failures", "seconds", text)
            require(0 <= found[-1] < _MOST_S, "failures", f"from 0 to below {_MOST_S:,.0f} seconds", text)
        return tuple(found)


@dataclass(frozen=True)
class Scenario:
    """A deployment, step times, and a load."""

    deployment: "Deployment"
    model: "ModelSpec"
    sources: "tuple[Source, ...]"
    simulated: Simulated
    workload: Workload
    sending: Sending
    reporting: Reporting
    users: int | None = None
    rate: float | None = None
    trace: Path | None = None
    failures_s: tuple[float, ...] = ()

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Scenario":
        """Reads the deployment. Raises CommandError, ValueError and OSError."""
        from oscine.extensions.cluster.cli.deployment_file import read_deployment
        from oscine.extensions.plan.sources.origin import Source

        simulated, workload = Simulated.of(given), Workload.of(given)
        deployment = read_deployment(given["file"], finds_models=False)
        sources = tuple(Source.of(text) for text in given["steps"])
        model = _model(deployment, simulated.served)
        _check_acceptance(model, simulated.acceptance)
        users, rate, trace = (given.get(name) for name in ("users", "rate", "trace"))
        require(users is None or users > 0, "users", "positive", users)
        require(rate is None or rate > 0, "rate", "positive", rate)
        load = workload, Sending.of(given), Reporting.of(given)
        return cls(deployment, model, sources, simulated, *load, users, rate, trace, simulated.failures_s())

    @property
    def arrival(self) -> "Arrival":
        """Of a trace, its own times count."""
        if self.trace is None:
            return self.sending.arrival(self.users, self.rate)
        from oscine.extensions.bench.serve.arrival import Arrival

        return Arrival(rate=1.0)

    @property
    def num_gpus(self) -> int | None:
        """Of the replicas that are always there; None on CPUs."""
        return round(sum(role.gpus * max(role.replicas.min, 1) for role in self.model.roles)) or None

    @property
    def load_text(self) -> str:
        """The load in words."""
        if self.trace is not None:
            speed = self.sending.trace_speed
            faster = "" if speed == 1 else f" at {speed:g} times its speed"
            return f"the trace {self.trace}{faster}, whose hit rates are lower bounds"
        load = f"{self.users:,} users" if self.users is not None else f"{self.rate:g} sessions per second"
        return f"{load}, {self.workload}"

    def traffic(self) -> "Traffic":
        """Raises OptionError for times beyond the virtual clock, ValueError and OSError."""
        from oscine.extensions.plan.clock.agenda import NS, ns_of
        from oscine.extensions.plan.fleet.clients import Traffic
        from oscine.extensions.plan.traffic.random_sessions import sessions
        from oscine.extensions.plan.traffic.trace import read_trace

        page_size, simulated = self.model.serving.engine.cache.page_size, self.simulated
        if self.trace is not None:
            speed = self.sending.trace_speed
            found = read_trace(self.trace, page_size, count=simulated.requests, speed=speed)
            _check_span("trace-speed", speed, found[-1].ns * NS)
            return Traffic([one.session for one in found], [one.ns for one in found])
        arrival, count = self.arrival, self._num_sessions()
        _check_span("think", self.workload.think, self.workload.think * self.workload.turns)
        made = list(islice(sessions(self.workload.shapes(simulated.seed), page_size), count))
        if self.users is not None:
            return Traffic(made, users=self.users, think_s=self.workload.think)
        offsets_s = arrival.offsets_s(count, simulated.seed)
        _check_span("rate", self.rate or 0.0, offsets_s[-1])
        offsets_ns = [*map(ns_of, offsets_s)]
        return Traffic(made, offsets_ns, think_s=self.workload.think)

    def _num_sessions(self) -> int:
        if self.simulated.requests is not None:
            return -(-self.simulated.requests // self.workload.turns)
        if self.users is not None:
            return _PER_USER * self.users
        assert self.rate is not None
        return max(1, round(_OPEN_S * self.rate))

    @cached_property
    def tables(self) -> "dict[Role, NotedTable]":
        """Of each role. Raises ValueError, OSError, and NotMeasuredError if there is none."""
        from oscine.extensions.plan.sources.noted import NotedTable

        return {role.role: NotedTable(self._table(role)) for role in self.model.roles}

    def _table(self, role: "RoleSpec") -> "StepTable":
        from oscine.checkpoint.hub import shapes_of
        from oscine.extensions.plan.fleet.engines import table_for
        from oscine.timing.answer import NotMeasuredError
        from oscine.timing.read import read_table

        options, scaled = role.engine.model, self.simulated.scaled
        files = [one.file for one in self.sources if one.file is not None]
        if files:
            if (config := shapes_of(options)) is not None:
                for one in self.sources:
                    one.check_model(options.random_weights or options.model, config)
            return table_for(role, [read_table(file, scaled=scaled) for file in files])
        sharing = role.data_parallel_size if role.enable_expert_parallel else 1
        reasons = []
        for source in self.sources:
            try:
                return source.table(
                    options.random_weights or options.model,
                    options.tensor_parallel_size,
                    sharing,
                    kv=role.engine.cache.kv_cache_dtype,
                    activations=options.activation_dtype,
                    scaled=scaled,
                )
            except NotMeasuredError as error:
                reasons.append(str(error))
        raise NotMeasuredError("; ".join(reasons))

    @property
    def gpu_memory(self) -> int | None:
        """Bytes of a GPU: given, or of the GPU whose step times come with the package."""
        known = next((one.gpu.memory_bytes for one in self.sources if one.gpu is not None), None)
        return self.simulated.gpu_memory or known

    def engines(self) -> "dict[Role, EngineSpec]":
        """Raises ValueError, OSError, and NotMeasuredError if a role has no table."""
        from oscine.extensions.plan.fleet.engines import spec_of

        acceptance, seed = self.simulated.acceptance, self.simulated.seed
        return {
            role.role: spec_of(role, self.tables[role.role], self.gpu_memory, acceptance=acceptance, seed=seed)
            for role in self.model.roles
        }

    def check_lengths(self, engines: "dict[Role, EngineSpec]") -> None:
        """Raises OptionError for sessions that no engine can serve to their end. Traces are sent as they are."""
        if self.trace is None:
            check_lengths(self.workload, min(engine.max_model_len for engine in engines.values()), self.model.name)

    def simulate(self, engines: "dict[Role, EngineSpec]", traffic: "Traffic") -> "Outcome":
        """Raises NotMeasuredError for a step that the tables do not know."""
        from oscine.extensions.plan.fleet.pool import Timing
        from oscine.extensions.plan.fleet.simulation import simulate

        simulated = self.simulated
        return simulate(
            self.model,
            engines,
            traffic,
            timing=Timing(simulated.start_time, self.deployment.server.drain_s),
            failures_s=self.failures_s,
            until_s=simulated.until,
            seed=simulated.seed,
        )


def check_lengths(workload: Workload, most: int, model: str) -> None:
    """`most`: tokens of a prompt and its answer. Raises OptionError if they are more without any spread."""
    each, shared = workload.isl + workload.osl, workload.shared_prefix
    if (alone := shared + each) > most:
        other = "--osl and --shared-prefix" if shared else "--osl"
        rule = f"at most {most:,} tokens together with {other}, for {model}"
        raise OptionError("isl", f"must be {rule}, not {alone:,}", "osl")
    if (tokens := shared + each * workload.turns) > most:
        rule = f"at most {(most - shared) // each:,} with these lengths: {model} takes {most:,} tokens"
        raise OptionError("turns", f"must be {rule}, and the last turn has {tokens:,}")


def _check_span(option: str, given: float, seconds: float) -> None:
    """Raises OptionError."""
    if seconds >= _MOST_S:
        rule = f"such that the load takes less than {_MOST_S:,.0f} seconds"
        raise OptionError(option, f"must be {rule}; with {given:g} it takes {seconds:,.0f}")


def _check_acceptance(model: "ModelSpec", acceptance: float | None) -> None:
    """Raises OptionError."""
    has_drafts = any(role.engine.speculation.is_on for role in model.roles)
    if has_drafts and acceptance is None:
        raise OptionError("acceptance", "is needed: the engines have drafts, and which are accepted is not known")
    if acceptance is not None and not has_drafts:
        raise OptionError("acceptance", "needs engines with speculative-config")


def _model(deployment: "Deployment", name: str | None) -> "ModelSpec":
    """Raises OptionError."""
    names = [model.name for model in deployment.models]
    if name is None:
        require(len(names) == 1, "served", f"given, one of {', '.join(names)}", name)
        return deployment.models[0]
    model = deployment.model(name)
    require(model is not None, "served", f"one of {', '.join(names)}", name)
    assert model is not None
    return model
