"""Measures a grid of steps within a time: up through the sizes, then down, so that heat shows as a drift."""

import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, Protocol

from oscine.extensions.profile.grid import HELD_OUT, LEVELS, Levels, Limits, Shape, grid, held_out
from oscine.extensions.profile.steps import DROPPED, Times
from oscine.timing.table import StepPoint
from oscine.types import TIMED_CONTEXT, DecodeTimes

_MOST, _FEWEST, _PASS_S = 8, 2, 0.5  # samples of a pass: as many as take so long, but within these bounds
_WATTS_S, _WATTS_POINTS = 1.0, 25
_PLAN_S, _TOKEN_S = 2e-5, 1e-7  # of a sequence in a plan, and of a token that a sequence comes with, about
_COUNT = DROPPED + _MOST  # steps of a pass, at most
_FAR, _FAR_TOKENS = 16384, 1024  # context and tokens of steps that tell what a context costs


class Engine(Protocol):
    """What is measured: an engine, or several that share experts and run each step together."""

    limits: Limits

    @property
    def gpus(self) -> Sequence[str]: ...

    def measure(self, shape: Shape, count: int) -> Times:
        """Runs `count` steps; the times of the first DROPPED are left out."""
        ...


class Measured(NamedTuple):
    """Points, those that are held out included, and how long it took."""

    points: list[StepPoint]
    seconds: float


Begin = Callable[[int, float], object]  # so many shapes will take about so many seconds
Progress = Callable[[int, int], object]  # of so many shapes, so many are done


def profile(
    engine: Engine,
    seconds: float,
    *,
    seed: int = 0,
    begin: Begin = lambda all_, seconds: None,
    progress: Progress = lambda done, all_: None,
) -> Measured:
    """Points of the densest grid that takes about `seconds`; the coarsest one takes as long as it takes.

    Raises ValueError for an engine that is too small for the grid.
    """
    began_s = time.monotonic()
    cost = _Cost(engine)
    shapes = grid(engine.limits, _choose(engine.limits, cost, seconds - (time.monotonic() - began_s)), _COUNT)
    if not {"decode", "prompts"} <= {shape.kind for shape in shapes}:
        raise ValueError(f"{engine.limits.max_model_len} tokens per sequence are too few for a table of step times")
    extra = held_out(engine.limits, shapes, _COUNT, seed)
    up: dict[Shape, Times] = {}
    down: dict[Shape, Times] = {}
    total = 2 * len(shapes) + len(extra)
    left_s = seconds - (time.monotonic() - began_s)
    begin(total, min(cost.seconds(shapes), max(cost.seconds(shapes, 1), left_s)))
    for shape in (*shapes, *extra):
        up[shape] = engine.measure(shape, cost.count(shape))
        progress(len(up), total)
    for shape in reversed(shapes):
        if time.monotonic() - began_s > seconds:
            break
        down[shape] = engine.measure(shape, cost.count(shape))
        progress(len(up) + len(down), total)
    watts = _watts(engine, shapes, up) if engine.gpus else {}
    kept = set(extra) - set(shapes)
    points: dict[tuple[Any, ...], StepPoint] = {}
    for shape in (*shapes, *kept):
        one = _point(shape, up[shape], down.get(shape), watts.get(shape), engine.limits, held=shape in kept)
        points.setdefault(one.key, one)  # other contexts may have the same sum
    return Measured([*points.values()], time.monotonic() - began_s)


def verified(times: dict[int, DecodeTimes], limits: Limits) -> Iterable[StepPoint]:
    """Steps with drafts, as they were measured at the start of the engine; the time of the drafter is included."""
    for sequences, one in times.items():
        for drafts, seconds in enumerate(one.drafting[1:], 1):
            rows = sequences * (1 + drafts)
            shape = Shape(rows, TIMED_CONTEXT)
            size = limits.graphs.size_of(shape.features()._replace(sampled=sequences, drafts=sequences * drafts))
            yield StepPoint(
                "verify",
                _rounded(seconds * 1e3),
                rows,
                TIMED_CONTEXT + drafts // 2 + 1,
                sampled=sequences,
                drafts=sequences * drafts,
                size=size,
            )


