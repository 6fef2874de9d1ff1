"""Times of single ops on other hardware, measured by others: curves, in a file of JSON lines.

    gemm      name (qkv, output, router, head), tp     x: rows
    experts   experts, tp, ep                          x: tokens; of one GPU of the group
    decode    heads, window (0: all), kv, batch        x: tokens that each row reads
    prefill   heads, window, batch                     x: tokens of each prompt
    sum       gpus                                     x: bytes that are all-reduced

Times are in microseconds, of one layer.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from oscine.timing.curve import Curve

DATA = Path(__file__).parents[1] / "data"
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OpHeader:
    """Where the times of a table come from, and constants of the GPU."""

    system: str  # as AISimulate calls it
    gpu: str  # name in the driver
    framework: str
    version: str
    activations: str  # of the experts: w4a16_mxfp4 or w4a8_mxfp4_mxfp8
    source: str
    licence: str
    sha256: str  # of the file that the curves come from
    bytes_per_s: float
    flops_per_s: float
    memory_bytes: int
    watts: float  # limit of the GPU
    gpus_per_node: int
    link_bytes_per_s: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpCurve:
    """Times of one op over one of its sizes."""

    op: str
    key: dict[str, Any]
    x: list[int]
    us: list[float]

    @property
    def name(self) -> Key:
        return (self.op, *(str(self.key[one]) for one in sorted(self.key)))


@dataclass(frozen=True)
class OpTable:
    """The curves of one kind of GPU, framework and version."""

    header: OpHeader
    curves: tuple[OpCurve, ...]
    _curves: dict[Key, OpCurve] = field(default_factory=dict, compare=False, repr=False)
    _found: dict[Key, Curve] = field(default_factory=dict, compare=False, repr=False)  # of these, once they were used

    def __post_init__(self) -> None:
        self._curves.update({one.name: one for one in self.curves})

    def curve(self, op: str, **key: Any) -> Curve | None:
        """None if the table does not have it."""
        name = (op, *(str(key[one]) for one in sorted(key)))
        if name not in self._found and (given := self._curves.get(name)) is not None:
            self._found[name] = Curve(zip(given.x, given.us, strict=True))
        return self._found.get(name)

    def keys(self, op: str, name: str, **fixed: Any) -> list[int]:
        """The values that one part of the key has, ascending, where the others have these values."""
        rows = (one.key for one in self.curves if one.op == op and fixed.items() <= one.key.items())
        return sorted({int(key[name]) for key in rows})


def write_ops(path: Path, table: OpTable) -> None:
    """Raises OSError."""
    lines = [json.dumps(asdict(table.header))]
    lines += [json.dumps({"op": one.op, **one.key, "x": one.x, "us": one.us}) for one in table.curves]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def parse_ops(lines: Iterable[str], name: str) -> OpTable:
    """Raises ValueError that names the line."""
    header: OpHeader | None = None
    curves: list[OpCurve] = []
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if header is None:
                header = OpHeader(**{one.name: values[one.name] for one in fields(OpHeader)})
            else:
                op, x, us = values.pop("op"), values.pop("x"), values.pop("us")
                if not x or len(x) != len(us) or min(us) <= 0:
                    raise ValueError("x and us must be of equal length, and times above 0")
                curves.append(OpCurve(op, values, x, us))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{name}:{number}: not a line of a table of ops: {error}") from None
    if header is None or not curves:
        raise ValueError(f"{name} has no times of ops")
    return OpTable(header, tuple(curves))


@cache
def shipped_ops() -> tuple[OpTable, ...]:
    """The tables that come with the package."""
    files = sorted((DATA / "ops").glob("*.jsonl"))
    return tuple(parse_ops(path.read_text("utf-8").splitlines(), path.name) for path in files)
