"""Two runs over the same tasks: the difference of their accuracies, its test, and the tasks that changed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from oscine.extensions.eval import estimates
from oscine.extensions.eval.estimates import Estimate
from oscine.extensions.eval.results import Row


class CompareError(ValueError):
    """Two runs that cannot be compared."""


class Tally(NamedTuple):
    """The answers to one task."""

    group: str
    digest: str
    right: int
    samples: int

    def __str__(self) -> str:
        return f"{self.right}/{self.samples}"


def tally(rows: Iterable[Row]) -> dict[str, Tally]:
    """By the id of the task. Requests that failed count as wrong answers."""
    tallies: dict[str, Tally] = {}
    for row in rows:
        known = tallies.get(row.task, Tally(row.group, row.digest, 0, 0))
        tallies[row.task] = known._replace(right=known.right + row.right, samples=known.samples + 1)
    return tallies


@dataclass(frozen=True, slots=True)
class Comparison:
    """`first` and `second` have the same tasks, in the same order."""

    first: Mapping[str, Tally]
    second: Mapping[str, Tally]
    num_only_first: int  # tasks that the other run lacks
    num_only_second: int

    @classmethod
    def of(cls, first: Iterable[Row], second: Iterable[Row]) -> "Comparison":
        """Raises CompareError."""
        one, other = tally(first), tally(second)
        common = [task for task in one if task in other]
        if not common:
            raise CompareError("the two runs have no task in common")
        for task in common:
            if one[task].digest != other[task].digest:
                raise CompareError(f"the task {task!r} is not the same one in both runs")
        for tallies in (one, other):
            _check_samples(tallies)
        chosen, others = ({task: tallies[task] for task in common} for tallies in (one, other))
        return cls(chosen, others, len(one) - len(common), len(other) - len(common))

    @property
    def difference(self) -> Estimate:
        """Second minus first."""
        pairs = zip(self.first.values(), self.second.values(), strict=True)
        return estimates.difference((a.right / a.samples, b.right / b.samples) for a, b in pairs)

    @property
    def p(self) -> float:
        pairs = [*zip(self.first.values(), self.second.values(), strict=True)]
        unit = lcm(pairs[0][0].samples, pairs[0][1].samples)
        return estimates.sign_flip_p(b.right * (unit // b.samples) - a.right * (unit // a.samples) for a, b in pairs)

    @property
    def is_single(self) -> bool:
        """Whether there is one answer per task in both runs."""
        return all(tally.samples == 1 for tallies in (self.first, self.second) for tally in tallies.values())

    def changed(self) -> list[tuple[str, Tally, Tally]]:
        """Tasks with another share of right answers: those that the second run lost first, the largest change first."""
        found = [(task, one, self.second[task]) for task, one in self.first.items()]
        moved = [(b.right / b.samples - a.right / a.samples, task, a, b) for task, a, b in found]
        return [(task, a, b) for gain, task, a, b in sorted(moved, key=lambda m: m[:2]) if gain]


def _check_samples(tallies: Mapping[str, Tally]) -> None:
    most = max(tally.samples for tally in tallies.values())
    for task, found in tallies.items():
        if found.samples != most:
            raise CompareError(
                f"a run is not complete: the task {task!r} has {found.samples} of {most} answers; run it again to go on"
            )
