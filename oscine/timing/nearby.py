"""Watts and the host's own time of a step, from the points of a table that are near it."""

from collections.abc import Iterable, Sequence
from math import exp, log

from oscine.timing.answer import NotMeasuredError
from oscine.timing.features import StepFeatures
from oscine.timing.table import StepPoint, StepTable

Place = tuple[float, float, float]


class Nearby:
    """The mean of points, weighted by how near they are."""

    def __init__(self, known: Iterable[tuple[StepPoint, float]]) -> None:
        self._known = [(_place(point.features), value) for point, value in known]

    def __call__(self, step: StepFeatures) -> float:
        """Raises NotMeasuredError without points."""
        if not self._known:
            raise NotMeasuredError("no points of the table have this figure")
        place = _place(step)
        weights = [exp(-sum(abs(a - b) for a, b in zip(place, known, strict=True))) for known, _ in self._known]
        return sum(w * value for w, (_, value) in zip(weights, self._known, strict=True)) / sum(weights)


def watts_of(points: Sequence[StepPoint]) -> Nearby:
    """Watts of all GPUs of an engine while it runs steps without a pause."""
    return Nearby((one, one.watts) for one in points if one.watts is not None)


def host_s_of(points: Sequence[StepPoint]) -> Nearby:
    """Seconds until the host has launched a step. They are within the time of the step, beside the device's work."""
    return Nearby((one, one.host_ms / 1e3) for one in points if one.host_ms > 0)


def step_joules(table: StepTable, watts: Nearby, step: StepFeatures) -> float:
    """Raises NotMeasuredError."""
    return watts(step) * table.step_s(step)


def _place(step: StepFeatures) -> Place:
    """Logarithms of what decides how busy a GPU is."""
    keys = step.decode_context + step.prompt_pairs
    return 2 * log(1 + step.decode_rows), 2 * log(1 + step.prompt_tokens), log(1 + keys) / 2
