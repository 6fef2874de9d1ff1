"""The statistics of engines as metrics, read at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, Protocol

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from oscine.engine.process.client import Engine
from oscine.settings.config import EngineOptions
from oscine.statistic import Statistic
from oscine.types import STATISTICS, EngineStats

_MAX_BUCKETS = 18  # of the histogram of tokens per step: up to 128 Ki tokens
_CACHED = Statistic(  # vLLM's second name for what the prefix cache had
    "prefix_hits", "counter", "Prompt tokens that were cached", "prompt_tokens_cached", ("engine",)
)


class MeasuredModel(Protocol):
    """The attributes of a model that are read here; oscine.api.serving.served_model.ServedModel has them."""

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def engine(self) -> Engine: ...

    @property
    def options(self) -> EngineOptions: ...


class EngineCollector(Collector):
    """Collects from all models that are served now. The first name of each labels its samples."""

    def __init__(self, models: Callable[[], Sequence[MeasuredModel]], *, transfers: bool = False) -> None:
        """`transfers`: also metrics of pages from other engines."""
        self._models = models
        self._readers = {"engine", "transfers"} if transfers else {"engine"}

    def collect(self) -> Iterable[Metric]:
        models = self._models()
        ready = GaugeMetricFamily("oscine:engine_ready", "1 while the engine takes requests", labels=["model_name"])
        restarts = CounterMetricFamily(
            "oscine:engine_restarts", "Times that the engine was started again", labels=["model_name"]
        )
        for model in models:
            ready.add_metric([model.names[0]], float(model.engine.state == "ready"))
            restarts.add_metric([model.names[0]], model.engine.restarts)
        yield from (ready, restarts)
        offloads = any(model.options.cache.kv_offload_bytes for model in models)
        drafts = any(model.options.speculation.is_on for model in models)
        readers = self._readers | ({"offload"} if offloads else set()) | ({"speculation"} if drafts else set())
        for statistic in (*STATISTICS, _CACHED):
            if readers.intersection(statistic.readers):
                samples = [([model.names[0]], model.engine.stats) for model in models]
                yield family_of(statistic, f"oscine:{statistic.metric}", ["model_name"], samples)
        yield _prompt_tokens_by_source(models)
        yield _cache_config(models)
        yield _waiting_by_reason(models)
        yield _sleep_state(models)


Samples = Iterable[tuple[Sequence[str], Any]]  # values of the labels, and the record that has the statistic
_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "summary": SummaryMetricFamily,
    "histogram": HistogramMetricFamily,
}


def family_of(statistic: Statistic, name: str, labels: Sequence[str], samples: Samples) -> Metric:
    if statistic.kind == "positions":
        return _by_position(statistic, name, labels, samples)
    family = _FAMILIES[statistic.kind](name, statistic.help, labels=labels)
    for of, stats in samples:
        family.add_metric(of, *_observed(statistic, stats))
    made: Metric = family
    return made


def _by_position(statistic: Statistic, name: str, labels: Sequence[str], samples: Samples) -> Metric:
    family = CounterMetricFamily(name, statistic.help, labels=[*labels, "position"])
    for of, stats in samples:
        for position, count in enumerate(getattr(stats, statistic.field)):
            family.add_metric([*of, str(position)], count)
    return family


def _observed(statistic: Statistic, stats: EngineStats) -> tuple[Any, ...]:
    if statistic.kind == "histogram":
        return _tokens_per_step(stats)
    value = getattr(stats, statistic.field)
    return (getattr(stats, statistic.count), value) if statistic.kind == "summary" else (value,)


def _tokens_per_step(stats: EngineStats) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum."""
    steps = accumulate(chain(stats.steps_by_tokens, repeat(0, _MAX_BUCKETS - len(stats.steps_by_tokens))))
    buckets = [(str(float(1 << k)), float(count)) for k, count in enumerate(steps)]
    return [*buckets, ("+Inf", float(stats.steps))], stats.step_tokens


def _prompt_tokens_by_source(models: Sequence[MeasuredModel]) -> Metric:
    """The sources have vLLM's names."""
    labels = ["model_name", "source"]
    family = CounterMetricFamily("oscine:prompt_tokens_by_source", "Prompt tokens, by source", labels=labels)
    for model in models:
        stats = model.engine.stats
        num_computed = stats.prompt_tokens - stats.local_hits - stats.external_hits
        family.add_metric([model.names[0], "local_compute"], num_computed)
        family.add_metric([model.names[0], "local_cache_hit"], stats.local_hits)
        family.add_metric([model.names[0], "external_kv_transfer"], stats.external_hits)
    return family


def _waiting_by_reason(models: Sequence[MeasuredModel]) -> Metric:
    """Every waiting sequence waits for capacity. vLLM can also defer sequences for other reasons; Oscine does not."""
    labels = ["model_name", "reason"]
    family = GaugeMetricFamily("oscine:num_requests_waiting_by_reason", "Sequences that wait, by reason", labels=labels)
    for model in models:
        family.add_metric([model.names[0], "capacity"], model.engine.stats.num_waiting)
        family.add_metric([model.names[0], "deferred"], 0.0)
    return family


def _sleep_state(models: Sequence[MeasuredModel]) -> Metric:
    """vLLM's dashboards read this metric to see whether a model is up. No engine here ever sleeps."""
    labels = ["model_name", "sleep_state"]
    family = GaugeMetricFamily("oscine:engine_sleep_state", "1 for the state that the engine is in", labels=labels)
    for model in models:
        family.add_metric([model.names[0], "awake"], float(model.engine.state == "ready"))
        for state in ("weights_offloaded", "discard_all"):
            family.add_metric([model.names[0], state], 0.0)
    return family


def _cache_config(models: Sequence[MeasuredModel]) -> Metric:
    """Under the label names that routers in front of several servers read."""
    labels = ["model_name", "block_size", "num_gpu_blocks", "enable_prefix_caching"]
    family = GaugeMetricFamily("oscine:cache_config_info", "Shape of the KV cache; always 1", labels=labels)
    for model in models:
        cache, pages = model.options.cache, model.engine.stats.full_pages_total
        family.add_metric([model.names[0], str(cache.page_size), str(pages), str(cache.prefix_caching)], 1.0)
    return family
