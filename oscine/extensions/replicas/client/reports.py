"""Adds up what the engines behind an ingress's links report of themselves.

An engine's counters begin at zero with each life; those of all together never shrink. Gauges are of engines that are
linked now.
"""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from oscine.statistic import declared
from oscine.types import EngineStats

_ALL = tuple(statistic.field for statistic in declared(EngineStats))
_GROWING = tuple(statistic.field for statistic in declared(EngineStats) if statistic.only_grows)


class Reports:
    """By the address of the engine, which no two have at a time."""

    def __init__(self) -> None:
        self._newest: dict[str, EngineStats] = {}
        self._ended = EngineStats()  # counters of lives that are over

    def take(self, address: str, stats: EngineStats) -> None:
        before = self._newest.get(address)
        if before is not None and stats.steps < before.steps:
            _add(self._ended, before, _GROWING)
        self._newest[address] = stats

    def rest(self, address: str) -> None:
        """The engine goes on, and is not heard any more."""
        if address in self._newest:
            self._newest[address] = _add(EngineStats(), self._newest[address], _GROWING)

    def end(self, address: str) -> None:
        """The engine's life is over."""
        if address in self._newest:
            _add(self._ended, self._newest.pop(address), _GROWING)

    def total(self) -> EngineStats:
        total = _add(EngineStats(), self._ended, _ALL)
        for stats in self._newest.values():
            _add(total, stats, _ALL)
        return total


def _add(total: EngineStats, stats: EngineStats, names: Iterable[str]) -> EngineStats:
    for name in names:
        setattr(total, name, _sum(getattr(total, name), getattr(stats, name)))
    return total


def _sum(one: Any, other: Any) -> Any:
    if isinstance(one, list):
        return [a + b for a, b in zip_longest(one, other, fillvalue=0)]
    return one + other
