"""Curves through measured points: piecewise linear, and never falling."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import log
from typing import NamedTuple

import numpy as np


class Segment(NamedTuple):
    """base + slope * x, for x up to `end`."""

    base: float
    slope: float
    end: float
    is_point: bool = False  # x is one of the points
    beyond: bool = False  # x is beyond the last point


class Curve:
    """Constant before its first point; after the last one it goes on with the last slope."""

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        """Points at the same place are averaged, and those that fall are levelled."""
        found: dict[float, list[float]] = {}
        for x, y in points:
            found.setdefault(x, []).append(y)
        self.xs = sorted(found)
        self.ys = rising([_mean(found[x]) for x in self.xs])
        gaps = range(len(self.xs) - 1)
        self._slopes = [(self.ys[i + 1] - self.ys[i]) / (self.xs[i + 1] - self.xs[i]) for i in gaps]

    @property
    def last_slope(self) -> float | None:
        return self._slopes[-1] if self._slopes else None

    def value(self, x: float) -> float:
        base, slope, *_ = self.at(x)
        return base + slope * x

    def at(self, x: float, last_slope: float = 0.0) -> Segment:
        """`last_slope`: of a curve of a single point, beyond it."""
        place = bisect_left(self.xs, x)
        if place < len(self.xs) and self.xs[place] == x:
            slope = self._slopes[place - 1] if place else 0.0
            return Segment(self.ys[place] - slope * x, slope, x, is_point=True)
        if place == 0:
            return Segment(self.ys[0], 0.0, self.xs[0])
        if place < len(self.xs):
            slope = self._slopes[place - 1]
            return Segment(self.ys[place] - slope * self.xs[place], slope, self.xs[place])
        slope = self._slopes[-1] if self._slopes else last_slope
        return Segment(self.ys[-1] - slope * self.xs[-1], slope, float("inf"), beyond=True)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) > 1 else float(values[0])


def rising(values: Sequence[float]) -> list[float]:
    """The values where they rise; where they fall, the mean of a level stretch (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]


class Between(NamedTuple):
    """Two neighbours in a sorted list, and how far towards the second, from 0 to 1."""

    low: int
    high: int
    share: float
    factor: float = 1.0  # by which the value exceeds the last of the list


def between(sizes: Sequence[float], value: float) -> Between:
    """In logarithms. Below the first one it is the first, above the last one the last with a factor."""
    place = bisect_left(sizes, value)
    if place == len(sizes):
        return Between(place - 1, place - 1, 0.0, value / sizes[-1])
    if place == 0 or sizes[place] == value:
        return Between(place, place, 0.0)
    low, high = sizes[place - 1], sizes[place]
    return Between(place - 1, place, log(value / low) / log(high / low))
