"""Steps with a long context among short ones.

They take longer than steps in which all rows have the mean context: an attention kernel divides each context among as
many programs, so those of the long one work on when all others are done. What a step takes more depends on how far the
longest context is above the mean. It is measured with one long context.

It is exact at the points, never falls with the longest context, and is never more than if all contexts were as long.
Between numbers of rows, and of tokens of mixed steps, it is linear in their logarithms.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from oscine.timing.curve import Curve, between
from oscine.timing.features import StepFeatures
from oscine.timing.table import StepPoint


class Unlike:
    """Of one kind of steps. Without points, a step takes as long as one with equal contexts."""

    def __init__(self, points: Iterable[StepPoint], alike_ms: Callable[[StepFeatures], float]) -> None:
        """`alike_ms`: of a step with equal contexts."""
        found: dict[int, dict[int, list[tuple[float, float]]]] = {}
        for one in points:
            step = one.features
            mean_ms = alike_ms(step._replace(longest=0))
            most_ms = alike_ms(step._replace(decode_context=step.decode_rows * step.longest, longest=0))
            more_ms = max(0.0, min(one.ms, most_ms) - mean_ms)
            place = _place(step, one.size)
            found.setdefault(place.total, {}).setdefault(place.rows, [(0.0, 0.0)]).append((_above(step), more_ms))
        self._curves = {
            total: {rows: Curve(of_rows[rows]) for rows in sorted(of_rows)} for total, of_rows in sorted(found.items())
        }

    def more_ms(self, step: StepFeatures, size: int) -> float:
        """Milliseconds. `size`: of the step's CUDA graph."""
        totals = [*self._curves]
        if not totals:
            return 0.0
        place, x = _place(step, size), max(0.0, _above(step))
        one = between(totals, place.total)
        low, high = (_at(self._curves[totals[i]], place.rows, x) for i in (one.low, one.high))
        return low + (high - low) * one.share


class _Place(NamedTuple):
    """Of mixed steps: all tokens and rows, of decodes: 0 and rows. What fills up a graph is counted as the kernel does,
    among the rows of decodes."""

    total: int
    rows: int


def _place(step: StepFeatures, size: int) -> _Place:
    if step.prompt_sequences:
        return _Place(size or step.tokens, step.decode_rows)
    return _Place(0, size or step.decode_rows)


def _above(step: StepFeatures) -> float:
    """Tokens of the longest context above the mean."""
    return step.longest - step.decode_context / step.decode_rows


def _at(of_rows: dict[int, Curve], rows: int, x: float) -> float:
    known = [*of_rows]
    place = between(known, rows)
    low, high = (of_rows[known[i]].value(x) for i in (place.low, place.high))
    return low + (high - low) * place.share
