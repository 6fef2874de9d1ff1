"""Whether pages should come back or be computed: measured rates of copies and of steps."""

from dataclasses import dataclass, field
from math import inf

from oscine.types import StepPlan

_KEPT = 0.8  # share of the earlier measurements in each new one
_OVERHEAD_S = 0.001  # of a copy: threads that wake up, looks of the loop
_DISCOUNT = 0.95  # of a tier that was refused, so that it is tried again after a while


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


@dataclass(slots=True)
class Rates:
    token: Rate = field(default_factory=Rate)  # of prompts
    host: Rate = field(default_factory=Rate)  # bytes
    disk: Rate = field(default_factory=Rate)  # bytes

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        """Only steps that are mostly prompt say how long a prompt takes."""
        num_tokens = plan.num_tokens
        num_prompt = sum(sequence.num_tokens for sequence in plan.sequences if sequence.num_tokens > 1)
        if 2 * num_prompt >= num_tokens > len(plan.sequences):
            self.token.note(seconds, num_tokens)

    def load_s(self, host_bytes: int, disk_bytes: int) -> float:
        return _OVERHEAD_S + host_bytes * self.host.per_unit + disk_bytes * self.disk.per_unit

    def compute_s(self, num_tokens: int) -> float:
        """Of so many tokens of a prompt; before one was computed, for ever."""
        per_token = self.token.per_unit
        return num_tokens * per_token if per_token else inf
