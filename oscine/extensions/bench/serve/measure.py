"""Computes TTFT, TPOT, throughput and so on from the times of requests and tokens. docs/measuring.md defines each."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from oscine.extensions.bench.serve.answer import Record

Floats = npt.NDArray[np.float64]
LIMITS = ("ttft", "tpot", "e2el")  # measures that goodput may limit


@dataclass(frozen=True, slots=True)
class Summary:
    """Statistics of times in seconds; all NaN if there is no value."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    std: float

    @classmethod
    def of(cls, values: Floats) -> "Summary":
        if not len(values):
            return cls(*[math.nan] * 6)
        median, p90, p95, p99 = np.percentile(values, (50, 90, 95, 99)).tolist()
        return cls(float(values.mean()), median, p90, p95, p99, float(values.std()))


@dataclass(frozen=True, slots=True)
class Measures:
    duration_s: float  # from the first request to the last token
    num_completed: int
    num_failed: int
    errors: Counter[str]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    num_events: int  # with tokens
    counted: bool  # whether the server counted the tokens
    first_event: Summary  # from the request until the first event, with or without tokens
    ttft: Summary
    tpot: Summary
    itl: Summary
    e2el: Summary
    late: Summary  # from the time a request was due until it was sent
    num_good: int | None  # requests that meet all limits; None without limits

    @property
    def output_tok_s(self) -> float:
        return self._per_second(self.output_tokens)

    @property
    def prompt_tok_s(self) -> float:
        return self._per_second(self.prompt_tokens)

    @property
    def requests_per_s(self) -> float:
        return self._per_second(self.num_completed)

    @property
    def goodput(self) -> float | None:
        """Requests per second that meet all limits."""
        return None if self.num_good is None else self._per_second(self.num_good)

    @property
    def tok_s_user(self) -> float:
        """Tokens per second per user, at the median TPOT."""
        return 1 / self.tpot.median if self.tpot.median > 0 else math.nan

    @property
    def mean_under_way(self) -> float:
        """Requests in flight, on average."""
        return self._per_second(self.num_completed * self.e2el.mean)

    def _per_second(self, count: float) -> float:
        return count / self.duration_s if self.num_completed else 0.0


def measure(records: Sequence[Record], limits_s: Mapping[str, float] | None = None) -> Measures:
    """`limits_s`: upper limits of goodput in seconds, by names from LIMITS."""
    done = [record for record in records if not record.error]
    errors = Counter(record.error for record in records if record.error)
    sent_s = np.array([record.sent_s for record in done])
    first_s = np.array([record.events_s[0] for record in done])
    last_s = np.array([record.last_s for record in done])
    tokens = np.array([record.output_tokens for record in done])
    events = np.array([len(record.events_s) for record in done])
    tpot = np.full(len(done), math.nan)
    timed = (tokens > 1) & (events > 1)  # an answer in one event tells nothing about the time per token
    tpot[timed] = (last_s - first_s)[timed] / (tokens[timed] - 1)
    values = {"ttft": first_s - sent_s, "tpot": tpot, "e2el": last_s - sent_s}
    gaps = [np.diff(np.frombuffer(record.events_s)) for record in done]
    return Measures(
        duration_s=float(last_s.max() - min(record.sent_s for record in records)) if done else 0.0,
        num_completed=len(done),
        num_failed=len(records) - len(done),
        errors=errors,
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        output_tokens=int(tokens.sum()),
        num_events=int(events.sum()),
        counted=all(record.has_usage for record in done),
        first_event=Summary.of(np.array([record.begun_s for record in done]) - sent_s),
        ttft=Summary.of(values["ttft"]),
        tpot=Summary.of(tpot[timed]),
        itl=Summary.of(np.concatenate(gaps) if gaps else np.empty(0)),
        e2el=Summary.of(values["e2el"]),
        late=Summary.of(np.array([record.sent_s - record.due_s for record in records])),
        num_good=_num_good(values, limits_s) if limits_s else None,
    )


def _num_good(values: Mapping[str, Floats], limits_s: Mapping[str, float]) -> int:
    """The number of requests that meet all limits. An unknown value meets every limit."""
    within = [~(values[name] > limit_s) for name, limit_s in limits_s.items()]
    return int(np.logical_and.reduce(within).sum())
