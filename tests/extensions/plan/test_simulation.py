"""Simulations of fleets: laws that hold whatever the load, formulas of queueing, and equal results in every way."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate

import numpy as np
import pytest

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.cluster.scaling import policy
from oscine.extensions.plan.clock.agenda import Agenda, ns_of
from oscine.extensions.plan.fleet import pool
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.engines import Way
from oscine.extensions.plan.fleet.pool import Timing
from oscine.extensions.plan.fleet.simulation import Outcome, Simulation
from oscine.extensions.plan.traffic.session import Pages, Turn
from oscine.extensions.replicas.routing.fleet import Fleet
from oscine.extensions.replicas.routing.model_router import ModelRouter
from oscine.extensions.replicas.spec.deployment import Replicas, ScalingOptions
from tests.extensions.plan.fleets import Linear, deployment, random_traffic, simulate, times

Run = Callable[[Way], Outcome]


@cache
def closed_sessions(way: Way) -> Outcome:
    """Users whose sessions share prefixes, on engines with little memory."""
    model, specs = deployment(replicas=3, num_pages=(160, 60))
    shapes = Shapes(Lengths(300, 60, 0.5), turns=3, prefix_tokens=200, num_prefixes=2)
    return simulate(model, specs, random_traffic(Arrival(20), 60, shapes, think_s=0.2), way=way)


@cache
def bursts_of_single_turns(way: Way) -> Outcome:
    model, specs = deployment(replicas=2, max_num_seqs=4)
    return simulate(model, specs, random_traffic(Arrival(rate=12.0, burst=5), 150), way=way)


@cache
def lost_replicas(way: Way) -> Outcome:
    model, specs = deployment(replicas=3)
    traffic = random_traffic(Arrival(rate=15.0), 150)
    return simulate(model, specs, traffic, failures_s=[1.0, 1.5, 4.0], timing=Timing(start_s=2.0), seed=5, way=way)


@cache
def rising_and_falling_load(way: Way) -> Outcome:
    scaling = ScalingOptions(up_cooldown_s=2.0, down_cooldown_s=10.0)
    model, specs = deployment(replicas=Replicas(1, 4), max_num_seqs=8, scaling=scaling)
    rates = [(1.0, 10), (30.0, 20), (0.5, 60)]  # requests per second, for seconds
    gaps_s = [1 / rate for rate, seconds in rates for _ in range(round(rate * seconds))]
    shapes = Shapes(Lengths(600, 100, 0.5))
    sessions = random_traffic(Arrival(1), len(gaps_s), shapes).sessions
    traffic = Traffic(sessions, [ns_of(offset_s) for offset_s in accumulate(gaps_s)])
    return simulate(model, specs, traffic, timing=Timing(start_s=3.0, drain_s=5.0), way=way)


@cache
def scarce_pages(way: Way) -> Outcome:
    """Sequences are preempted."""
    model, specs = deployment(replicas=2, num_pages=(60, 60))
    return simulate(model, specs, random_traffic(Arrival(16), 60, Shapes(Lengths(300, 300, 0.5))), way=way)


ALL = (closed_sessions, bursts_of_single_turns, lost_replicas, rising_and_falling_load, scarce_pages)


@pytest.mark.long
@pytest.mark.parametrize("run", ALL)
def test_steps_a_cohort_and_jumps_have_equal_results(run: Run) -> None:
    found = [run(way) for way in ("steps", "cohort", "jumps")]
    assert found[2].num_jumped > 0
    assert times(found[0]) == times(found[1]) == times(found[2])
    assert found[0].engines == found[1].engines == found[2].engines
    assert found[0].changes == found[1].changes == found[2].changes
    assert found[0].router == found[2].router


HASHED = """
from tests.extensions.plan.test_drafts import drafted
from tests.extensions.plan.test_simulation import ALL, times
print([times(run("jumps")) for run in (*ALL, drafted)])
"""


def test_results_do_not_depend_on_the_seed_of_hashes() -> None:
    """Two processes, and so also two runs."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", HASHED], env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1")
    ]
    assert len(outputs[0]) > 10_000
    assert outputs[0] == outputs[1]


def test_router_fleet_and_policy_are_those_of_production() -> None:
    model, specs = deployment(replicas=2)
    simulation = Simulation(Agenda(), model, specs, Timing(), "jumps")
    assert type(simulation.router) is ModelRouter
    assert type(simulation.answering.fleet) is Fleet
    assert pool.decide is policy.decide


# ---- laws ----


@pytest.mark.parametrize("run", ALL)
def test_tokens_are_conserved_and_all_pages_are_free_in_the_end(run: Run) -> None:
    outcome = run("jumps")
    total, records = outcome.total, outcome.records
    assert not [record.error for record in records if record.error]
    assert total.num_running == total.num_waiting == total.full_pages_used == total.kv_slots_used == 0
    assert total.active_tokens == total.queued_tokens == 0
    # A move loses the token of the step in flight, and admits a prompt once more. Moves and preemptions compute again.
    moved = outcome.num_moved
    longest = max(record.prompt_tokens + record.output_tokens for record in records)
    assert 0 <= total.generated_tokens - sum(record.output_tokens for record in records) <= moved
    assert 0 <= total.prompt_tokens - sum(record.prompt_tokens for record in records) <= moved * longest
    assert 0 <= total.prefix_hits - sum(record.cached_tokens for record in records) <= moved * longest
    decodes = sum(record.output_tokens - 1 for record in records)
    again = total.step_tokens - (total.prompt_tokens - total.prefix_hits + decodes)
    assert -moved * longest <= again <= (moved + total.preemptions) * longest
    assert (again > 0) == (moved + total.preemptions > 0)


