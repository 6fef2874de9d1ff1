"""The engine's own numbers as metrics, read at the moment of a scrape.

Knows the engine's statistics and its configuration; nothing of requests.
"""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from oscine.config import EngineOptions
from oscine.engine.client import Engine


def _fraction(used: int, total: int) -> float:
    return used / total if total else 0.0


class EngineCollector:
    """`model` labels all that it has."""

    def __init__(self, engine: Engine, options: EngineOptions, model: str) -> None:
        self._engine, self._cache, self._model = engine, options.cache, model

    def _gauge(self, name: str, what: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"oscine:{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counter(self, name: str, what: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"oscine:{name}", what, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def collect(self) -> Iterable[Metric]:
        s = self._engine.stats
        full = _fraction(s.full_pages_used, s.full_pages_total)
        sliding = _fraction(s.sliding_pages_used, s.sliding_pages_total)
        yield self._gauge("engine_ready", "1 while the engine takes requests", float(self._engine.state == "ready"))
        yield self._counter("engine_restarts", "Times that the engine was started again", self._engine.restarts)
        yield self._gauge("num_requests_running", "Sequences that run", s.num_running)
        yield self._gauge("num_requests_waiting", "Sequences that wait", s.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Used share of the fuller page group, 0 to 1", max(full, sliding))
        yield self._gauge("full_pages_used", "Full-attention pages held by live requests", s.full_pages_used)
        yield self._gauge("full_pages", "Full-attention pages there are", s.full_pages_total)
        yield self._gauge("sliding_pages_used", "Sliding-window pages held by live requests", s.sliding_pages_used)
        yield self._gauge("sliding_pages", "Sliding-window pages there are", s.sliding_pages_total)
        yield self._counter("engine_steps", "Steps of the model", s.steps)
        yield self._counter("prompt_tokens", "Prompt tokens of admitted requests", s.prompt_tokens)
        yield self._counter("generation_tokens", "Generated tokens", s.generated_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache", s.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache", s.prefix_hits)
        yield self._counter("num_preemptions", "Sequences that were put back to make room", s.preemptions)
        yield self._cache_config(s.full_pages_total)

    def _cache_config(self, num_pages: int) -> GaugeMetricFamily:
        """Under the label names that routers in front of several servers read."""
        labels = {
            "model_name": self._model,
            "block_size": str(self._cache.page_size),
            "num_gpu_blocks": str(num_pages),
            "enable_prefix_caching": str(self._cache.prefix_caching),
        }
        family = GaugeMetricFamily("oscine:cache_config_info", "Shape of the KV cache; always 1", labels=list(labels))
        family.add_metric(list(labels.values()), 1.0)
        return family
