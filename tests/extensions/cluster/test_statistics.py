"""Statistics of several engines, and what identifies their GPUs."""

from dataclasses import fields

from oscine.extensions.cluster.scaling.pool_load import report
from oscine.extensions.replicas.client.engine import ClusterEngine
from oscine.extensions.replicas.client.reports import Reports
from oscine.extensions.replicas.data_parallel import DataParallelEngine
from oscine.settings.config import EngineOptions
from oscine.types import STATISTICS, EngineInfo, EngineStats
from tests.test_statistic import GAUGES, LISTS, ones


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


def test_the_gpus_of_several_engines_are_those_of_each() -> None:
    """None before they are ready; those of a cluster are elsewhere."""
    engine = DataParallelEngine([EngineOptions()] * 2, "m")
    assert engine.gpus == ()
    for name, one in engine.engines.items():
        one.info = EngineInfo("m", 4096, 300, page_size=64, max_num_seqs=4, gpus=(f"GPU-{name}", f"GPU-{name}b"))
    assert engine.gpus == ("GPU-0", "GPU-0b", "GPU-1", "GPU-1b")
    assert ClusterEngine(engine.router, "m").gpus == ()
