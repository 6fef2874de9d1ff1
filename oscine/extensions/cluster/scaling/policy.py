"""How many replicas a pool shall have: pure policy, from what its replicas report and what it did before.

A load needs a number of replicas, by sequences, pages and prompts, that does not depend on how many there are. Up at
once, by as many as are needed; down, in steps, when fewer have been enough for the whole cool-down. What it remembers
is passed in and out.
"""

import math
from dataclasses import dataclass, field, replace

from oscine.extensions.cluster.scaling.capacity import Capacity
from oscine.extensions.cluster.scaling.pool_load import PoolLoad
from oscine.extensions.replicas.spec.deployment import ScalingOptions, ServiceLevels
from oscine.types import Role

# Of a replica's sequences, and of its prompt tokens per second: arrivals come in clusters, and beyond this many wait.
TARGET_USE = 0.8
TARGET_PAGES = 0.85  # running sequences grow, and one that finds no page is computed again
TARGET_ITL = 0.9  # of the level: a mean at the level is beyond it half of the time
# What fewer replicas must have to spare: a tenth for errors of measurement, and a quarter of a replica. A load of few
# requests varies more.
MARGIN, MARGIN_REPLICAS = 1.1, 0.25
EVERY_S = 1.0  # between two decisions: replicas report as often
_START_S = 10.0  # that a replica takes to start, until it was seen
_WHOLE = 0.02  # of a replica, that a need may exceed a whole number by: less than any measurement is good for
# Replica-seconds that were needed and not there, before a step up. A load twice too large for one replica has them in
# two seconds; with a load just above, noise evens out first. The noise grows as the root of the load.
_EXCESS = 2.0
_LONGEST_S = 5.0  # between two decisions, that a need is taken to last
_STEP_DOWN = 0.25  # of the replicas, at most, but one: what was wrong about the load shows before all is gone


@dataclass(frozen=True, slots=True)
class Goals:
    """What a pool is scaled for: its part of the deployment file."""

    role: Role
    levels: ServiceLevels = field(default_factory=ServiceLevels)
    scaling: ScalingOptions = field(default_factory=ScalingOptions)


@dataclass(frozen=True, slots=True)
class Bounds:
    min: int
    max: int

    def clamp(self, replicas: int) -> int:
        return max(self.min, min(self.max, replicas))


@dataclass(frozen=True, slots=True)
class State:
    """What the policy remembers of a pool. Times are those of the loads."""

    capacity: Capacity = field(default_factory=Capacity)
    start_s: float = _START_S  # that a replica takes to start
    time_s: float = -math.inf  # of the last decision
    up_s: float = -math.inf  # last step up
    starting_s: float | None = None  # since when replicas that were asked for are not ready
    idle_s: float | None = None  # since when nothing was asked for
    excess: float = 0.0  # replica-seconds that were needed and not there
    calm_s: float | None = None  # since when fewer replicas would have been enough
    calm: int = 0  # so many, all the time since


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # in words
    state: State


def decide(load: PoolLoad, target: int, bounds: Bounds, goals: Goals, state: State) -> Decision:
    """`target`: the replicas that were wanted last. Never outside the bounds."""
    elapsed_s = min(max(load.time_s - state.time_s, 0.0), _LONGEST_S) if math.isfinite(state.time_s) else 0.0
    state = _observe(load, target, state, elapsed_s)
    within = bounds.clamp(target)
    if within != target:
        return _step(state, target, within, f"between {bounds.min} and {bounds.max} are allowed")
    if load.ready == 0:
        first = bounds.clamp(1)
        if load.queued > 0 and target < first:
            return _step(state, target, first, "the first request")
        return Decision(target, "no replica is ready", state)
    if not load.replicas:
        return Decision(target, "no replica reports", state)
    idle_s = load.time_s - state.idle_s if state.idle_s is not None else 0.0
    if bounds.min == 0 and target == 1 and not load.num_missing and load.idle and idle_s >= goals.scaling.idle_s:
        return _step(state, target, 0, f"nothing was asked for in {goals.scaling.idle_s:g} s")
    replicas, why = need(load, goals, state)
    state = replace(state, excess=max(0.0, state.excess + (replicas - target) * elapsed_s))
    more = bounds.clamp(_whole(replicas))
    if more > target:
        return _up(state, target, more, why, goals)
    fewer = bounds.clamp(max(1, _whole(replicas * MARGIN + MARGIN_REPLICAS)))
    return _down(state, target, target if load.num_missing else fewer, why, goals)


def _observe(load: PoolLoad, target: int, state: State, elapsed_s: float) -> State:
    """Takes in what can be seen."""
    state = replace(
        state,
        capacity=state.capacity.learn(load.replicas, elapsed_s),
        time_s=load.time_s,
        idle_s=(load.time_s if state.idle_s is None else state.idle_s) if load.idle else None,
    )
    if state.starting_s is not None and load.ready >= target:
        took_s = load.time_s - state.starting_s
        return replace(state, starting_s=None, start_s=(state.start_s + took_s) / 2)
    return state


