"""The time of a step of any size, interpolated between the points of one table.

Times are exact at the points, and between sizes linear in logarithms. Larger decode steps continue the last slope. A
larger step of prompts has the tokens/s of the largest measured one, and a smaller one takes as long as the smallest.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import exp, log

from oscine.timing.table import StepPoint

_Line = list[tuple[float, float]]


class Surface:
    """The step times of one table. Raises ValueError without points of both kinds."""

    def __init__(self, points: Sequence[StepPoint]) -> None:
        used = [one for one in points if not one.held_out]
        self._decode = _by_size((one.rows, one.context, one.ms) for one in used if one.kind == "decode")
        self._prompts = _by_size((one.tokens, one.pairs, one.ms) for one in used if one.kind == "prompts")
        if not self._decode or not self._prompts:
            raise ValueError("a table of step times needs decode steps and steps of prompts")

    def decode_ms(self, rows: int, context: float) -> float:
        """The time of a decode step of `rows` sequences with this mean context."""
        sizes = [(size, _linear(line, max(context, line[0][0]))) for size, line in self._decode]
        return _in_logs(sizes, rows)

    def prompts_ms(self, tokens: int, pairs: float) -> float:
        """The time of a step of prompts. `pairs`: of a query and a key, over all prompts."""
        each = pairs / tokens
        sizes = [(size, _linear(line, max(each * size, line[0][0]))) for size, line in self._prompts]
        (least, _), (most, ms) = sizes[0], sizes[-1]
        return ms * tokens / most if tokens > most else _in_logs(sizes, max(tokens, least))


def _by_size(points: Iterable[tuple[int, int, float]]) -> list[tuple[int, _Line]]:
    found: dict[int, _Line] = {}
    for size, other, ms in points:
        found.setdefault(size, []).append((other, ms))
    return [(size, sorted(found[size])) for size in sorted(found)]


def _linear(line: _Line, x: float) -> float:
    """Piecewise linear, also beyond the ends."""
    if len(line) == 1:
        return line[0][1]
    at = min(max(bisect_right(line, (x,)), 1), len(line) - 1)
    (x0, y0), (x1, y1) = line[at - 1 : at + 1]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _in_logs(line: Sequence[tuple[int, float]], x: int) -> float:
    return exp(_linear([(log(size), log(ms)) for size, ms in line], log(x)))
