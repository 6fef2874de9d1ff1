"""Evicted pages in host memory, with production's policy over copies that only take time."""

from dataclasses import replace

import pytest

from oscine.extensions.bench.serve.arrival import Arrival
from oscine.extensions.bench.serve.load import Lengths, Shapes
from oscine.extensions.plan.clock.agenda import ns_of
from oscine.extensions.plan.fleet.clients import Traffic
from oscine.extensions.plan.fleet.pool import Timing
from oscine.extensions.plan.fleet.simulation import Outcome
from oscine.extensions.plan.traffic.session import Pages, Turn
from tests.extensions.plan.fleets import PAGE, Linear, deployment, random_traffic, simulate, times

TOKENS = 1920  # 30 pages
BYTES_PER_S = 1e6  # a prompt takes some milliseconds


def run(traffic: Traffic, host_bytes: int, bytes_per_s: float = BYTES_PER_S) -> Outcome:
    """An engine whose cache has room for one prompt and a half."""
    model, specs = deployment(Linear(1_000_000, token_ns=100_000), num_pages=(45, 45))
    engine = specs["aggregated"]
    options = replace(engine.options, cache=replace(engine.options.cache, kv_offload_bytes=host_bytes))
    return simulate(
        model,
        {"aggregated": replace(engine, options=options)},
        traffic,
        timing=Timing(host_bytes_per_s=bytes_per_s),
    )


def prompts(*owners: int) -> Traffic:
    """One after the other, ten seconds apart. Equal owners have equal prompts."""
    sessions = [(Turn(TOKENS, 2, Pages((), owner)),) for owner in owners]
    return Traffic(sessions, [ns_of(10.0 * place) for place in range(len(owners))])


def test_an_evicted_prompt_comes_back_in_the_time_of_its_copy() -> None:
    traffic = prompts(0, 1, 2, 0)
    without, found = run(traffic, 0), run(traffic, 1 << 30)
    assert [record.cached_tokens for record in without.records] == [0, 0, 0, 0]
    num_cached = TOKENS - PAGE  # the last token is computed
    assert [record.cached_tokens for record in found.records] == [0, 0, 0, num_cached]
    total = found.total
    assert total.offload_host_hits == num_cached // PAGE, "the cache still has the last window"
    last = found.records[-1]
    page_bytes = deployment()[1]["aggregated"].groups[0].page_bytes
    copy_s = num_cached // PAGE * page_bytes / BYTES_PER_S
    expected_s = copy_s + 1e-9 * (1_000_000 + 100_000 * PAGE)
    assert last.events_s[0] - last.sent_s == pytest.approx(expected_s, abs=1e-3)
    assert total.full_pages_used == 0


def test_what_is_quicker_to_compute_is_computed() -> None:
    outcome = run(prompts(0, 1, 2, 0), 1 << 30, bytes_per_s=1e4)
    assert [record.cached_tokens for record in outcome.records] == [0, 0, 0, 0]
    assert outcome.total.offload_declined == 1


def test_sessions_find_more_of_their_prefixes() -> None:
    shapes = Shapes(Lengths(400, 40, 0.3), turns=4)
    traffic = random_traffic(Arrival(4), 12, shapes, think_s=1.0)
    without, found = run(traffic, 0), run(traffic, 1 << 30)
    assert found.total.prefix_hits > 1.2 * without.total.prefix_hits
    assert found.total.offload_host_hits > 0
    assert sorted(r.output_tokens for r in found.records) == sorted(r.output_tokens for r in without.records)
    assert times(found) == times(run(traffic, 1 << 30))