def _up(state: State, target: int, more: int, why: str, goals: Goals) -> Decision:
    state = replace(state, calm_s=None)
    if state.excess < _EXCESS * math.sqrt(target):
        return Decision(target, f"{why}; that may pass", state)
    if state.time_s - state.up_s < goals.scaling.up_cooldown_s:
        return Decision(target, f"{why}; the last step up is too recent", state)
    return _step(state, target, more, why)


def _down(state: State, target: int, fewer: int, why: str, goals: Goals) -> Decision:
    if fewer >= target:
        return Decision(target, why, replace(state, calm_s=None))
    since_s, calm = (state.time_s, fewer) if state.calm_s is None else (state.calm_s, max(state.calm, fewer))
    state = replace(state, calm_s=since_s, calm=calm)
    if state.time_s - since_s < goals.scaling.down_cooldown_s:
        return Decision(target, why, state)
    enough = max(calm, target - max(1, int(target * _STEP_DOWN)))
    return _step(
        state, target, enough, f"{why}: {enough} would have been enough for {goals.scaling.down_cooldown_s:g} s"
    )


def _step(state: State, before: int, after: int, why: str) -> Decision:
    up = after > before
    starting_s = (state.time_s if state.starting_s is None else state.starting_s) if up else None
    up_s = state.time_s if up else state.up_s
    return Decision(after, why, replace(state, up_s=up_s, starting_s=starting_s, excess=0.0, calm_s=None))


# ---- what a load needs ----


def need(load: PoolLoad, goals: Goals, state: State) -> tuple[float, str]:
    """Replicas, and the reason: the most of what sequences, pages and prompts need."""
    horizon_s = goals.levels.ttft_s + state.start_s  # a backlog that is gone before a new replica helps needs none
    wanted = _wanted_sequences(load, horizon_s)
    found = [_sequences(load, wanted, goals, state.capacity), _pages(load, wanted, goals)]
    if goals.role != "decode":
        found.append(_prompts(load, state.capacity, horizon_s))
    return max(found)


def _wanted_sequences(load: PoolLoad, horizon_s: float) -> float:
    """Those that run, and those that must for all that wait to have had their turn in horizon_s.

    How long a request runs follows from how many do and how many begin per second (Little's law).
    """
    running, window_s = load.total("running"), max((r.window_s for r in load.replicas), default=0.0)
    begun = load.total("first_tokens")
    turn_s = running * window_s / begun if begun > 0 else horizon_s
    return running + (load.requests - running) * min(1.0, turn_s / horizon_s)


def _sequences(load: PoolLoad, wanted: float, goals: Goals, capacity: Capacity) -> tuple[float, str]:
    """A request needs a sequence of its own, among so few others that its tokens come in time."""
    bears, why = math.inf, ""
    slots = max((r.max_num_seqs for r in load.replicas), default=0.0)
    if slots > 0:
        bears, why = TARGET_USE * slots, f"{TARGET_USE:.0%} of its {slots:.0f} sequences"
    in_time = TARGET_ITL * capacity.sequences(goals.levels.itl_s)
    if goals.role != "prefill" and in_time < bears:
        bears, why = in_time, f"with further tokens within {goals.levels.itl_s * 1e3:.0f} ms"
    running, waiting = load.total("running"), load.requests - load.total("running")
    said = f"{running:.1f} requests run and {waiting:.1f} wait, and a replica bears {bears:.1f} ({why})"
    return wanted / bears, said if load.requests else "there is no load"


def _pages(load: PoolLoad, wanted: float, goals: Goals) -> tuple[float, str]:
    """What waits for a place will need pages as those do that run; prompts of a prefill pool wait for their turn."""
    held, running = load.total("kv_usage"), load.total("running")
    if goals.role != "prefill" and running >= 1:
        held *= max(1.0, wanted / running)
    return held / TARGET_PAGES, f"contexts want {held:.2f} times a replica's pages, and it bears {TARGET_PAGES:.0%}"


def _prompts(load: PoolLoad, capacity: Capacity, horizon_s: float) -> tuple[float, str]:
    """The prompts that come, and those that wait."""
    bears, coming = capacity.prompt_tokens_s, capacity.coming_tokens_s
    if bears is None:
        return 0.0, ""
    asked, cached = load.total("asked_tokens"), load.total("cached_tokens")
    backlog = load.total("queued_tokens") * (1 - cached / asked if asked > 0 else 1.0)
    return (
        coming / (bears * TARGET_USE) + backlog / (bears * horizon_s),
        f"{coming:,.0f} tokens/s of prompts come and {backlog:,.0f} wait, and a replica computes {bears:,.0f}/s",
    )


def _whole(replicas: float) -> int:
    return math.ceil(min(replicas, 1e6) - _WHOLE)
