"""Whether pages should come back or be computed: measured rates of copies and of steps."""

from dataclasses import dataclass, field
from math import inf

from oscine.engine.core.rates import Rate, note_prompt_step
from oscine.types import StepPlan

_OVERHEAD_S = 0.001  # of a copy: threads that wake up, looks of the loop


@dataclass(slots=True)
class Rates:
    token: Rate = field(default_factory=Rate)  # of prompts
    host: Rate = field(default_factory=Rate)  # bytes
    disk: Rate = field(default_factory=Rate)  # bytes

    def note_step(self, plan: StepPlan, seconds: float) -> None:
        note_prompt_step(self.token, plan, seconds)

    def load_s(self, host_bytes: int, disk_bytes: int) -> float:
        return _OVERHEAD_S + host_bytes * self.host.per_unit + disk_bytes * self.disk.per_unit

    def compute_s(self, num_tokens: int) -> float:
        """Of so many tokens of a prompt; before one was computed, for ever."""
        per_token = self.token.per_unit
        return num_tokens * per_token if per_token else inf