class _Cost:
    """About how long a shape takes: seconds per step, row, token, token of context and pair, from steps of each."""

    def __init__(self, engine: Engine) -> None:
        limits, steps = engine.limits, DROPPED + _FEWEST
        self._watts_s = _WATTS_S * _WATTS_POINTS if engine.gpus else 0.0
        page = limits.page_size
        tokens = max(1, min(limits.step_tokens, limits.max_model_len - 1 - steps))
        far = min(_FAR, (limits.max_model_len - tokens) // 2, limits.pages[0] * page // 2) // page * page
        few = max(2, min(tokens, _FAR_TOKENS))

        def took_s(shape: Shape) -> float:
            return median(engine.measure(shape, steps).ms) / 1e3 if shape.fits(limits, steps) else 0.0

        rows = max(1, min(limits.max_num_seqs, limits.pages[0]) // 2)
        self._step_s = took_s(Shape(1, page))
        self._row_s = max(0.0, took_s(Shape(rows, page)) - self._step_s) / rows
        self._token_s = max(0.0, took_s(_prompt(tokens)) - self._step_s) / tokens
        self._context_s = max(0.0, took_s(Shape(1, far)) - self._step_s) / max(far, 1)
        self._pair_s = max(0.0, took_s(_prompt(few, far)) - self._step_s - few * self._token_s) / max(few * far, 1)

    def count(self, shape: Shape) -> int:
        """Steps of a pass."""
        return DROPPED + max(_FEWEST, min(_MOST, round(_PASS_S / max(self._of_step(shape), 1e-6))))

    def seconds(self, shapes: Sequence[Shape], num_passes: int = 2) -> float:
        """Of the passes, the held-out steps, and the watts."""
        passes = sum(self.count(one) * self._of_step(one) + sum(one.contexts()) * _TOKEN_S for one in shapes)
        return passes * (num_passes + HELD_OUT / max(len(shapes), 1)) + self._watts_s

    def _of_step(self, shape: Shape) -> float:
        context, pairs = sum(shape.contexts()), shape.tokens * shape.start
        step_s = self._step_s + shape.rows * self._row_s + shape.tokens * self._token_s
        return step_s + context * self._context_s + pairs * self._pair_s + (shape.rows + shape.chunks) * _PLAN_S


def _prompt(tokens: int, start: int = 0) -> Shape:
    return Shape(tokens=tokens, start=start, chunks=1)


def _choose(limits: Limits, cost: _Cost, seconds: float) -> Levels:
    """Kind after kind becomes denser, the coarsest first, as long as the time permits."""
    levels = Levels()
    denser: Levels | None = levels
    while denser is not None:
        levels = denser
        tried = (levels._replace(**{kind: n + 1}) for n, kind in sorted(zip(levels, levels._fields, strict=True)))
        fitting = (one for one in tried if max(one) < LEVELS and cost.seconds(grid(limits, one, _COUNT)) <= seconds)
        denser = next(fitting, None)
    return levels


def _watts(engine: Engine, shapes: Sequence[Shape], up: dict[Shape, Times]) -> dict[Shape, float]:
    """The counter of energy is slow, so steps are repeated for a second."""
    found: dict[Shape, float] = {}
    for shape in shapes[:: max(1, len(shapes) // _WATTS_POINTS)]:
        count = DROPPED + int(_WATTS_S * 1e3 / median(up[shape].ms)) + 1
        if shape.fits(engine.limits, count) and (watts := engine.measure(shape, count).watts) is not None:
            found[shape] = watts
    return found


def _point(
    shape: Shape, up: Times, down: Times | None, watts: float | None, limits: Limits, *, held: bool
) -> StepPoint:
    ms = up.ms if down is None else up.ms + down.ms
    middle = median(ms)
    more = DROPPED + (len(up.ms) - 1) // 2
    step = shape.features(more)
    kind: Literal["decode", "prompts", "mixed"] = shape.kind  # type: ignore[assignment]
    return StepPoint(
        kind,
        _rounded(middle),
        shape.rows,
        round(step.decode_context / max(shape.rows, 1)),
        shape.tokens,
        step.prompt_pairs,
        sequences=shape.chunks,
        sampled=step.sampled,
        size=limits.graphs.size_of(step),
        host_ms=_rounded(median(up.host_ms)),
        mad=_rounded(median(abs(one - middle) for one in ms)),
        count=len(ms),
        drift=0.0 if down is None else round(median(down.ms) / median(up.ms) - 1, 4),
        watts=None if watts is None else round(watts, 1),
        held_out=held,
    )


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")
