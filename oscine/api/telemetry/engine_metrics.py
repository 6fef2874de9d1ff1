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

from oscine.config import EngineOptions
from oscine.engine.process.client import Engine
from oscine.statistic import Statistic
from oscine.types import STATISTICS, EngineStats

_MOST_BUCKETS = 18  # of the histogram of tokens per step: up to 128 Ki tokens
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
        ready = [([model.names[0]], float(model.engine.state == "ready")) for model in models]
        yield _family("gauge", "engine_ready", "1 while the engine takes requests", ready)
        restarts = [([model.names[0]], model.engine.restarts) for model in models]
        yield _family("counter", "engine_restarts", "Times that the engine was started again", restarts)
        for statistic in (*STATISTICS, _CACHED):
            if self._readers.intersection(statistic.readers):
                samples = [([model.names[0]], model.engine.stats) for model in models]
                yield family_of(statistic, f"oscine:{statistic.metric}", ["model_name"], samples)
        yield _cache_config(models)
        yield _waiting_by_reason(models)
        yield _sleep_state(models)


Samples = Iterable[tuple[Sequence[str], Any]]  # values of the labels, and the record that has the statistic
_SCALARS: dict[str, type[GaugeMetricFamily] | type[CounterMetricFamily]] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
}


def family_of(statistic: Statistic, name: str, labels: Sequence[str], samples: Samples) -> Metric:
    if statistic.kind == "histogram":
        histogram = HistogramMetricFamily(name, statistic.help, labels=labels)
        for of, stats in samples:
            histogram.add_metric(of, *_tokens_per_step(stats))
        return histogram
    if statistic.kind == "summary":
        summary = SummaryMetricFamily(name, statistic.help, labels=labels)
        for of, stats in samples:
            summary.add_metric(of, getattr(stats, statistic.count), getattr(stats, statistic.field))
        return summary
    family = _SCALARS[statistic.kind](name, statistic.help, labels=labels)
    for of, stats in samples:
        family.add_metric(of, getattr(stats, statistic.field))
    return family


def _tokens_per_step(stats: EngineStats) -> tuple[list[tuple[str, float]], float]:
    """Buckets and sum."""
    steps = accumulate(chain(stats.steps_by_tokens, repeat(0, _MOST_BUCKETS - len(stats.steps_by_tokens))))
    buckets = [(str(float(1 << k)), float(count)) for k, count in enumerate(steps)]
    return [*buckets, ("+Inf", float(stats.steps))], stats.step_tokens


def _family(kind: str, name: str, help: str, samples: Iterable[tuple[Sequence[str], float]], *labels: str) -> Metric:
    """`labels`: further ones after the model's."""
    family = _SCALARS[kind](f"oscine:{name}", help, labels=["model_name", *labels])
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _waiting_by_reason(models: Sequence[MeasuredModel]) -> Metric:
    """Every waiting sequence waits for capacity. vLLM can also defer sequences for other reasons; Oscine does not."""
    samples: list[tuple[Sequence[str], float]] = []
    for model in models:
        samples.append(([model.names[0], "capacity"], model.engine.stats.num_waiting))
        samples.append(([model.names[0], "deferred"], 0.0))
    return _family("gauge", "num_requests_waiting_by_reason", "Sequences that wait, by reason", samples, "reason")


def _sleep_state(models: Sequence[MeasuredModel]) -> Metric:
    """vLLM's dashboards read this metric to see whether a model is up. No engine here ever sleeps."""
    samples = [
        ([model.names[0], state], float(state == "awake" and model.engine.state == "ready"))
        for model in models
        for state in ("awake", "weights_offloaded", "discard_all")
    ]
    return _family("gauge", "engine_sleep_state", "1 for the state that the engine is in", samples, "sleep_state")


def _cache_config(models: Sequence[MeasuredModel]) -> Metric:
    """Under the label names that routers in front of several servers read."""
    samples = []
    for model in models:
        cache, pages = model.options.cache, model.engine.stats.full_pages_total
        samples.append(([model.names[0], str(cache.page_size), str(pages), str(cache.prefix_caching)], 1.0))
    labels = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
    return _family("gauge", "cache_config_info", "Shape of the KV cache; always 1", samples, *labels)
