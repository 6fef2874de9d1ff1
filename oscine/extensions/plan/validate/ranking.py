"""Whether the layout with the most tokens per second per GPU, as measured, is also predicted first, or second.

A group is all points of one hardware, framework, pair of lengths and number of requests per GPU, with three layouts or
more. What was measured twice with one layout (by several versions) counts with its best time. A group's layouts have
equal loads per GPU, so the order is that of the time per request.
"""

from collections.abc import Iterable
from typing import NamedTuple

from oscine.extensions.plan.foreign.compose import GpuLayout
from oscine.extensions.plan.foreign.known import Fitted
from oscine.extensions.plan.validate.points import Point, of_split
from oscine.extensions.plan.validate.report import predicted

_LAYOUTS = 3  # of a group, at least
_HEADER = "hardware     framework  groups  first %  within two %  lost %"


class Ranked(NamedTuple):
    """A group of points."""

    hardware: str
    framework: str
    prompt: int  # tokens
    answer: int
    per_gpu: float  # requests
    layouts: tuple[GpuLayout, ...]  # as predicted, the best one first; those without a prediction are last
    place: int  # of the measured best layout among them; 0: first
    lost: float  # tokens/s that the better one of the first two has less than the best one, as a share


def rank(points: Iterable[Point], fitted: dict[tuple[str, str], Fitted]) -> list[Ranked]:
    """All groups. `fitted`: by hardware and framework; points of others are left out."""
    groups: dict[tuple[str, str, int, int, float], list[Point]] = {}
    for one in points:
        if (one.hardware, one.framework) in fitted:
            load = one.prompt, one.answer, one.concurrency / one.layout.gpus
            groups.setdefault((one.hardware, one.framework, *load), []).append(one)
    ranked = (_rank(group, own, fitted[group[:2]]) for group, own in sorted(groups.items()))
    return [one for one in ranked if one is not None]


def _rank(group: tuple[str, str, int, int, float], points: list[Point], fitted: Fitted) -> Ranked | None:
    measured: dict[GpuLayout, float] = {}
    expected: dict[GpuLayout, float] = {}
    if len({one.layout for one in points}) < _LAYOUTS:
        return None
    for one in points:
        measured_ms = one.ttft_ms + one.answer * one.tpot_ms
        measured[one.layout] = min(measured_ms, measured.get(one.layout, measured_ms))
        if one.layout not in expected:
            found = predicted(one, fitted)
            expected[one.layout] = float("inf") if found is None else found[1] + one.answer * found[0]
    layouts = sorted(expected, key=expected.__getitem__)
    best = min(measured, key=measured.__getitem__)
    chosen_ms = min(measured[one] for one in layouts[:2])
    return Ranked(*group, tuple(layouts), layouts.index(best), 1 - measured[best] / chosen_ms)


def ranking_lines(points: list[Point], fitted: dict[tuple[str, str], Fitted]) -> list[str]:
    """Two tables: of curves that were not fitted, and of all points."""
    held_out, everything = rank(of_split(points, "held out"), fitted), rank(points, fitted)
    found = ["Groups whose layouts are all held out", *_table(held_out)]
    return [*found, "All groups, with layouts that were fitted", *_table(everything)]


def _table(ranked: list[Ranked]) -> list[str]:
    groups: dict[tuple[str, str], list[Ranked]] = {}
    for one in ranked:
        groups.setdefault((one.hardware, one.framework), []).append(one)
    return [_HEADER, *(_line(*name, own) for name, own in groups.items()), _line("all", "", ranked)]


def _line(hardware: str, framework: str, ranked: list[Ranked]) -> str:
    if not ranked:
        return f"{hardware:<12} {framework:<10} {0:>6}"
    first, within, lost = (
        100 * sum(values) / len(ranked)
        for values in (
            [one.place == 0 for one in ranked],
            [one.place <= 1 for one in ranked],
            [one.lost for one in ranked],
        )
    )
    return f"{hardware:<12} {framework:<10} {len(ranked):>6}  {first:>7.1f}  {within:>12.1f}  {lost:>6.1f}"
