"""The number of replicas of a pool: pure policy, from the reports of its replicas and its earlier decisions.

Up at once, by as many as are needed. Down in steps, after a cool-down in which fewer would have been enough throughout.
The state is passed in and out; there is no clock.
"""

import math
from dataclasses import dataclass, field, replace

from oscine.cluster.scaling.demand import Goals, Need, cautious_needs, lateness, needs
from oscine.cluster.scaling.measured_capacity import MeasuredCapacity
from oscine.cluster.scaling.pool_load import PoolLoad

_START_S = 10.0  # that a replica takes to start, until a start was measured
_NEWEST_START = 0.5  # weight of the last measured start
_WHOLE = 0.02  # of a replica: a need may exceed a whole number by this, which is below the accuracy of any measurement
# Missing replica-seconds before a step up. A load twice too large for one replica reaches this in two seconds; a load
# just above it waits until its noise averages out. For several replicas it grows with the root of their number, as the
# noise of a load does.
_EXCESS = 2.0
_LONGEST_S = 5.0  # between two decisions, for which a need is assumed to last
_STEP_DOWN = 0.25  # of the replicas at most, but at least one: a wrong estimate shows before all replicas are gone
# A step up within this many cool-downs after a step down shows that the step down was wrong. Then the cool-down
# doubles, up to this multiple of the configured one. It returns to normal after twice this time without such a step.
_REGRET, _MOST_PATIENCE = 10.0, 8.0


@dataclass(frozen=True, slots=True)
class Bounds:
    min: int
    max: int

    def clamp(self, replicas: int) -> int:
        return max(self.min, min(self.max, replicas))


@dataclass(frozen=True, slots=True)
class State:
    """The policy's memory of a pool. Times are those of the loads."""

    measured: MeasuredCapacity = field(default_factory=MeasuredCapacity)
    start_s: float = _START_S  # that a replica takes to start
    time_s: float = -math.inf  # of the last decision
    watched_s: float = math.inf  # since when the number of replicas has not changed, or loads are known
    # (time, cautious need): a queue whose needs fall, so the first entry is the largest need since its time
    wanted: tuple[tuple[float, int], ...] = ()
    up_s: float = -math.inf  # last step up
    down_s: float = -math.inf  # last step down
    starting_s: float | None = None  # since when replicas that were asked for are not ready
    late_s: float | None = None  # since when a service level is not met
    idle_s: float | None = None  # since when there was no request
    excess: float = 0.0  # missing replica-seconds
    patience: float = 1.0  # times the cool-down


@dataclass(frozen=True, slots=True)
class Decision:
    replicas: int
    reason: str  # in words
    state: State


def decide(load: PoolLoad, target: int, bounds: Bounds, goals: Goals, state: State) -> Decision:
    """`target`: the replicas that were wanted last. Never outside the bounds."""
    elapsed_s = min(max(load.time_s - state.time_s, 0.0), _LONGEST_S) if math.isfinite(state.time_s) else 0.0
    state = _observe(load, target, goals, state, elapsed_s)
    within = bounds.clamp(target)
    if within != target:
        return Decision(within, f"between {bounds.min} and {bounds.max} are allowed", _changed(state, target, within))
    if load.ready == 0:
        return _from_zero(load, target, bounds, state)
    if not load.replicas:
        return Decision(target, "no replica reports", state)
    if _idle_long(load, target, bounds, goals, state):
        return Decision(0, f"nobody asked for anything in {goals.idle_s:g} s", _changed(state, target, 0))
    need = _largest([*needs(load, goals, state.measured, state.start_s), *_for_lateness(load, target, goals, state)])
    state = replace(state, excess=max(0.0, state.excess + (need.replicas - target) * elapsed_s))
    if bounds.clamp(_whole(need.replicas)) > target:
        return _up(load, target, bounds.clamp(_whole(need.replicas)), need.why, goals, state)
    return _down(load, target, bounds, goals, state)


def _observe(load: PoolLoad, target: int, goals: Goals, state: State, elapsed_s: float) -> State:
    """Updates the measurements, before any decision."""
    measured = state.measured.learn(load.replicas, elapsed_s)
    late = lateness(load, goals, measured) is not None
    state = replace(
        state,
        measured=measured,
        time_s=load.time_s,
        watched_s=min(state.watched_s, load.time_s),
        late_s=(load.time_s if state.late_s is None else state.late_s) if late else None,
        idle_s=(load.time_s if state.idle_s is None else state.idle_s) if load.idle else None,
    )
    if state.starting_s is not None and load.ready >= target:
        took_s = load.time_s - state.starting_s
        start_s = state.start_s + _NEWEST_START * (took_s - state.start_s)
        return replace(state, starting_s=None, start_s=start_s)
    return state


