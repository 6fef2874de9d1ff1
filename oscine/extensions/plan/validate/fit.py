"""Fits what tables of ops do not have (Rest, delays before the engine) to published measurements of servers.

The times of a request are sums over the parts of its steps. With the steps of a simulated load, TPOT is linear in Rest,
so a few rounds of least squares suffice. Errors are relative, and a weak prior holds what the points do not decide.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from oscine.extensions.plan.foreign.compose import MODELS, ComposedSurface, Rest
from oscine.extensions.plan.foreign.known import Delays, Fitted, delay_columns
from oscine.extensions.plan.foreign.ops import OpTable
from oscine.extensions.plan.validate.closed_loop import ClosedLoop, Load, Outcome, Server, StepCost
from oscine.extensions.plan.validate.points import Point
from oscine.timing.answer import NO_END
from oscine.timing.features import StepFeatures

_PRIOR = Rest(1.0, 1.3, 0.4e-3, 2e-6, 1e-7, 0.05e-3, 2e-3, 0.0)
_SPREAD = Rest(0.15, 0.15, 1e-3, 1e-5, 2e-6, 0.3e-3, 20e-3, 1e-3)  # standard deviations of the prior
_DELAYS = Delays(0.01, 0.002, 4.0, 2.8e-3, 4.0)
_DELAY_SPREAD = Delays(0.02, 0.01, 3.0, 1e-3, 8.0)
_SHARED = np.array([name == "exchange_s" for name in Rest._fields])  # only engines that share experts have these
_SHARED_DELAYS = np.array([name == "steps_per_engine" for name in Delays._fields])
_ERROR = 0.05  # of a point, relative
_FAR = 3.0  # times this error: from there on a point counts less
_ROUNDS = 4
_STEP_TOKENS = 8192
_WEIGHT_BYTES = 61e9  # of 120b
_TOKEN_BYTES = 18 * 2 * 8 * 64 * 2  # of keys and values, in full layers
_CACHE_SHARE = 0.9


def simulate(tables: Sequence[OpTable], point: Point, fitted: Fitted) -> Outcome:
    """Raises NotMeasuredError for a layout that the tables do not have."""
    surface = ComposedSurface(tables, MODELS["120b"], point.layout, fitted.rest)
    rest = np.array(fitted.rest)
    engines = point.layout.engines

    def cost(step: StepFeatures) -> StepCost:
        own = _busiest(step, engines)
        parts, slopes = surface.parts(own, step.tokens), np.zeros(len(rest))
        share, slope = own.prompt_tokens / max(own.tokens, 1), parts.per_context_s / engines
        slopes[:2] = slope * (1 - share), slope * share
        vector = np.array(parts[: len(rest)])
        last = min(parts.last_context * engines, NO_END)
        return StepCost(float(vector @ rest), float(slopes @ rest), last, vector, slopes)

    layout, memory = point.layout, tables[0].header.memory_bytes
    free = (memory * _CACHE_SHARE - _WEIGHT_BYTES / layout.gpus) * layout.gpus
    server = Server(_STEP_TOKENS * engines, max(int(free / _TOKEN_BYTES), point.prompt + point.answer))
    return ClosedLoop(cost, Load(point.concurrency, point.prompt, point.answer), server).run()


def _busiest(step: StepFeatures, engines: int) -> StepFeatures:
    """Of engines that share experts and run each step together, the one with most to do. Decodes are shared evenly."""
    if engines == 1:
        return step
    rows, chunks = -(-step.decode_rows // engines), -(-step.prompt_sequences // engines)
    context = round(step.decode_context * rows / step.decode_rows) if step.decode_rows else 0
    share = chunks / step.prompt_sequences if chunks else 0.0
    tokens, pairs = round(step.prompt_tokens * share), round(step.prompt_pairs * share)
    return StepFeatures(rows, context, tokens, pairs, chunks, -(-step.sampled // engines))


def predict(tables: Sequence[OpTable], point: Point, fitted: Fitted) -> tuple[float, float]:
    """Milliseconds of TPOT and TTFT. Raises NotMeasuredError."""
    outcome = simulate(tables, point, fitted)
    ttft_s = outcome.ttft_s + fitted.delay_s(point.layout, point.prompt, outcome.tpot_s)
    return outcome.tpot_s * 1e3, ttft_s * 1e3


def fit(points: Sequence[Point], tables_of: Callable[[Point], Sequence[OpTable]]) -> Fitted:
    """What fits these points best. Raises NotMeasuredError for a layout that the tables do not have.

    Layouts of one engine decide all that every layout has. What only engines that share experts have is then fitted to
    these alone: their points are few, and far off without it.
    """
    alone = [point for point in points if point.layout.engines == 1]
    shared = [point for point in points if point.layout.engines > 1]
    found = _fit(alone, tables_of, Fitted(_PRIOR, _DELAYS), ~_SHARED, ~_SHARED_DELAYS)
    return _fit(shared, tables_of, found, _SHARED, _SHARED_DELAYS)


def _fit(
    points: Sequence[Point],
    tables_of: Callable[[Point], Sequence[OpTable]],
    found: Fitted,
    free: NDArray[np.bool_],
    free_delays: NDArray[np.bool_],
) -> Fitted:
    """`free`, `free_delays`: which of the numbers are fitted; all others stay."""
    for _ in range(_ROUNDS if points else 0):
        outcomes = [simulate(tables_of(point), point, found) for point in points]
        both = [*zip(outcomes, points, strict=True)]
        columns = np.array([one.tpot_parts * 1e3 / point.tpot_ms for one, point in both])
        rest = _fit_some(columns, np.ones(len(points)), np.array(found.rest), free, (_PRIOR, _SPREAD))
        wanted_s = np.array([point.ttft_ms for point in points]) / 1e3
        own = np.array([one.ttft_s for one in outcomes]) / wanted_s
        columns = np.array([delay_columns(point.layout, point.prompt, one.tpot_s) for one, point in both])
        columns = columns / wanted_s[:, None]
        delays = _fit_some(columns, 1 - own, np.array(found.delays), free_delays, (_DELAYS, _DELAY_SPREAD))
        found = Fitted(Rest(*rest.tolist()), Delays(*delays.tolist()))
    return found


def _fit_some(
    columns: NDArray[np.float64],
    wanted: NDArray[np.float64],
    values: NDArray[np.float64],
    free: NDArray[np.bool_],
    prior: tuple[Rest, Rest] | tuple[Delays, Delays],
) -> NDArray[np.float64]:
    """`values` with the free ones fitted. `prior`: their means and standard deviations."""
    means, spread = (np.array(one)[free] for one in prior)
    left = wanted - columns[:, ~free] @ values[~free]
    found = values.copy()
    found[free] = _least_squares(columns[:, free], left, means, spread)
    return found


def _least_squares(
    columns: NDArray[np.float64], wanted: NDArray[np.float64], prior: NDArray[np.float64], spread: NDArray[np.float64]
) -> NDArray[np.float64]:
    """No value is negative. Points that are far off count less (Huber's weights)."""
    weights, values = np.ones(len(wanted)), prior
    for _ in range(10):
        held = np.zeros(len(prior), bool)
        for _ in range(len(prior)):
            a = np.vstack([columns * weights[:, None] / _ERROR, np.diag(1 / spread)])
            b = np.concatenate([wanted * weights / _ERROR, prior / spread])
            values = np.zeros(len(prior))
            values[~held] = np.linalg.lstsq(a[:, ~held], b, rcond=None)[0]
            if (values >= 0).all():
                break
            held |= values < 0
        off = abs(columns @ values - wanted) / _ERROR
        weights = np.sqrt(1 / np.maximum(off / _FAR, 1.0))
    return values
