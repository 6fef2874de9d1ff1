"""What follows from the declarations of an engine's statistics."""

from dataclasses import fields

from oscine.extensions.cluster.scaling.pool_load import report
from oscine.extensions.replicas.client.reports import Reports
from oscine.statistic import declared
from oscine.types import STATISTICS, EngineStats

GAUGES = {
    *("num_running", "num_waiting", "queued_tokens", "active_tokens"),
    *("kv_slots_used", "kv_slots_cached", "kv_slots_total"),
    *("full_pages_used", "full_pages_total", "sliding_pages_used", "sliding_pages_total", "kv_usage"),
    *("offload_host_pages", "offload_host_bytes", "offload_disk_pages", "offload_disk_bytes"),
}

LISTS = {"steps_by_tokens", "accepted_by_position"}


def ones() -> EngineStats:
    return EngineStats(**{field.name: [1] if field.name in LISTS else 1 for field in fields(EngineStats)})


def test_every_field_is_declared_and_gauges_are_the_only_ones_that_shrink() -> None:
    assert [statistic.field for statistic in declared(EngineStats)] == [field.name for field in fields(EngineStats)]
    assert {statistic.field for statistic in STATISTICS if not statistic.only_grows} == GAUGES
    for statistic in STATISTICS:
        assert statistic.help
        assert statistic.metric or not {"engine", "replica"} & set(statistic.readers)
        assert not statistic.count or hasattr(EngineStats(), statistic.count)


def test_of_engines_that_ended_only_counters_are_kept() -> None:
    reports = Reports()
    reports.take("a", ones())
    reports.take("b", ones())
    reports.end("a")
    total = reports.total()
    for field in fields(EngineStats):
        one = [1] if field.name in LISTS else 1
        two = [2] if field.name in LISTS else 2
        assert getattr(total, field.name) == (one if field.name in GAUGES else two), field.name


def test_scaling_sees_gauges_as_they_are_and_counters_by_their_growth() -> None:
    """These names are in recorded loads."""
    gauges = {"running", "waiting", "queued_tokens", "active_tokens"}
    counters = {"first_tokens", "first_token_s", "inter_tokens", "inter_token_s", "prefix_queries", "prefix_hits"}
    counters |= {"prompt_tokens", "generated_tokens"}
    told = report(ones(), ones())
    assert told.keys() == gauges | counters | {"kv_usage"}
    assert all(told[name] == 1.0 for name in gauges)
    assert all(told[name] == 0.0 for name in counters)
    assert len(told) == sum("load" in statistic.readers for statistic in STATISTICS)
