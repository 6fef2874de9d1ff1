"""Watts and joules of steps, from the points of a table that have watts."""

from collections.abc import Sequence
from math import exp, log

from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures
from oscine.timing.table import StepPoint, StepTable


class Power:
    """Watts of all GPUs of an engine while it runs steps without a pause."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        self._known = [(_place(one.features), one.watts) for one in points if one.watts is not None]

    def watts(self, step: StepFeatures) -> float:
        """The mean of the points, weighted by how near they are. Raises NotMeasuredError without points."""
        if not self._known:
            raise NotMeasuredError("no watts were measured")
        place = _place(step)
        weights = [exp(-sum(abs(a - b) for a, b in zip(place, known, strict=True))) for known, _ in self._known]
        return sum(w * watts for w, (_, watts) in zip(weights, self._known, strict=True)) / sum(weights)


def step_joules(table: StepTable, power: Power, step: StepFeatures) -> float:
    """Raises NotMeasuredError."""
    return power.watts(step) * table.step_s(step)


def _place(step: StepFeatures) -> tuple[float, float, float]:
    """Logarithms of what decides how busy a GPU is."""
    keys = step.decode_context + step.prompt_pairs
    return 2 * log(1 + step.decode_rows), 2 * log(1 + step.prompt_tokens), log(1 + keys) / 2
