"""A load as it was, and what scaling would have made of it: JSON lines, each what one replica reported at a time.

    {"time_s": 1767225600.0, "model": "gpt-oss-20b", "role": "decode", "replica": "k3x", "running": 12, "waiting": 0}

The names are those of pool_load.report, with max_num_seqs, held_back and held_back_s; what is missing is 0, or as the
deployment has it. A line with `queued` and without role and replica has the number of requests that waited while no
replica could take them. Knows no Ray.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from oscine.extensions.cluster.scaling.policy import EVERY_S, Bounds, Goals, State, decide
from oscine.extensions.cluster.scaling.pool_load import LOOK_BACK_S, PoolLoad, replica_load, report
from oscine.extensions.replicas.spec.deployment import Deployment, ModelSpec, RoleSpec
from oscine.extensions.replicas.spec.snapshot import ClusterSnapshot
from oscine.types import EngineStats, Role

_NAMES = {*report(EngineStats(), EngineStats()), "max_num_seqs", "held_back", "held_back_s", "queued"}
_OF_REPLICA = ("role", "replica")
_HEAD = ("time_s", "model", *_OF_REPLICA)


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    time_s: float
    model: str
    role: Role | None  # None with `queued`: that which takes requests
    replica: str | None
    values: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """A change that scaling would have made."""

    time_s: float  # since the first line
    before: int
    after: int
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class PoolPlan:
    """Of one pool."""

    model: str
    role: Role
    first: int  # replicas at its begin
    steps: list[Step]
    replica_s: float  # replica-seconds that it would have had
    recorded_s: float  # and had


# ---- lines ----


def read_lines(file: Path) -> list[Line]:
    """In the order of time. Raises ValueError: the line, and what is wrong with it."""
    lines = []
    for number, text in enumerate(file.read_bytes().splitlines(), 1):
        if text.strip():
            try:
                lines.append(_line(msgspec.json.decode(text, type=dict[str, Any])))
            except (msgspec.DecodeError, ValueError) as error:
                raise ValueError(f"line {number}: {error}") from None
    if not lines:
        raise ValueError("there is no line")
    return sorted(lines, key=lambda line: line.time_s)


def _line(fields: dict[str, Any]) -> Line:
    head = {name: fields.pop(name, None) for name in _HEAD}
    missing = [name for name in _HEAD if head[name] is None and not ("queued" in fields and name in _OF_REPLICA)]
    unknown = sorted(fields.keys() - _NAMES)
    if missing or unknown:
        raise ValueError(f"{missing[0]} is missing" if missing else f"{unknown[0]!r} is nothing that a replica reports")
    return msgspec.convert(head | {"values": fields}, Line)


class Recorder:
    """Makes lines of what the router says, one snapshot after the other."""

    def __init__(self) -> None:
        self._before: dict[str, EngineStats] = {}

    def take(self, snapshot: ClusterSnapshot) -> Iterator[str]:
        """A replica that is seen for the first time has its counters in the next."""
        for replica in snapshot.replicas:
            values = report(replica.stats, self._before.get(replica.replica, replica.stats))
            held_back = {"held_back": snapshot.queued.get(replica.model, 0), "held_back_s": snapshot.time_s}
            head = {"time_s": snapshot.time_s, "model": replica.model, "role": replica.role, "replica": replica.replica}
            yield msgspec.json.encode(head | values | held_back).decode()
        self._before = {replica.replica: replica.stats for replica in snapshot.replicas}
        there = {replica.model for replica in snapshot.replicas if replica.role != "prefill"}
        for model, queued in snapshot.queued.items():
            if model not in there:
                line = {"time_s": snapshot.time_s, "model": model, "queued": queued}
                yield msgspec.json.encode(line).decode()


# ---- what would have been ----


def plans(lines: Iterable[Line], deployment: Deployment) -> Iterator[PoolPlan]:
    """One a pool. Raises ValueError where the deployment has no such pool."""
    pools: dict[tuple[str, Role], list[Line]] = defaultdict(list)
    for line in lines:
        model = deployment.model(line.model)
        if model is None:
            raise ValueError(f"the deployment has no model {line.model!r}")
        pools[model.name, line.role or model.serving.role].append(line)
    for (name, kind), own in pools.items():
        model = deployment.model(name)
        role = model.role(kind) if model is not None else None
        if model is None or role is None:
            raise ValueError(f"the deployment has no {kind} replicas of {name!r}")
        yield _plan(own, model, role)


def _plan(lines: list[Line], model: ModelSpec, role: RoleSpec) -> PoolPlan:
    """The policy decides every second by what was reported until then."""
    bounds = Bounds(role.replicas.min, role.replicas.max)
    goals, state = Goals(role.role, model.levels, model.scaling), State()
    begin_s, series, steps = lines[0].time_s, PoolSeries(role), []
    seconds = int(lines[-1].time_s - begin_s) + 1
    there = {line.replica for line in lines if line.time_s < begin_s + EVERY_S and line.replica is not None}
    first = target = bounds.clamp(len(there))
    replica_s = recorded_s = 0.0
    rest = iter([*lines, None])
    line = next(rest)
    for second in range(seconds):
        now_s = begin_s + second * EVERY_S
        while line is not None and line.time_s <= now_s:
            series.take(line)
            line = next(rest)
        load = series.load(now_s)
        decision = decide(load, target, bounds, goals, state)
        if decision.replicas != target:
            steps.append(Step(now_s - begin_s, target, decision.replicas, decision.reason))
        target, state = decision.replicas, decision.state
        replica_s, recorded_s = replica_s + target * EVERY_S, recorded_s + load.ready * EVERY_S
    return PoolPlan(model.name, role.role, first, steps, replica_s, recorded_s)


class PoolSeries:
    """What the replicas of a pool reported lately."""

    def __init__(self, role: RoleSpec) -> None:
        self._unsaid = dict.fromkeys(_NAMES, 0.0) | {"max_num_seqs": float(role.engine.scheduler.max_num_seqs)}
        self._replicas: dict[str, dict[str, list[tuple[float, float]]]] = {}
        self._queued = 0.0

    def take(self, line: Line) -> None:
        if line.replica is None:
            self._queued = line.values.get("queued", 0.0)
            return
        own = self._replicas.setdefault(line.replica, {name: [] for name in _NAMES})
        for name, value in (self._unsaid | line.values).items():
            own[name].append((line.time_s, value))
            while own[name][0][0] < line.time_s - LOOK_BACK_S - EVERY_S:
                del own[name][0]

    def load(self, now_s: float) -> PoolLoad:
        loads = [replica_load(series, now_s) for series in self._replicas.values()]
        there = tuple(load for load in loads if load is not None)
        return PoolLoad(now_s, len(there), there, queued=0.0 if there else self._queued)
