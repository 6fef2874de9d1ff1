"""The number of replicas: against a simulated queue that is independent of the policy, and one decision at a time."""

import dataclasses
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscine.extensions.cluster.scaling.policy import Bounds, Decision, Goals, State, decide
from oscine.extensions.cluster.scaling.pool_load import PoolLoad, ReplicaLoad
from oscine.extensions.replicas.spec.deployment import ScalingOptions, ServiceLevels
from oscine.types import Role
from tests.extensions.cluster.pool_simulation import Machine, Simulation, Work

GOALS = Goals("aggregated", ServiceLevels(ttft_s=2.0, itl_s=0.1), ScalingOptions(5.0, 30.0, 120.0))
FEW, MANY = Machine(slots=4), Machine(slots=64)
WORK, BOUNDS = Work(), Bounds(1, 8)


def bears(machine: Machine, work: Work = WORK, itl_s: float = 0.1) -> float:
    """Requests/s of one replica that has 80 % of its sequences, or as many as the level allows."""
    sequences = min(0.8 * machine.slots, (itl_s - machine.constant_s) / machine.each_s)
    return sequences / (work.output * (machine.constant_s + machine.each_s * sequences))


def simulate(machine: Machine, replicas: float, seconds: float, **options: object) -> Simulation:
    """A constant load that so many replicas bear."""
    rate = replicas * bears(machine)
    known: dict[str, object] = {"goals": GOALS, "bounds": Bounds(1, 20), "rate": lambda now_s: rate}
    return Simulation(machine, WORK, **(known | options)).run(seconds)  # type: ignore[arg-type]


# ---- a constant load ----


@pytest.mark.long
@pytest.mark.parametrize(("machine", "replicas"), [(FEW, 0.4), (FEW, 3.3), (MANY, 0.6), (MANY, 1.6), (MANY, 7.5)])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_constant_load_of_any_size_is_met_without_flapping(machine: Machine, replicas: float, seed: int) -> None:
    seen = simulate(machine, replicas, 600, seed=seed)
    later = [target for now_s, target in seen.targets if now_s > 300]
    waits = [wait_s for now_s, wait_s in seen.waits if now_s > 300]
    assert seen.reversals(300) <= 1
    assert math.floor(replicas) <= min(later)
    assert max(later) <= math.ceil(2 * replicas + 2)
    assert sum(waits) / len(waits) < GOALS.levels.ttft_s


def test_a_wrong_step_down_is_not_repeated_soon() -> None:
    """At the very edge noise decides, and the margin of a step down keeps replicas."""
    seen = simulate(FEW, 1.0, 1500, seed=3)
    assert seen.reversals() <= 4


# ---- steps ----


@pytest.mark.parametrize("machine", [FEW, MANY])
def test_a_step_up_is_followed_at_once_and_enough_of_it_in_half_a_minute(machine: Machine) -> None:
    low, high = 0.5 * bears(machine), 5.0 * bears(machine)
    seen = simulate(machine, 0, 260, rate=lambda now_s: low if now_s < 200 else high)
    assert seen.at(199) <= 2
    assert seen.at(215) > seen.at(199)
    assert 5 <= seen.at(245) <= 12


def test_replicas_go_one_after_the_other_when_the_load_ends() -> None:
    seen = simulate(FEW, 0, 500, rate=lambda now_s: 4 * bears(FEW) if now_s < 150 else 0.0)
    downs = [(now_s, d) for now_s, d in seen.decisions if now_s > 150]
    assert seen.at(499) == 1
    assert all(decision.replicas >= 0.7 * 4 for now_s, decision in downs if now_s < 150 + GOALS.scaling.down_cooldown_s)
    assert all(later[0] - sooner[0] >= GOALS.scaling.down_cooldown_s for sooner, later in pairwise(downs))


def test_a_pool_that_nobody_asks_goes_to_zero_where_it_may_and_comes_back_with_the_first_request() -> None:
    def rate(now_s: float) -> float:
        return 0.5 * bears(FEW) if now_s < 60 or now_s > 400 else 0.0

    seen = simulate(FEW, 0, 440, rate=rate, bounds=Bounds(0, 4))
    zero_s = next(now_s for now_s, target in seen.targets if target == 0)
    back_s = next(now_s for now_s, target in seen.targets if now_s > 400 and target > 0)
    assert 60 + GOALS.scaling.idle_s <= zero_s <= 110 + GOALS.scaling.idle_s
    assert seen.queue or seen.waits[-1][0] > 400
    assert back_s <= next(now_s for now_s, wait_s in seen.waits if now_s > 400)
    assert min(target for _, target in simulate(FEW, 0, 300, rate=lambda now_s: 0.0).targets) == 1


def test_a_replica_that_was_started_from_zero_has_its_whole_idle_time_before_it() -> None:
    """Also where its only request was too short to be seen, and Serve started it without asking the policy."""
    quiet = [PoolLoad(float(now_s), 0, ()) for now_s in range(200)]
    back = [PoolLoad(float(now_s), 1, busy(1)) for now_s in range(210, 210 + int(GOALS.scaling.idle_s))]
    state = after(quiet, 0, Bounds(0, 4)).state
    for load in back:
        decision = decide(load, 1, Bounds(0, 4), GOALS, state)
        state = decision.state
        assert decision.replicas == 1
    assert decide(PoolLoad(211.0 + GOALS.scaling.idle_s, 1, busy(1)), 1, Bounds(0, 4), GOALS, state).replicas == 0


