"""Histograms and counters of sequences, from their arrival to their end, per model."""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, product
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from oscine.api.common.rate_limits import KeyUse
from oscine.api.common.record import SequenceTimes, current
from oscine.types import GenerationOutput, GenerationRequest

_STEP_BUCKETS_S = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)
_REQUEST_BUCKETS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0),
)
_TOKEN_BUCKETS = tuple(1 << i for i in range(18))
_CHOICE_BUCKETS = (1, 2, 5, 10, 20, 50, 100)
RequestType = Literal["chat_completions", "responses", "other"]
_PARSED = {  # labels, and their values in vLLM
    "mode": ("streaming", "non_streaming"),
    "outcome": ("tool_call", "no_tool_call"),
    "request_type": get_args(RequestType),
}


HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("Arrival to first token", _REQUEST_BUCKETS_S),
    "inter_token_latency_seconds": ("Between outputs of a sequence", _STEP_BUCKETS_S),
    "request_time_per_output_token_seconds": ("Mean time per token after the first", _STEP_BUCKETS_S),
    "e2e_request_latency_seconds": ("Arrival to last token", _REQUEST_BUCKETS_S),
    "request_queue_time_seconds": ("Arrival to first scheduled step", _REQUEST_BUCKETS_S),
    "request_prefill_time_seconds": ("First scheduled step to first token", _REQUEST_BUCKETS_S),
    "request_decode_time_seconds": ("First token to last token", _REQUEST_BUCKETS_S),
    "request_inference_time_seconds": ("First step to last token", _REQUEST_BUCKETS_S),
    "request_prompt_tokens": ("Prompt tokens of a sequence", _TOKEN_BUCKETS),
    "request_generation_tokens": ("Generated tokens of a sequence", _TOKEN_BUCKETS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens of a sequence that were not cached", _TOKEN_BUCKETS),
    "request_max_num_generation_tokens": ("Generated tokens of a request's longest sequence", _TOKEN_BUCKETS),
    "request_params_n": ("Sequences of a request", _CHOICE_BUCKETS),
    "request_params_max_tokens": ("Most tokens of a sequence", _TOKEN_BUCKETS),
}


class Observations:
    """The counts of one histogram of one model, filled by the event loop alone.

    One of them costs a tenth of the library's, which takes a lock and looks at the buckets one by one.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._sum = bounds, 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, model: str) -> None:
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = [*zip(names, map(float, accumulate(self._counts)), strict=True)]
        family.add_metric([model], buckets, self._sum)


class SequenceFamilies(Collector):
    """The metric families of sequences, for all models of a server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        finished, tokens = ("model_name", "finished_reason"), ("api_key", "type")
        self.finished = Counter("oscine:request_success", "Finished sequences", finished, registry=registry)
        self.parsed = Counter(
            "oscine:tool_call_parser_invocations",
            "Turns that could call functions, by whether they did",
            ("model_name", *_PARSED),
            registry=registry,
        )
        self.key_tokens = Counter("oscine:api_key_tokens", "Tokens of sequences with a key", tokens, registry=registry)
        self._histograms: dict[str, dict[str, Observations]] = {}  # by model
        registry.register(self)

    def histograms(self, model: str) -> dict[str, Observations]:
        if model not in self._histograms:
            self._histograms[model] = {name: Observations(bounds) for name, (_, bounds) in HISTOGRAMS.items()}
        return self._histograms[model]

    def collect(self) -> Iterable[Metric]:
        for name, (what, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(f"oscine:{name}", what, labels=["model_name"])
            for model, histograms in self._histograms.items():
                histograms[name].add_to(family, model)
            yield family


class SequenceMetrics:
    """The metrics of the sequences of one model, with its label."""

    def __init__(self, families: SequenceFamilies, model: str) -> None:
        self._families, self._model = families, model
        self._histograms = families.histograms(model)
        self.ttft = self._histograms["time_to_first_token_seconds"]
        self.itl = self._histograms["inter_token_latency_seconds"]
        for labels in product(*_PARSED.values()):  # from the beginning, so that the first call is an increase
            families.parsed.labels(model, *labels)

    def _observe(self, **values: float) -> None:
        for name, value in values.items():
            self._histograms[name].observe(value)

    def admitted(self, requests: Sequence[GenerationRequest]) -> None:
        """The sequences of one HTTP request."""
        self._observe(request_params_n=len(requests))
        for request in requests:
            self._observe(request_params_max_tokens=request.sampling.max_tokens)

    def answered(self, longest: int) -> None:
        """All sequences of a request are over; `longest`: generated tokens of the longest one."""
        self._observe(request_max_num_generation_tokens=longest)

    def parsed(self, request_type: RequestType, *, streamed: bool, called: bool) -> None:
        """A turn in which functions could be called is complete."""
        mode, outcome = "streaming" if streamed else "non_streaming", "tool_call" if called else "no_tool_call"
        self._families.parsed.labels(self._model, mode, outcome, request_type).inc()

    def ended(self, times: SequenceTimes) -> None:
        """A sequence is over. Times are counted only if it had a token."""
        self._families.finished.labels(self._model, times.finish_reason).inc()
        self._observe(
            e2e_request_latency_seconds=times.ended_s - times.arrived_s,
            request_prompt_tokens=times.prompt_tokens,
            request_generation_tokens=times.tokens,
        )
        if not times.first_s:
            return
        decode_s = times.last_s - times.first_s
        self._observe(
            request_prefill_kv_computed_tokens=times.prompt_tokens - times.cached_tokens,
            request_queue_time_seconds=times.scheduled_s - times.arrived_s,
            request_prefill_time_seconds=times.first_s - times.scheduled_s,
            request_decode_time_seconds=decode_s,
            request_inference_time_seconds=times.last_s - times.scheduled_s,
        )
        if times.tokens > 1:
            self._observe(request_time_per_output_token_seconds=decode_s / (times.tokens - 1))

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
