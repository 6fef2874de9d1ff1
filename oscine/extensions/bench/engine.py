"""Measures the engine: all requests of a point at once, greedy, to their full length, no prefix cache.

A pass of one generated token separates prompts from decode steps:

    decode step = (time of osl tokens - time of 1 token) / (osl - 1)

The first pass is not reported. Where passes take too long, one pass gives both times: the time of 1 token
is when the last request has its first one.
"""

import gc
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import ceil
from statistics import median
from typing import Any

from oscine.engine.build import build_engine
from oscine.extensions.bench import machine, roofline
from oscine.extensions.bench.parallel import EngineProcesses
from oscine.extensions.bench.passes import Engines, MeasureError, OwnEngine, Timing
from oscine.extensions.bench.result import Layout, Point, Result
from oscine.model.config import ModelConfig
from oscine.settings.config import CacheOptions, Config, EngineOptions
from oscine.settings.devices import engines_of
from oscine.system.environment import Environment
from oscine.system.nvml import Energy

_ALONE = Layout()


class EngineBench:
    """Loaded engines and the points that they are measured at."""

    def __init__(
        self,
        engines: Engines,
        config: ModelConfig,
        cache: CacheOptions,
        ready_s: float,
        layout: Layout = _ALONE,
        energy: Energy | None = None,
        activation_dtype: str = "auto",
    ) -> None:
        """`energy`: of the GPUs of the engines (default: the driver's counters)."""
        self._engines, self._config, self._cache, self._ready_s = engines, config, cache, ready_s
        self._layout, self._energy = layout, energy or Energy(engines.gpus)
        self._activation_dtype = activation_dtype
        self._first_s: dict[tuple[int, int], float] = {}  # (concurrency, isl) -> seconds for one token per request

    @classmethod
    def load(cls, config: Config) -> "EngineBench":
        """The engines of a server. Raises ValueError for an unknown model or memory that does not suffice."""
        from oscine.checkpoint.opened import open_model

        options, num_engines = config.engine, config.server.data_parallel_size
        share_experts = config.server.enable_expert_parallel and num_engines > 1
        engines = _one(options) if num_engines == 1 else _several(config, share_experts=share_experts)
        ready_s, model = machine.process_age_s(), options.model
        opened = open_model(replace(model, device=model.device.partition(",")[0]))
        layout = Layout(model.tensor_parallel_size, num_engines, num_engines if share_experts else 1)
        return cls(engines, opened.config, options.cache, ready_s, layout, activation_dtype=model.activation_dtype)

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
                timing = self._pass(point)
            else:
                timing = self._time(point, passes, point.osl if warmup_osl is None else min(point.osl, warmup_osl))
            yield self._result(point, timing, where)

    def _time(self, point: Point, passes: int, warmup_osl: int) -> Timing:
        def quoted(osl: int) -> list[Timing]:
            return [self._pass(replace(point, osl=osl)) for _ in range(passes - 1)]

        if warmup_osl > 0:
            self._pass(replace(point, osl=warmup_osl))
        key = point.concurrency, point.isl
        if key not in self._first_s:
            self._first_s[key] = median(timing.full_s for timing in quoted(1))
        full = quoted(point.osl)
        energy_j = [timing.energy_j for timing in full if timing.energy_j is not None]
        counted = median(energy_j) if len(energy_j) == len(full) else None
        return Timing(median(timing.full_s for timing in full), self._first_s[key], counted)

    def _pass(self, point: Point) -> Timing:
        """A pass with the energy that the GPUs used meanwhile."""
        self._engines.prepare(point)
        before_j = self._energy.joules()
        timing = self._engines.run(point)
        after_j = self._energy.joules()
        if before_j is None or after_j is None or after_j <= before_j:
            return timing
        return replace(timing, energy_j=after_j - before_j)

    def num_held(self, point: Point) -> int:
        """The number of sequences of this length that run at once; others wait, or are computed twice."""
        return self._engines.num_held(point)

    def _result(self, point: Point, timing: Timing, where: machine.Machine) -> Result:
        step_s = (timing.full_s - timing.first_s) / (point.osl - 1)
        if step_s <= 0:
            raise MeasureError(f"{point}: as quick as one token per request; it takes more tokens to measure a step")
        return Result(
            model=self._engines.model,
            **asdict(point),
            output_tok_s=round(point.concurrency * point.osl / timing.full_s, 1),
            prefill_tok_s=round(point.concurrency * point.isl / timing.first_s, 1),
            decode_step_ms=round(step_s * 1e3, 4),
            tok_s_user=round(1 / step_s, 2),
            roofline_share=self._share(point, step_s, where.gpu),
            ready_s=round(self._ready_s, 1),
            **asdict(where),
            num_gpus=1 if where.gpu == "cpu" else self._num_gpus,
            **self._layout._asdict(),
            **_energy(point, timing),
            first_token_ms=round(timing.first_s * 1e3, 3) if point.concurrency == 1 else None,
            kv_cache_dtype="auto" if self._cache.kv_cache_dtype == "auto" else "fp8",
            activation_dtype=self._activation_dtype,
            **self._engines.limits._asdict(),
        )

    @property
    def _num_gpus(self) -> int:
        return self._layout.tensor_parallel_size * self._layout.data_parallel_size

    def _share(self, point: Point, step_s: float, gpu: str) -> float | None:
        ceiling = roofline.ceiling_of(gpu)
        if ceiling is None:
            return None
        context = point.isl + point.osl / 2
        layout = self._layout
        replicas = layout.data_parallel_size // layout.expert_parallel_size  # which read all weights each
        sequences = ceil(point.concurrency / replicas)
        ideal_s = roofline.decode_step_s(
            self._config, sequences, context, ceiling, dtype=self._cache.kv_dtype("bfloat16")
        )
        return round(ideal_s / (self._num_gpus // replicas) / step_s, 4)


def _energy(point: Point, timing: Timing) -> dict[str, Any]:
    """The fields of a result; none where the energy is not known."""
    if timing.energy_j is None:
        return {}
    per_token = timing.energy_j / (point.concurrency * point.osl)
    return {"joules_per_output_token": round(per_token, 6), "watts": round(timing.energy_j / timing.full_s, 1)}


def _one(options: EngineOptions) -> OwnEngine:
    engine = OwnEngine(build_engine(options))
    gc.collect()
    gc.freeze()  # as the engine process does
    return engine


def _several(config: Config, *, share_experts: bool) -> EngineProcesses:
    return EngineProcesses(engines_of(config, Environment().num_gpus), share_experts=share_experts)


def check_context(config: Config, points: Sequence[Point]) -> None:
    """Raises ValueError for a point that is longer than --max-model-len, or than the model's own context."""
    from oscine.checkpoint.opened import config_of  # opens no device: engines are forked later

    model = config.engine.model
    limit, name = model.max_model_len, "--max-model-len"
    if limit is None:
        limit, name = config_of(model).max_position_embeddings, "the model's context"
    for point in points:
        if point.isl + point.osl > limit:
            raise ValueError(f"--points {point}: {point.isl + point.osl} tokens are more than {name}, {limit}")


def measured(config: Config, points: Sequence[Point]) -> Config:
    """The configuration of a server, changed for these points: no prefix cache, and all requests may wait.

    Other limits stay, so the figures are those of a server with the same options.
    """
    engine = config.engine
    waiting = max(engine.scheduler.max_waiting, *(point.concurrency for point in points))
    scheduler = replace(engine.scheduler, max_waiting=waiting)
    cache = replace(engine.cache, prefix_caching=False)
    return replace(config, engine=replace(engine, cache=cache, scheduler=scheduler))
