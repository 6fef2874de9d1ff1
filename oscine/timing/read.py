"""Opens tables of step times, and compares a table with the points that were kept out of it."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oscine.timing.answer import NotMeasuredError
from oscine.timing.surface import MeasuredSurface
from oscine.timing.table import Header, StepPoint, StepTable, parse_table


class Check(NamedTuple):
    """How far a table is off at some points."""

    points: int
    not_measured: int  # of these
    error: float  # mean absolute, relative
    bias: float  # mean, relative
    worst: float  # largest absolute, relative


def read_table(path: Path, *, scaled: bool = False) -> StepTable:
    """`scaled`: whether it answers beyond its points. Raises ValueError and OSError."""
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not a table of step times, which `oscine profile` writes: not UTF-8") from None
    header, points = parse_table(text.splitlines(), str(path))
    return table_of(header, points, scaled=scaled)


def table_of(header: Header, points: tuple[StepPoint, ...], *, scaled: bool = False) -> StepTable:
    """`scaled`: as in read_table."""
    return StepTable(header, MeasuredSurface(points, header.graphs), points, scaled=scaled)


def check(table: StepTable, points: Iterable[StepPoint]) -> Check:
    """The table's times against those of the points; a point that it has no time for is only counted."""
    errors, missing = [], 0
    for point in points:
        try:
            errors.append(table.step_s(point.features) * 1e3 / point.ms - 1)
        except NotMeasuredError:
            missing += 1
    found = np.array(errors or [0.0])
    return Check(len(errors) + missing, missing, float(abs(found).mean()), float(found.mean()), float(abs(found).max()))