def test_no_pool_goes_to_zero_while_serve_still_remembers_a_request() -> None:
    """It would start a replica at once, for a request that had its answer."""
    loads = [PoolLoad(float(now_s), 1, busy(1), queued=0.2) for now_s in range(200)]
    assert after(loads, 1, Bounds(0, 4)).replicas == 1


# ---- which pool ----


def pool(role: Role, machine: Machine, work: Work, rate: float) -> Simulation:
    goals = dataclasses.replace(GOALS, role=role)
    return Simulation(machine, work, goals, Bounds(1, 10), lambda now_s: rate).run(200)


def test_the_two_pools_scale_apart() -> None:
    """Long prompts with short answers want prefill replicas, the other way round decode replicas."""
    prefill, decode = Machine(slots=64, constant_s=1e-4, each_s=0.0), Machine(slots=32, prompt_tokens_s=1e9)
    reading, writing = (4.0, Work(prompt=6000, output=20)), (4.0, Work(prompt=60, output=600))

    def sizes(rate: float, work: Work) -> tuple[int, int]:
        first = pool("prefill", prefill, Work(work.prompt, 1), rate)
        return first.target, pool("decode", decode, Work(1, work.output), rate).target

    (more_prefill, few_decode), (few_prefill, more_decode) = sizes(*reading), sizes(*writing)
    assert more_prefill >= 4 > 2 >= few_decode
    assert few_prefill == 1 < 4 <= more_decode


# ---- one decision ----


def busy(replicas: int, **load: float) -> tuple[ReplicaLoad, ...]:
    return (ReplicaLoad(max_num_seqs=8, **load),) * replicas


def after(loads: list[PoolLoad], target: int, bounds: Bounds = BOUNDS) -> Decision:
    """The last of several decisions."""
    decision = Decision(target, "", State())
    for load in loads:
        decision = decide(load, decision.replicas, bounds, GOALS, decision.state)
    return decision


def seconds(count: int, ready: int, replicas: tuple[ReplicaLoad, ...]) -> list[PoolLoad]:
    return [PoolLoad(float(now_s), ready, replicas) for now_s in range(count)]


def test_replicas_that_do_not_report_change_nothing() -> None:
    assert after(seconds(100, 3, ()), 3).replicas == 3
    assert after(seconds(100, 3, busy(2)), 3).replicas == 3
    assert after(seconds(100, 0, ()), 2).replicas == 2
    assert after(seconds(100, 3, busy(3)), 3).replicas < 3


def test_missing_replicas_in_a_constant_load_cause_no_step_down() -> None:
    seen = simulate(FEW, 3.3, 400, silent=lambda now_s: now_s > 200, seed=1)
    assert seen.at(399) >= seen.at(200)


def test_pages_that_run_short_want_more_replicas() -> None:
    decision = after(seconds(10, 1, busy(1, running=3, waiting=3, kv_usage=0.95, first_tokens=1)), 1)
    assert decision.replicas >= 2
    assert "pages" in decision.reason


def test_requests_that_the_router_holds_back_count_only_while_nobody_has_room() -> None:
    full = busy(1, running=8, waiting=4, held_back=40, held_back_s=1.0)
    assert after(seconds(10, 1, full), 1).replicas > 5
    spare = (*busy(1, running=8, held_back=40, held_back_s=1.0), *busy(1, running=1))
    assert after(seconds(10, 2, spare), 2).replicas == 2


def test_a_level_that_one_sequence_alone_exceeds_starts_nothing() -> None:
    slow = busy(1, running=1, inter_tokens=30, inter_token_s=30 * 0.5)
    assert after(seconds(200, 1, slow), 1).replicas == 1


def test_tokens_later_than_their_level_want_more_replicas() -> None:
    slow = busy(1, running=6, inter_tokens=200, inter_token_s=200 * 0.2)
    decision = after(seconds(10, 1, slow), 1)
    assert decision.replicas >= 2
    assert "further tokens" in decision.reason


loads = st.builds(
    ReplicaLoad,
    running=st.floats(0, 64),
    waiting=st.floats(0, 1000),
    queued_tokens=st.floats(0, 1e6),
    kv_usage=st.floats(0, 1),
    least_queued_tokens=st.floats(0, 1e6),
    most_running=st.floats(0, 64),
    max_num_seqs=st.sampled_from([0.0, 1.0, 8.0, 64.0]),
    window_s=st.floats(0, 5),
    asked_tokens=st.floats(0, 1e6),
    cached_tokens=st.floats(0, 1e6),
    first_tokens=st.floats(0, 100),
    inter_tokens=st.floats(0, 1e4),
    inter_token_s=st.floats(0, 1e4),
    held_back=st.floats(0, 1000),
)
pools = st.tuples(st.floats(0.1, 60), st.integers(0, 5), st.lists(loads, max_size=4))


@pytest.mark.long
@settings(max_examples=60)
@given(
    st.sampled_from(["aggregated", "prefill", "decode"]),
    st.integers(0, 4),
    st.integers(0, 6),
    st.integers(0, 12),
    st.lists(pools, max_size=12),
)
def test_never_outside_the_bounds(
    role: Role, least: int, more: int, target: int, seen: list[tuple[float, int, list[ReplicaLoad]]]
) -> None:
    bounds, goals, state, now_s = (
        Bounds(least, max(1, least + more)),
        dataclasses.replace(GOALS, role=role),
        State(),
        0.0,
    )
    for elapsed_s, ready, replicas in seen:
        now_s += elapsed_s
        decision = decide(PoolLoad(now_s, ready, tuple(replicas)), target, bounds, goals, state)
        target, state = decision.replicas, decision.state
        assert bounds.min <= target <= bounds.max
        assert decision.reason
