"""Tables of step times: files of JSON lines, first a header, then a line per point.

Unknown keys are ignored. The tables in `tables/` come with the package.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

Class = Literal["measured", "composed"]  # composed: calculated from times of other layouts or models
Kind = Literal["decode", "prompts"]
_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True, slots=True)
class Header:
    """What was measured, and where. Rows and tokens of a point are those of one engine."""

    model: str
    layers: int
    hidden: int  # elements of a row that GPUs exchange
    gpu: str  # name in the driver
    bytes_per_s: float  # of its memory, by clock and width
    flops_per_s: float  # dense bfloat16, by clock and number of cores
    source: str
    figures: Class = "measured"
    num_gpus: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1  # engines that share experts
    link_latency_s: float = 0.0  # of a message between two of the GPUs
    link_bytes_per_s: float = 0.0  # in one direction


@dataclass(frozen=True, slots=True)
class StepPoint:
    """The time of one step: of `rows` sequences with `context` tokens that decode, or of prompts only."""

    kind: Kind
    ms: float
    rows: int = 0
    context: int = 0
    tokens: int = 0
    pairs: int = 0  # of a query and a key, over all prompts

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"no step is of the kind {self.kind!r}")
        if not (self.ms > 0 and self.size[0] > 0):
            raise ValueError("milliseconds, and rows or tokens, must be above 0")

    @property
    def size(self) -> tuple[int, int]:
        """Rows and context, or tokens and pairs."""
        return (self.rows, self.context) if self.kind == "decode" else (self.tokens, self.pairs)


@dataclass(frozen=True, slots=True)
class Table:
    header: Header
    points: tuple[StepPoint, ...]


def parse_table(lines: Iterable[str], name: str) -> Table:
    """Raises ValueError that names the line."""
    header: Header | None = None
    points: list[StepPoint] = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if header is None:
                header = Header(**_known(Header, values))
            else:
                points.append(StepPoint(**_known(StepPoint, values)))
                if any((one.kind, one.size) == (points[-1].kind, points[-1].size) for one in points[:-1]):
                    raise ValueError("once more a step of this size")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{name}:{number}: not a line of a table of step times: {error}") from None
    if header is None or not points:
        raise ValueError(f"{name} has no step times")
    return Table(header, tuple(points))


def _known(record: type, values: dict[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(record) if field.name in values}


@cache
def shipped_tables() -> tuple[Table, ...]:
    return tuple(
        parse_table(path.read_text("utf-8").splitlines(), path.name) for path in sorted(_FOLDER.glob("*.jsonl"))
    )