def _from_zero(load: PoolLoad, target: int, bounds: Bounds, state: State) -> Decision:
    first = bounds.clamp(1)
    if load.queued > 0 and target < first:
        return Decision(first, "the first request", _changed(state, target, first))
    return Decision(target, "no replica is ready", state)


def _idle_long(load: PoolLoad, target: int, bounds: Bounds, goals: Goals, state: State) -> bool:
    idle_s = load.time_s - state.idle_s if state.idle_s is not None else 0.0
    return bounds.min == 0 and target == 1 and not load.num_missing and load.idle and idle_s >= goals.idle_s


def _up(load: PoolLoad, target: int, more: int, why: str, goals: Goals, state: State) -> Decision:
    state = _remember(state, more, goals)
    if state.excess < _EXCESS * math.sqrt(target):
        return Decision(target, f"{why}; that may pass", state)
    if load.time_s - state.up_s < goals.up_cooldown_s:
        return Decision(target, f"{why}; the last step up is too recent", state)
    return Decision(more, why, _changed(state, target, more, goals))


def _for_lateness(load: PoolLoad, target: int, goals: Goals, state: State) -> list[Need]:
    """One more replica if a level is missed for longer than a backlog would last until a new replica is up. This covers
    loads that the needs do not foresee. It does nothing while replicas start, or while some do not report.
    """
    why = lateness(load, goals, state.measured)
    patience_s = goals.ttft_s + state.start_s
    if why is None or state.late_s is None or load.num_missing or load.ready != target:
        return []
    if load.time_s - max(state.late_s, state.up_s) < patience_s:
        return []
    return [Need(target + 1.0, f"{why}, since {load.time_s - state.late_s:.0f} s")]


def _down(load: PoolLoad, target: int, bounds: Bounds, goals: Goals, state: State) -> Decision:
    need = _largest(cautious_needs(load, goals, state.measured, state.start_s))
    want = bounds.clamp(max(1, _whole(need.replicas)))
    blocked = load.num_missing > 0 or lateness(load, goals, state.measured) is not None
    state = _remember(state, max(want, target) if blocked else want, goals)
    cooldown_s = goals.down_cooldown_s * state.patience
    enough = max(state.wanted[0][1], target - max(1, int(target * _STEP_DOWN)))
    if enough >= target or load.time_s - state.watched_s < cooldown_s:
        return Decision(target, need.why, state)
    reason = f"{need.why}: {enough} would have been enough for {cooldown_s:g} s"
    return Decision(enough, reason, _changed(state, target, enough))


def _remember(state: State, want: int, goals: Goals) -> State:
    """Keeps the largest need of the last cool-down; drops earlier needs that are not larger."""
    from_s = state.time_s - goals.down_cooldown_s * state.patience
    kept = tuple((time_s, other) for time_s, other in state.wanted if time_s >= from_s and other > want)
    return replace(state, wanted=(*kept, (state.time_s, want)))


def _changed(state: State, before: int, after: int, goals: Goals | None = None) -> State:
    """Records a step. `goals` is given for a step up that the load asked for."""
    now_s = state.time_s
    if after < before:
        return replace(state, down_s=now_s, watched_s=now_s, starting_s=None, late_s=None, excess=0.0)
    return replace(
        state,
        up_s=now_s,
        watched_s=now_s,
        starting_s=now_s if state.starting_s is None else state.starting_s,
        late_s=None,
        excess=0.0,
        patience=state.patience if goals is None else _patience(state, goals),
    )


def _patience(state: State, goals: Goals) -> float:
    """The factor of the cool-down after a step up: doubled if the last step down was wrong."""
    regretted_s = _REGRET * goals.down_cooldown_s * state.patience
    since_s = state.time_s - state.down_s
    if since_s < regretted_s:
        return min(2 * state.patience, _MOST_PATIENCE)
    return 1.0 if since_s > 2 * regretted_s else state.patience


def _largest(found: list[Need]) -> Need:
    return max(found, key=lambda need: need.replicas, default=Need(0.0, "there is no load"))


def _whole(replicas: float) -> int:
    return math.ceil(min(replicas, 1e6) - _WHOLE)
