"""Steps with long contexts among short ones.

They take longer than steps in which all rows have the mean context. An attention kernel divides each context among as
many programs, and a program reads at a speed of its own at most. All programs together are bound by the memory. So with
k contexts that are not done, a token more of each takes max(alone, k * together), where n * together is what it takes
if all n rows go on. While all contexts grow alike, the difference to rows of the mean context stays as it is.

The longest context and the mean are known. If all other contexts are equal, as in the points, or if as many are as long
as the longest, this gives an upper and a lower bound. Contexts of a service lie between: the others are taken as
spread evenly, between nothing and twice their mean, or between the longest and as far below their mean. The integral
over such contexts is that of a point whose longest context is nearer to the others, by up to their mean.

Times are exact at the points, never fall with the longest context, and are never more than if all contexts were as
long. Between numbers of rows, and of tokens of mixed steps, they are linear in their logarithms.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from oscine.timing.answer import NO_END
from oscine.timing.curve import Curve, between
from oscine.timing.features import StepFeatures
from oscine.timing.table import StepPoint


class More(NamedTuple):
    """Milliseconds above those of equal contexts: base + per_token * decode_context, up to `last_context`."""

    base_ms: float = 0.0
    per_token_ms: float = 0.0
    last_context: int = NO_END

    def blend(self, other: "More", weight: float) -> "More":
        """`weight`: of the other one."""
        base_ms = self.base_ms + (other.base_ms - self.base_ms) * weight
        per_token_ms = self.per_token_ms + (other.per_token_ms - self.per_token_ms) * weight
        return More(base_ms, per_token_ms, min(self.last_context, other.last_context))


class Unlike:
    """Of one kind of steps. Without points, a step takes as long as one with equal contexts."""

    def __init__(self, points: Iterable[StepPoint], alike_ms: Callable[[StepFeatures], float]) -> None:
        """`points`: of one long context among equal ones. `alike_ms`: of a step with equal contexts."""
        found: dict[int, dict[int, list[StepPoint]]] = {}
        for one in points:
            place = _place(one.features, one.size)
            found.setdefault(place.total, {}).setdefault(place.rows, []).append(one)
        self._known = {
            total: {rows: _Rows(of_rows[rows], alike_ms) for rows in sorted(of_rows)}
            for total, of_rows in sorted(found.items())
        }

    def more(self, step: StepFeatures, size: int) -> More:
        """`size`: of the step's CUDA graph."""
        totals = [*self._known]
        if not totals:
            return More()
        place = _place(step, size)
        one = between(totals, place.total)
        low, high = (_at(self._known[totals[i]], place.rows, step) for i in (one.low, one.high))
        return low.blend(high, one.share)


class _Place(NamedTuple):
    """Of mixed steps: all tokens and rows, of decodes: 0 and rows. What fills up a graph is counted as the kernel does,
    among the rows of decodes."""

    total: int
    rows: int


def _place(step: StepFeatures, size: int) -> _Place:
    if step.prompt_sequences:
        return _Place(size or step.tokens, step.decode_rows)
    return _Place(0, size or step.decode_rows)


def _at(of_rows: "dict[int, _Rows]", rows: int, step: StepFeatures) -> More:
    known = [*of_rows]
    place = between(known, rows)
    low, high = (of_rows[known[i]].more(step) for i in (place.low, place.high))
    return low.blend(high, place.share)


class _Rows:
    """Steps of one number of rows: a curve over the tokens of the longest context above the mean, as of a point."""

    def __init__(self, points: Iterable[StepPoint], alike_ms: Callable[[StepFeatures], float]) -> None:
        self._nearer = 1.0  # how much nearer the longest context is, per token of the mean of the others
        measured = []
        for one in sorted(points, key=lambda one: one.longest):
            step = one.features
            rows, others = step.decode_rows, _others(step)
            short_ms, mean_ms, most_ms = (
                alike_ms(step._replace(decode_context=context, longest=0))
                for context in (round(rows * others), step.decode_context, rows * step.longest)
            )
            ms = min(max(one.ms, mean_ms), max(most_ms, mean_ms))
            if most_ms > short_ms:  # of the longest point: `alone` in units of `together`
                alone = rows * (ms - short_ms) / (most_ms - short_ms)
                self._nearer = min(max((rows - alone) / (rows - 1), 0.0), 1.0)
            measured.append((step, ms - mean_ms))
        self._curve = Curve([(0.0, 0.0), *((self._above(step), more_ms) for step, more_ms in measured)])

    def more(self, step: StepFeatures) -> More:
        above, rows = self._above(step), step.decode_rows
        segment = self._curve.at(above)
        if step.longest - _others(step) <= _others(step):  # stays so
            return More(segment.base + segment.slope * above)
        fall = self._nearer * (1 - 1 / rows) / rows  # of `above`, per token of all contexts
        known = [x for x in self._curve.xs if x < above]
        left = (step.longest - 2 * _others(step)) * rows
        if known and fall:
            left = min(left, (above - known[-1]) / fall)
        slope = -segment.slope * fall
        base = segment.base + segment.slope * above - slope * step.decode_context
        return More(base, slope, step.decode_context + int(left))

    def _above(self, step: StepFeatures) -> float:
        """Tokens of the longest context above the mean, if the others were equal and took as long."""
        others = _others(step)
        far = max(0.0, step.longest - others)
        return (1 - 1 / step.decode_rows) * (far - self._nearer * min(others, far))


def _others(step: StepFeatures) -> float:
    """The mean of all contexts but the longest."""
    return (step.decode_context - step.longest) / max(step.decode_rows - 1, 1)
