"""Measures the engine in this process: all requests of a point at once, greedy, to their full length, no prefix cache.

A pass of one generated token separates prompts from decode steps:

    decode step = (time of osl tokens - time of 1 token) / (osl - 1)

The first pass is not reported. Where passes take too long, one pass gives both times: the time of 1 token
is when the last request has its first one.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from statistics import median

from oscine.bench import machine, roofline
from oscine.bench.result import Point, Result
from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.engine.build import BuiltEngine, build_engine
from oscine.engine.core.loop import EngineLoop
from oscine.model.config import ModelConfig
from oscine.types import GenerationRequest, SamplingParams

MANY = 64  # from this many requests on, prompts are computed in large steps


class MeasureError(Exception):
    """A pass did not run the load that it should measure."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until every request has all its tokens, and until every one has its first."""

    full_s: float
    first_s: float


class EngineBench:
    """One loaded engine and the points that it is measured at."""

    def __init__(
        self,
        engine: BuiltEngine,
        config: ModelConfig,
        page_size: int,
        ready_s: float,
        clock: Callable[[], float] = time.perf_counter,
        num_ranks: int = 1,
    ) -> None:
        self._num_ranks = num_ranks
        self._loop, self._config, self._ready_s, self._clock = engine.loop, config, ready_s, clock
        self._page_size = page_size
        self._model, self._vocab_size = engine.model, engine.vocab_size
        self._first_s: dict[tuple[int, int], float] = {}  # (concurrency, isl) -> seconds for one token per request

    @classmethod
    def load(cls, options: EngineOptions) -> "EngineBench":
        """Raises ValueError for an unknown model or memory that does not suffice."""
        from oscine.model.opened import open_model

        engine = build_engine(options)
        ready_s = machine.process_age_s()
        gc.collect()
        gc.freeze()  # as the engine process does
        model = options.model
        config = open_model(replace(model, device=model.device.partition(",")[0])).config
        return cls(engine, config, options.cache.page_size, ready_s, num_ranks=model.tensor_parallel_size)

    def run(
        self,
        points: Sequence[Point],
        *,
        passes: int,
        warmup_osl: int | None,
        one_pass_from: int | None = None,
        where: machine.Machine,
    ) -> Iterator[Result]:
        """Measures point by point. `passes` >= 2 of each; medians of all but the first are reported. The first pass
        generates only warmup_osl tokens per request, if given; 0 leaves it out. Points of one_pass_from requests and
        more have a single pass, in which the first tokens mark the end of the prompts.
        """
        for point in points:
            if one_pass_from is not None and point.concurrency >= one_pass_from:
                timing = run_pass(self._loop, random_prompts(point, self._vocab_size), point.osl, self._clock)
            else:
                timing = self._time(point, passes, point.osl if warmup_osl is None else min(point.osl, warmup_osl))
            yield self._result(point, timing, where)

    def _time(self, point: Point, passes: int, warmup_osl: int) -> Timing:
        prompts = random_prompts(point, self._vocab_size)

        def quoted_s(osl: int) -> float:
            return median(run_pass(self._loop, prompts, osl, self._clock).full_s for _ in range(passes - 1))

        if warmup_osl > 0:
            run_pass(self._loop, prompts, warmup_osl, self._clock)
        key = point.concurrency, point.isl
        if key not in self._first_s:
            self._first_s[key] = quoted_s(1)
        return Timing(quoted_s(point.osl), self._first_s[key])

    def num_held(self, point: Point) -> int:
        """Sequences of this length that the KV cache holds at once; further ones wait, or are computed twice."""
        return self._loop.stats().full_pages_total // ceil((point.isl + point.osl - 1) / self._page_size)

    def _result(self, point: Point, timing: Timing, where: machine.Machine) -> Result:
        step_s = (timing.full_s - timing.first_s) / (point.osl - 1)
        if step_s <= 0:
            raise MeasureError(f"{point}: as quick as one token a request; it takes more tokens to measure a step")
        return Result(
            model=self._model,
            **asdict(point),
            output_tok_s=round(point.concurrency * point.osl / timing.full_s, 1),
            prefill_tok_s=round(point.concurrency * point.isl / timing.first_s, 1),
            decode_step_ms=round(step_s * 1e3, 4),
            tok_s_user=round(1 / step_s, 2),
            roofline_share=self._share(point, step_s, where.gpu),
            ready_s=round(self._ready_s, 1),
            **asdict(where),
            num_gpus=1 if where.gpu == "cpu" else self._num_ranks,
            tensor_parallel_size=self._num_ranks,
        )

    def _share(self, point: Point, step_s: float, gpu: str) -> float | None:
        ceiling = roofline.ceiling_of(gpu)
        if ceiling is None:
            return None
        context = point.isl + point.osl / 2
        ideal_s = roofline.decode_step_s(self._config, point.concurrency, context, ceiling) / self._num_ranks
        return round(ideal_s / step_s, 4)


def engine_options(
    model: ModelOptions,
    points: Sequence[Point],
    *,
    max_num_batched_tokens: int | None,
    cache: CacheOptions,
    cuda_graphs: bool = True,
) -> EngineOptions:
    """An engine sized for the largest of the points. Its prefix cache is always off."""
    num_seqs = max(point.concurrency for point in points)
    chunk = 16384 if num_seqs >= MANY else 4096
    scheduler = SchedulerOptions(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=max(num_seqs, chunk) if max_num_batched_tokens is None else max_num_batched_tokens,
        max_waiting=num_seqs,
    )
    model = replace(model, max_model_len=max(point.isl + point.osl for point in points))
    return EngineOptions(model, replace(cache, prefix_caching=False), scheduler, cuda_graphs=cuda_graphs)


def random_prompts(point: Point, vocab_size: int) -> list[list[int]]:
    """The same ids for the same point, in every process."""
    generator = random.Random(f"{point.concurrency} {point.isl}")
    return [generator.choices(range(vocab_size), k=point.isl) for _ in range(point.concurrency)]


def run_pass(loop: EngineLoop, prompts: Sequence[list[int]], osl: int, clock: Callable[[], float]) -> Timing:
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