def test_conservation_was_looked_at_with_moves_and_preemptions() -> None:
    assert lost_replicas("jumps").num_moved > 3
    assert scarce_pages("jumps").total.preemptions > 5


@pytest.mark.parametrize("run", [closed_sessions, bursts_of_single_turns, rising_and_falling_load])
def test_the_engines_count_the_time_that_clients_see(run: Run) -> None:
    """Little's law for the decoding sequences: their number over time is the sum of their times."""
    outcome = run("jumps")
    seen_s = sum(record.events_s[-1] - record.events_s[0] for record in outcome.records)
    assert outcome.total.inter_token_s == pytest.approx(seen_s, rel=1e-9)
    assert outcome.total.first_tokens == len(outcome.records)


def test_with_all_times_doubled_every_result_is_doubled() -> None:
    """With one replica, the router's own times play no part."""

    def run(factor: int) -> Outcome:
        model, specs = deployment(Linear(2_000_000 * factor, 150_000 * factor, 20 * factor, 18_000 * factor))
        made = random_traffic(Arrival(rate=8.0), 120, Shapes(Lengths(600, 100, 0.5), turns=2), think_s=0.5 * factor)
        assert made.offsets_ns is not None
        return simulate(model, specs, replace(made, offsets_ns=[offset_ns * factor for offset_ns in made.offsets_ns]))

    once, twice = run(1), run(2)
    for one, two in zip(once.records, twice.records, strict=True):
        assert [ns_of(time_s) * 2 for time_s in one.events_s] == [ns_of(time_s) for time_s in two.events_s]
        assert (one.prompt_tokens, one.cached_tokens) == (two.prompt_tokens, two.cached_tokens)


@pytest.mark.parametrize("load", [0.3, 0.7, 0.9])
def test_the_wait_is_that_of_a_queue_with_constant_service(load: float) -> None:
    """M/D/1, by Pollaczek and Khinchine: load / (2 (1 - load)) services, one sequence at a time."""
    service_s, count = 1.0, 3000
    model, specs = deployment(Linear(ns_of(service_s)), max_num_seqs=1, overlap=False)
    offsets_s = Arrival(rate=load / service_s).offsets_s(count, seed=11)
    turns = [(Turn(100, 1, Pages((), number)),) for number in range(count)]
    outcome = simulate(model, specs, Traffic(turns, [ns_of(offset_s) for offset_s in offsets_s]))
    waits_s = np.array([record.events_s[0] - record.sent_s - service_s for record in outcome.records])
    # Lindley's recursion has the exact waits of these arrivals, first come, first served.
    expected_s = [0.0]
    for gap_s in np.diff(offsets_s):
        expected_s.append(max(0.0, expected_s[-1] + service_s - gap_s))
    assert waits_s.mean() == pytest.approx(np.mean(expected_s), rel=0.01)
    if load < 0.9:  # else 3,000 arrivals are few
        assert waits_s.mean() / service_s == pytest.approx(load / (2 * (1 - load)), rel=0.15)


def test_a_fault_while_a_request_waits_ends_the_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    async def place(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ModelRouter, "place", place)
    monkeypatch.setattr(ModelRouter, "place_now", lambda *arguments: None)
    model, specs = deployment()
    with pytest.raises(ZeroDivisionError):
        simulate(model, specs, random_traffic(Arrival(1), 1))


# ---- replicas that come and go ----


def test_requests_of_a_lost_replica_go_on_elsewhere_from_their_tokens() -> None:
    outcome = lost_replicas("jumps")
    assert outcome.num_moved > 3
    assert [change.reason.split()[1:] for change in outcome.changes] == [["is", "lost"]] * 3
    assert len(outcome.engines) == 6, "three lost, three in their place"
    assert all(record.output_tokens > 0 and not record.error for record in outcome.records)
    lengths = [session[0].max_tokens for session in random_traffic(Arrival(rate=15.0), 150).sessions]
    assert sorted(record.output_tokens for record in outcome.records) == sorted(lengths)


def test_replicas_follow_a_load_that_rises_and_falls() -> None:
    outcome = rising_and_falling_load("jumps")
    counts = [change.replicas for change in outcome.changes]
    assert max(counts) > 1
    assert counts[-1] == 1
    assert outcome.changes[0].time_s > 10, "not before the load rises"


def test_a_request_that_does_not_fit_is_an_error_of_its_own() -> None:
    model, specs = deployment(num_pages=(10, 10))
    sessions = [(Turn(100, 10, Pages((), 0)),), (Turn(5000, 10, Pages((), 1)),)]
    good, bad = sorted(simulate(model, specs, Traffic(sessions, users=2)).records, key=lambda record: record.error)
    assert (good.error, good.output_tokens) == ("", 10)
    assert "do not fit" in bad.error
