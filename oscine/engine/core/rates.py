"""Measured rates: whether pages should come from elsewhere or be computed follows from them."""

from dataclasses import dataclass

from oscine.types import StepPlan

_KEPT = 0.8  # share of the earlier measurements in each new one
_DISCOUNT = 0.95  # of a rate that was found too slow, so that it is tried again after a while


@dataclass(slots=True)
class Rate:
    """Seconds per unit, over recent measurements; before the first, what is assumed, or 0."""

    _seconds: float = 0.0
    _units: float = 0.0
    _assumed: float = 0.0

    @property
    def per_unit(self) -> float:
        return self._seconds / self._units if self._units else self._assumed

    def assume(self, seconds: float, units: float) -> None:
        self._assumed = seconds / units

    def note(self, seconds: float, units: float) -> None:
        self._seconds = _KEPT * self._seconds + seconds
        self._units = _KEPT * self._units + units

    def discount(self) -> None:
        self._seconds *= _DISCOUNT
        self._assumed *= _DISCOUNT


def note_prompt_step(rate: Rate, plan: StepPlan, seconds: float) -> None:
    """Adds a step to the rate of prompt tokens. Only steps that are mostly prompt say how long a prompt takes."""
    num_tokens = plan.num_tokens
    num_prompt = sum(sequence.num_tokens for sequence in plan.sequences if sequence.num_tokens > 1)
    if 2 * num_prompt >= num_tokens > len(plan.sequences):
        rate.note(seconds, num_tokens)
