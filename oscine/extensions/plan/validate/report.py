"""How far composed step times are off published measurements of servers, on curves that were not fitted."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from oscine.extensions.plan.foreign.known import Fitted, KnownError, tables_of
from oscine.extensions.plan.foreign.ops import DATA
from oscine.extensions.plan.validate.fit import fit, predict
from oscine.extensions.plan.validate.points import Point, of_split
from oscine.timing.answer import NotMeasuredError

MAX_TTFT_MS = 5000.0  # beyond that a server queues

_HEADER = "hardware     framework  points none   TPOT %   bias   TTFT %   bias   AISimulate"


class Errors(NamedTuple):
    """Relative errors, and points without an answer."""

    tpot: list[float]
    ttft: list[float]
    unanswered: int = 0

    def plus(self, other: "Errors") -> "Errors":
        return Errors(self.tpot + other.tpot, self.ttft + other.ttft, self.unanswered + other.unanswered)


def errors_of(points: Iterable[Point], fitted: Fitted) -> Errors:
    tpot, ttft, unanswered = [], [], 0
    for point in points:
        found = predicted(point, fitted)
        if found is None:
            unanswered += 1
            continue
        tpot_ms, ttft_ms = found
        tpot.append(tpot_ms / point.tpot_ms - 1)
        if point.ttft_ms < MAX_TTFT_MS:
            ttft.append(ttft_ms / point.ttft_ms - 1)
    return Errors(tpot, ttft, unanswered)


@cache
def predicted(point: Point, fitted: Fitted) -> tuple[float, float] | None:
    """Milliseconds of TPOT and TTFT; None for a layout that the tables do not have."""
    try:
        return predict(tables_of(point.hardware, point.framework), point, fitted)
    except NotMeasuredError:
        return None


def groups_of(points: Iterable[Point]) -> dict[tuple[str, str], list[Point]]:
    found: dict[tuple[str, str], list[Point]] = {}
    for point in points:
        found.setdefault((point.hardware, point.framework), []).append(point)
    return dict(sorted(found.items()))


def fit_all(points: Sequence[Point]) -> dict[tuple[str, str], Fitted]:
    """Of the training half alone."""
    groups = groups_of(of_split(points, "train"))
    return {name: fit(own, lambda one: tables_of(one.hardware, one.framework)) for name, own in groups.items()}


def held_out(points: Sequence[Point], fitted: dict[tuple[str, str], Fitted]) -> dict[tuple[str, str], Errors]:
    groups = groups_of(of_split(points, "held out"))
    return {name: errors_of(own, fitted[name]) for name, own in groups.items() if name in fitted}


def without_hardware(points: Sequence[Point]) -> dict[tuple[str, str], Errors]:
    """Each hardware predicted by what is fitted to the training half of all others, with the same framework."""
    training, found = of_split(points, "train"), {}
    for (hardware, framework), own in groups_of(of_split(points, "held out")).items():
        others = [one for one in training if one.framework == framework and one.hardware != hardware]
        if others:
            fitted = fit(others, lambda one: tables_of(one.hardware, one.framework))
            found[hardware, framework] = errors_of(own, fitted)
    return found


def summary(errors: dict[tuple[str, str], Errors]) -> dict[tuple[str, str], KnownError]:
    return {
        name: KnownError(len(one.tpot), round(_mean_absolute(one.tpot), 1), round(_mean_absolute(one.ttft), 1))
        for name, one in errors.items()
    }


def lines(errors: dict[tuple[str, str], Errors]) -> list[str]:
    total = Errors([], [])
    for one in errors.values():
        total = total.plus(one)
    return [_HEADER, *(_line(name, one) for name, one in errors.items()), _line(("all", ""), total)]


def _line(name: tuple[str, str], errors: Errors) -> str:
    count = len(errors.tpot) + errors.unanswered
    shown = " ".join(f"{_mean_absolute(one):>7.1f} {_bias(one):>+6.1f} " for one in (errors.tpot, errors.ttft))
    theirs = aisimulate()[1].get(name)
    shape = "  TPOT {tpot:.1f} ({tpot_bias:+.1f}), TTFT {ttft:.0f} ({ttft_bias:+.0f})"
    other = "" if theirs is None else shape.format(**theirs)
    return f"{name[0]:<12} {name[1]:<10} {count:>6} {errors.unanswered:>4}  {shown}{other}".rstrip()


@cache
def aisimulate() -> tuple[str, dict[tuple[str, str], dict[str, float]]]:
    """What is known of AISimulate's errors, and the errors in percent."""
    found = json.loads((DATA / "aisimulate.json").read_text("utf-8"))
    rows: list[dict[str, Any]] = found["rows"]
    return found["about"], {(row.pop("hardware"), row.pop("framework")): row for row in rows}


def _mean_absolute(values: Sequence[float]) -> float:
    return float(np.mean(np.abs(values))) * 100 if values else float("nan")


def _bias(values: Sequence[float]) -> float:
    return float(np.mean(values)) * 100 if values else float("nan")
