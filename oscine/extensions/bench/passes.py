"""One pass of a load through an engine of this process: all requests at once, greedy, to their full length."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from oscine.engine.build import BuiltEngine
from oscine.engine.core.loop import EngineLoop
from oscine.extensions.bench.result import Point
from oscine.types import GenerationRequest, SamplingParams

Clock = Callable[[], float]  # seconds, the same in all processes


class MeasureError(Exception):
    """A pass did not run the load that it should measure."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until every request has all its tokens, and until every one has its first."""

    full_s: float
    first_s: float
    energy_j: float | None = None  # that the GPUs used in full_s; None if they do not count it


class Limits(NamedTuple):
    """The limits of each engine, from its memory plan."""

    max_num_seqs: int
    max_num_batched_tokens: int


class Engines(Protocol):
    """What is measured: an engine, or several that share the requests."""

    model: str  # as loaded
    gpus: Sequence[str]  # UUIDs, of all engines
    limits: Limits

    def prepare(self, point: Point) -> None:
        """Makes the prompts, outside of what is timed."""
        ...

    def run(self, point: Point) -> Timing:
        """Raises MeasureError."""
        ...

    def num_held(self, point: Point) -> int:
        """The number of sequences of this length that run at once, over all engines."""
        ...


class OwnEngine:
    """The engine of this process. It may run a share of each load: every so many-th request."""

    def __init__(
        self, engine: BuiltEngine, clock: Clock = time.perf_counter, *, share: int = 0, num_shares: int = 1
    ) -> None:
        self.loop, self.model = engine.loop, engine.info.model
        self.gpus: Sequence[str] = engine.info.gpus
        self.limits = Limits(engine.info.max_num_seqs, engine.info.max_num_batched_tokens)
        self._vocab_size, self._clock, self._share = engine.info.vocab_size, clock, slice(share, None, num_shares)
        self._prompts: dict[Point, list[list[int]]] = {}  # by the point, but for its generated tokens

    def prepare(self, point: Point) -> None:
        self.prompts(point)

    def run(self, point: Point) -> Timing:
        return run_pass(self.loop, self.prompts(point), point.osl, self._clock)

    def num_held(self, point: Point) -> int:
        cache = self.loop.cache
        return min(self.limits.max_num_seqs, cache.num_held(cache.num_pages(point.isl + point.osl - 1)))

    def prompts(self, point: Point) -> list[list[int]]:
        key = replace(point, osl=0)
        if key not in self._prompts:
            self._prompts = {key: random_prompts(point, self._vocab_size)[self._share]}
        return self._prompts[key]


def random_prompts(point: Point, vocab_size: int) -> list[list[int]]:
    """The same ids for the same point, in every process."""
    generator = random.Random(f"{point.concurrency} {point.isl}")
    return [generator.choices(range(vocab_size), k=point.isl) for _ in range(point.concurrency)]


def run_pass(loop: EngineLoop, prompts: Sequence[list[int]], osl: int, clock: Clock) -> Timing:
    """Generates osl tokens per request. Raises MeasureError if a request was refused or cut short."""
    sampling = SamplingParams(max_tokens=osl, temperature=0.0)  # no stop ids: the end of a turn is an ordinary token
    num_tokens = [0] * len(prompts)
    failure: str | None = None
    last_first_s = started_s = clock()
    for i, prompt in enumerate(prompts):
        loop.add(GenerationRequest(str(i), prompt, sampling))
    while loop.has_work:
        for output in loop.step():
            request = int(output.request_id)
            if not num_tokens[request]:
                last_first_s = clock()
            num_tokens[request] += len(output.token_ids)
            if output.finish_reason not in (None, "length"):
                failure = output.error or f"a request ended early: {output.finish_reason}"
    if failure is None and any(count != osl for count in num_tokens):
        failure = f"a request generated other than {osl} tokens"
    if failure is not None:
        raise MeasureError(failure)
    return Timing(clock() - started_s, last_first_s - started_s)
