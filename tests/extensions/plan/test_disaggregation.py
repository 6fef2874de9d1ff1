"""Prompts that other engines compute, with production's protocol: what moves, when, and what happens if it cannot."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.pool import Timing
from oscine.extensions.plan.fleet.simulation import Outcome
from oscine.extensions.plan.traffic.session import Pages, Turn
from oscine.extensions.replicas.spec.deployment import ModelSpec, PrefillLimits, Replicas, RoleSpec
from tests.extensions.plan.fleets import PAGE, Linear, Specs, deployment, random_traffic, simulate, times

STEP_NS, TOKEN_NS = 1_000_000, 10_000


def apart(prefill: int = 1, decode: int = 2, timeout_s: float = 10.0) -> tuple[ModelSpec, Specs]:
    model, specs = deployment(Linear(STEP_NS, token_ns=TOKEN_NS))
    engine = specs["aggregated"]
    roles = tuple(
        RoleSpec(name, engine.options, Replicas(count, count))  # type: ignore[arg-type]
        for name, count in (("prefill", prefill), ("decode", decode))
    )
    limits = PrefillLimits(min_tokens=256, timeout_s=timeout_s)
    return replace(model, roles=roles, prefill=limits), {"prefill": engine, "decode": engine}


def run(traffic: Traffic, timing: Timing | None = None, failures_s: Sequence[float] = (), **counts: float) -> Outcome:
    model, specs = apart(**counts)  # type: ignore[arg-type]
    return simulate(model, specs, traffic, timing=timing, failures_s=failures_s)


def test_a_prompt_comes_from_another_engine_in_the_time_of_its_step_and_its_copy() -> None:
    isl, message_s, bytes_per_s = 640, 500e-6, 1e6
    turn = Turn(isl, 5, Pages((), 0))
    outcome = run(Traffic([(turn,)]), Timing(message_s=message_s, bytes_per_s=bytes_per_s))
    (record,), total = outcome.records, outcome.total
    num_pages = (isl - 1) // PAGE  # of which all are fetched in full, and those of the last window
    full, window = (group.page_bytes for group in apart()[1]["decode"].groups)
    num_bytes = num_pages * full + 2 * window
    assert (total.remote_prefills, total.fetched_pages, total.fetched_bytes) == (1, num_pages + 2, num_bytes)
    assert (total.external_hits, outcome.router.remote_prefills) == (num_pages * PAGE, 1)
    prefill_s = 1e-9 * (STEP_NS + TOKEN_NS * num_pages * PAGE)
    decode_s = 1e-9 * (STEP_NS + TOKEN_NS * (isl - num_pages * PAGE))
    expected_s = prefill_s + 2 * message_s + num_bytes / bytes_per_s + message_s + decode_s
    assert record.events_s[0] == pytest.approx(expected_s, abs=1e-3)  # an engine that waits looks every 0.2 ms
    assert record.output_tokens == 5


def test_every_token_is_computed_once_somewhere() -> None:
    traffic = random_traffic(Arrival(rate=10.0), 100, Shapes(Lengths(800, 60, 0.5), turns=2, prefix_tokens=300))
    outcome = run(traffic, prefill=2)
    total, records = outcome.total, outcome.records
    assert not [record.error for record in records if record.error]
    assert total.remote_prefills > 100
    assert total.remote_prefill_failures == 0
    assert total.generated_tokens == sum(record.output_tokens for record in records)
    assert total.num_running == total.num_waiting == 0
    decodes = sum(record.output_tokens - 1 for record in records)
    assert total.step_tokens == total.prompt_tokens - total.prefix_hits + decodes
    assert times(outcome) == times(run(traffic, prefill=2))


def test_a_short_prompt_is_computed_where_it_is() -> None:
    outcome = run(Traffic([(Turn(200, 5, Pages((), 0)),)]))
    assert (outcome.total.remote_prefills, outcome.router.remote_prefills) == (0, 0)


def test_a_slow_copy_is_given_up_and_the_prompt_computed_where_it_is() -> None:
    outcome = run(Traffic([(Turn(640, 5, Pages((), 0)),)]), Timing(bytes_per_s=10.0), timeout_s=0.5)
    assert (outcome.total.remote_prefills, outcome.total.remote_prefill_failures) == (0, 1)
    assert outcome.records[0].output_tokens == 5
    assert 0.5 < outcome.records[0].events_s[0] < 0.52


def test_requests_survive_the_loss_of_engines() -> None:
    traffic = random_traffic(Arrival(rate=20.0), 100, Shapes(Lengths(800, 100, 0.5)))
    outcome = run(traffic, Timing(start_s=1.0), failures_s=[1.0, 2.0])
    assert outcome.num_moved > 0
    assert sorted(record.output_tokens for record in outcome.records) == sorted(
        session[0].max_tokens for session in traffic.sessions
    )
