"""The answer of a table of step times: seconds that grow linearly with the context, and where they come from."""

import sys
from typing import Literal, NamedTuple

# measured: a point of the table. interpolated: between points. composed: of times of ops, or of other kinds of steps.
# scaled: beyond the points.
Class = Literal["measured", "interpolated", "composed", "scaled"]
CLASSES: tuple[Class, ...] = ("measured", "interpolated", "composed", "scaled")
NO_END = sys.maxsize


class NotMeasuredError(LookupError):
    """The table has no points around this step."""


class Cell(NamedTuple):
    """A step's seconds are base_s + per_token_s * decode_context up to `last_context`, with all else equal."""

    base_s: float
    per_token_s: float = 0.0
    last_context: int = NO_END
    figures: Class = "measured"
    factor: float = 1.0  # by which the step exceeds the points; 1: it does not

    def step_s(self, context: int) -> float:
        return self.base_s + self.per_token_s * context


def worst(*classes: Class) -> Class:
    return CLASSES[max(map(CLASSES.index, classes))]


def blend(low: Cell, high: Cell, weight: float) -> Cell:
    """Between two cells, as long as both are valid. `weight`: of the second."""
    if weight == 0.0:
        return low
    if weight == 1.0:
        return high
    return Cell(
        low.base_s + (high.base_s - low.base_s) * weight,
        low.per_token_s + (high.per_token_s - low.per_token_s) * weight,
        min(low.last_context, high.last_context),
        worst("interpolated", low.figures, high.figures),
        max(low.factor, high.factor),
    )
