"""What follows from the declarations of an engine's statistics."""

from dataclasses import fields

from oscine.statistic import declared
from oscine.types import STATISTICS, EngineStats

GAUGES = {
    *("num_running", "num_waiting", "queued_tokens", "active_tokens"),
    *("kv_slots_used", "kv_slots_cached", "kv_slots_total"),
    *("full_pages_used", "full_pages_total", "sliding_pages_used", "sliding_pages_total", "kv_usage"),
    *("offload_host_pages", "offload_host_bytes", "offload_disk_pages", "offload_disk_bytes"),
    *("fetch_bytes_per_s", "computed_prompt_tokens_per_s"),
    *("adapters_loaded", "adapters_running", "adapters_waiting"),
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
