"""The statistics of engines as metrics, read at each scrape."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.config import EngineOptions
from oscine.engine.process.client import Engine
from oscine.types import EngineStats

_MOST_BUCKETS = 18  # of the histogram of tokens per step: up to 128 Ki tokens
_Read = Callable[[EngineStats], float]
_GAUGES: tuple[tuple[str, str, _Read], ...] = (
    ("num_requests_running", "Sequences that run", lambda s: s.num_running),
    ("num_requests_waiting", "Sequences that wait", lambda s: s.num_waiting),
    ("kv_cache_usage_perc", "Used share of the fuller page group, 0 to 1", lambda s: s.kv_usage),
    ("full_pages_used", "Full-attention pages held by live requests", lambda s: s.full_pages_used),
    ("full_pages", "Full-attention pages there are", lambda s: s.full_pages_total),
    ("sliding_pages_used", "Sliding-window pages held by live requests", lambda s: s.sliding_pages_used),
    ("sliding_pages", "Sliding-window pages there are", lambda s: s.sliding_pages_total),
)
_COUNTERS: tuple[tuple[str, str, _Read], ...] = (
    ("engine_steps", "Steps of the model", lambda s: s.steps),
    ("prompt_tokens", "Prompt tokens of admitted requests", lambda s: s.prompt_tokens),
    ("generation_tokens", "Generated tokens", lambda s: s.generated_tokens),
    ("prompt_tokens_cached", "Prompt tokens that were cached", lambda s: s.prefix_hits),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", lambda s: s.prefix_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache", lambda s: s.prefix_hits),
    ("num_preemptions", "Sequences that were put back to make room", lambda s: s.preemptions),
    ("non_finite_logits", "Sequences that ended because their logits were not finite", lambda s: s.non_finite),
)
_TRANSFERS: tuple[tuple[str, str, _Read], ...] = (
    ("remote_prefills", "Prompts whose pages came from another engine", lambda s: s.remote_prefills),
    ("remote_prefill_failures", "Prompts computed here after all", lambda s: s.remote_prefill_failures),
    ("fetched_pages", "KV pages that came from other engines", lambda s: s.fetched_pages),
    ("fetched_bytes", "Bytes of these", lambda s: s.fetched_bytes),
    ("fetch_seconds", "Seconds that fetching them took, added up", lambda s: s.fetch_s),
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
        self._counters = (*_COUNTERS, *(_TRANSFERS if transfers else ()))

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
        kinds = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, self._counters))
        for family_of, table in kinds:
            for name, what, read in table:
                family = family_of(f"oscine:{name}", what, labels=["model_name"])
                for model in models:
                    family.add_metric([model.names[0]], read(model.engine.stats))
                yield family
        yield _cache_config(models)
        yield _tokens_per_step(models)
        yield _waiting_by_reason(models)
        yield _sleep_state(models)


def _tokens_per_step(models: Sequence[MeasuredModel]) -> Metric:
    family = HistogramMetricFamily("oscine:iteration_tokens_total", "Tokens computed in a step", labels=["model_name"])
    for model in models:
        stats = model.engine.stats
        steps = accumulate(chain(stats.steps_by_tokens, repeat(0, _MOST_BUCKETS - len(stats.steps_by_tokens))))
        buckets = [(str(float(1 << k)), float(count)) for k, count in enumerate(steps)]
        family.add_metric([model.names[0]], [*buckets, ("+Inf", float(stats.steps))], stats.step_tokens)
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
