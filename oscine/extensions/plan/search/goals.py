"""Goals for the latency that users see, and how far a result is from them."""

from dataclasses import dataclass
from typing import Any

from oscine.settings.option import OptionError

Row = dict[str, Any]
_STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}


@dataclass(frozen=True, slots=True)
class Goal:
    """A limit of one statistic of TTFT or TPOT."""

    measure: str  # ttft or tpot
    statistic: str
    limit_s: float

    @classmethod
    def of(cls, measure: str, text: str) -> "Goal":
        """Of p90:500, in milliseconds. Raises OptionError."""
        statistic, found, limit = text.partition(":")
        try:
            limit_ms = float(limit)
        except ValueError:
            limit_ms = 0.0
        if not found or statistic not in _STATISTICS or not 0 < limit_ms < 1e9:
            names = ", ".join(_STATISTICS)
            raise OptionError(measure, f"must be a statistic ({names}) and milliseconds, as p90:500, not {text!r}")
        return cls(measure, statistic, limit_ms / 1e3)

    def value_s(self, row: Row) -> float:
        """Of a row of results."""
        value = row[f"{_STATISTICS[self.statistic]}_{self.measure}"]
        return float("inf") if value is None else float(value)

    def excess(self, row: Row) -> float:
        """1 at the limit, above 1 beyond it."""
        return self.value_s(row) / self.limit_s

    @property
    def name(self) -> str:
        return f"{self.measure.upper()} {self.statistic}"

    def __str__(self) -> str:
        return f"{self.name} up to {self.limit_s * 1e3:,.4g} ms"


@dataclass(frozen=True, slots=True)
class Goals:
    """Limits that all hold together."""

    all: tuple[Goal, ...] = ()

    def excess(self, row: Row) -> float:
        """Of the goal that is missed most."""
        return max((goal.excess(row) for goal in self.all), default=0.0)

    def are_met(self, row: Row) -> bool:
        return self.excess(row) <= 1.0

    def found(self, row: Row) -> str:
        """What a result has, in words."""
        return ", ".join(f"{goal.name} {goal.value_s(row) * 1e3:,.4g} ms" for goal in self.all)

    def __str__(self) -> str:
        return ", ".join(map(str, self.all))
