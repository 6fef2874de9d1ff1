"""Histograms and counters of sequences, from their arrival to their end, per model."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.api.http.rate_limits import KeyUse
from oscine.api.http.record import SequenceTimes, current
from oscine.types import GenerationOutput, GenerationRequest

STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = tuple(1 << i for i in range(18))
_CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)


class StepTimes:
    """The counts of one histogram, filled by the event loop alone. An observation costs a tenth of the library's."""

    def __init__(self) -> None:
        self.counts = [0] * (len(STEP_BUCKETS_S) + 1)
        self.sum_s = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(STEP_BUCKETS_S, value_s)] += 1
        self.sum_s += value_s


class InterTokenLatency(Collector):
    """The one histogram that is observed for each token."""

    def __init__(self) -> None:
        self._times: dict[str, StepTimes] = {}  # by model

    def labels(self, model: str) -> StepTimes:
        return self._times.setdefault(model, StepTimes())

    def collect(self) -> Iterable[Metric]:
        bounds = [*map(str, STEP_BUCKETS_S), "+Inf"]
        name = "oscine:inter_token_latency_seconds"
        family = HistogramMetricFamily(name, "Between outputs of a sequence", labels=["model_name"])
        for model, times in self._times.items():
            buckets = [*zip(bounds, map(float, accumulate(times.counts)), strict=True)]
            family.add_metric([model], buckets, times.sum_s)
        yield family


class SequenceFamilies:
    """The metric families of sequences, for all models of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        request = _REQUEST_BUCKETS_S
        self.finished = self._counter("request_success", "Finished sequences", "model_name", "finished_reason")
        self.key_tokens = self._counter("api_key_tokens", "Tokens of sequences with a key", "api_key", "type")
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", request)
        self.itl = InterTokenLatency()
        registry.register(self.itl)
        self.tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time a token after the first", STEP_BUCKETS_S
        )
        self.e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", request)
        self.queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled step", request)
        self.prefill = self._histogram("request_prefill_time_seconds", "First scheduled step to first token", request)
        self.decode = self._histogram("request_decode_time_seconds", "First token to last token", request)
        self.inference = self._histogram("request_inference_time_seconds", "First step to last token", request)
        self.prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence", _TOKEN_BUCKETS)
        self.tokens = self._histogram("request_generation_tokens", "Generated tokens of a sequence", _TOKEN_BUCKETS)
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a sequence that were not cached",
            _TOKEN_BUCKETS,
        )
        self.longest = self._histogram(
            "request_max_num_generation_tokens", "Generated tokens of a request's longest sequence", _TOKEN_BUCKETS
        )
        self.n = self._histogram("request_params_n", "Sequences of a request", _CHOICE_BUCKETS)
        self.max_tokens = self._histogram("request_params_max_tokens", "Most tokens of a sequence", _TOKEN_BUCKETS)

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"oscine:{name}", what, labels, registry=self._registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"oscine:{name}", what, ["model_name"], registry=self._registry, buckets=buckets)


class SequenceMetrics:
    """The metrics of the sequences of one model, with its label."""

    def __init__(self, families: SequenceFamilies, model: str) -> None:
        self._families, self._model = families, model
        self.ttft = families.ttft.labels(model)
        self.itl = families.itl.labels(model)
        self._tpot = families.tpot.labels(model)
        self._e2e = families.e2e.labels(model)
        self._queue = families.queue.labels(model)
        self._prefill = families.prefill.labels(model)
        self._decode = families.decode.labels(model)
        self._inference = families.inference.labels(model)
        self._prompt_tokens = families.prompt_tokens.labels(model)
        self._tokens = families.tokens.labels(model)
        self._computed = families.computed.labels(model)
        self._longest = families.longest.labels(model)
        self._n = families.n.labels(model)
        self._max_tokens = families.max_tokens.labels(model)

    def admitted(self, requests: Sequence[GenerationRequest]) -> None:
        """The sequences of one HTTP request."""
        self._n.observe(len(requests))
        for request in requests:
            self._max_tokens.observe(request.sampling.max_tokens)

    def answered(self, longest: int) -> None:
        """All sequences of a request are over; `longest`: generated tokens of the longest one."""
        self._longest.observe(longest)

    def ended(self, times: SequenceTimes) -> None:
        """A sequence is over. Times are counted only if it had a token."""
        self._families.finished.labels(self._model, times.finish_reason).inc()
        self._e2e.observe(times.ended_s - times.arrived_s)
        self._prompt_tokens.observe(times.prompt_tokens)
        self._tokens.observe(times.tokens)
        if not times.first_s:
            return
        self._computed.observe(times.prompt_tokens - times.cached_tokens)
        self._queue.observe(times.scheduled_s - times.arrived_s)
        self._prefill.observe(times.first_s - times.scheduled_s)
        self._decode.observe(times.last_s - times.first_s)
        self._inference.observe(times.last_s - times.scheduled_s)
        if times.tokens > 1:
            self._tpot.observe((times.last_s - times.first_s) / (times.tokens - 1))

    def used(self, key: str, times: SequenceTimes) -> None:
        self._families.key_tokens.labels(key, "prompt").inc(times.prompt_tokens)
        self._families.key_tokens.labels(key, "generation").inc(times.tokens)


class SequenceClock:
    """The times of one sequence, from its arrival to its end; made when it is handed to the engine."""

    def __init__(self, metrics: SequenceMetrics, arrived_s: float, key: KeyUse | None = None) -> None:
        """`arrived_s` is on the clock of time.perf_counter. `key` is charged for generated tokens."""
        self._metrics = metrics
        self._submitted_s = time.perf_counter()
        self.times = SequenceTimes(arrived_s)
        self.failed: str | None = None  # code of the error that ended it
        self._record = current.get()
        self._key = key
        if self._record is not None:
            self._record.sequences.append(self.times)

    def output(self, output: GenerationOutput) -> None:
        if not output.token_ids:
            return
        times, now = self.times, time.perf_counter()
        if times.first_s:
            self._metrics.itl.observe(now - times.last_s)
        else:
            times.first_s = now
            times.scheduled_s = min(self._submitted_s + output.queue_s, now)
            times.cached_tokens = output.num_cached_tokens
            self._metrics.ttft.observe(now - times.arrived_s)
        times.last_s = now
        if self._key is not None:
            self._key.take_generated(len(output.token_ids))

    def finish(self, prompt_tokens: int, generated_tokens: int, reason: str) -> None:
        times = self.times
        times.ended_s = time.perf_counter()
        times.prompt_tokens, times.tokens = prompt_tokens, generated_tokens
        times.finish_reason = reason if self.failed is None else "error"
        if self._record is not None and self.failed is not None:
            self._record.error = self.failed
        self._metrics.ended(times)
        if self._key is not None:
            self._metrics.used(self._key.name, times)
