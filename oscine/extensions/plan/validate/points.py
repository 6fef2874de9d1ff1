"""Published measurements of servers (data/points.csv), and which of them may be used to fit.

The file's own columns say what each row is and where it comes from. `split` is fixed: a curve is all rows of one
hardware, framework, layout and pair of lengths, over all versions. Curves of a hardware and framework are ordered by a
SHA-256 of their names, and every other one was held out. Rows of which the server ran fewer requests than stated are
in neither half.
"""

import csv
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

from oscine.extensions.plan.foreign.compose import GpuLayout
from oscine.extensions.plan.foreign.ops import DATA

Split = Literal["train", "held out", ""]
FILE = DATA / "points.csv"
_LAYOUT = re.compile(r"TP(\d+)/MoE-TP(\d+)/EP(\d+)")
_EARLY = "gpt-oss-dev"
_QUEUED = "fewer ran than the stated concurrency"


class Point(NamedTuple):
    """A published measurement of a server."""

    hardware: str
    framework: str
    version: str
    layout: GpuLayout
    prompt: int  # tokens, at most
    answer: int
    concurrency: int
    tpot_ms: float
    ttft_ms: float
    split: Split

    @property
    def curve(self) -> tuple[object, ...]:
        return self.hardware, self.framework, self.layout, self.prompt, self.answer


def read_points(path: Path = FILE) -> list[Point]:
    """Those with latencies of both kinds, on one engine or on engines that share experts. Raises OSError."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    found: dict[tuple[object, ...], Point] = {}
    for row in rows:
        point = _point(row)
        if point is not None:  # a measurement that is listed under two layouts counts once
            found.setdefault((point.hardware, point.tpot_ms, point.ttft_ms, point.concurrency), point)
    return [*found.values()]


def _point(row: dict[str, str]) -> Point | None:
    match = _LAYOUT.fullmatch(row["layout"])
    if match is None or row["mode"] != "agg" or not (row["tpot_ms"] and row["ttft_ms"]):
        return None
    # Both spellings of the early images of TensorRT-LLM on H200 have the same times, those of divided experts.
    layout = _layout([int(one) for one in match.groups()], int(row["gpus"]), row["version"])
    if row["hardware"] == "h200_sxm" and row["framework"] == "trtllm" and row["version"] == "":
        layout = layout._replace(experts_tp=1, experts_ep=layout.gpus)
    split: Split = "" if _QUEUED in row["note"] else row["split"]  # type: ignore[assignment]
    numbers = int(row["isl"]), int(row["osl"]), int(row["concurrency"]), float(row["tpot_ms"]), float(row["ttft_ms"])
    return Point(row["hardware"], row["framework"], row["version"], layout, *numbers, split)


def _layout(sizes: list[int], gpus: int, version: str) -> GpuLayout:
    """In early files tp is the product of the sizes of attention and experts: 4 for two GPUs that share experts."""
    tp, experts_tp, ep = sizes
    if version == _EARLY and tp == experts_tp * ep and experts_tp == ep > 1:
        gpus = experts_tp
    tp = min(tp, gpus)
    return GpuLayout(gpus, tp, max(1, gpus // ep), ep)


def of_split(points: Iterable[Point], split: Split) -> list[Point]:
    return [one for one in points if one.split == split]
