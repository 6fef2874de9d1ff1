"""The tables of step times in `tables/`, which come with the package."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from oscine.timing.table import Header, StepPoint, parse_table

_FOLDER = Path(__file__).with_name("tables")


@dataclass(frozen=True, slots=True)
class Table:
    header: Header
    points: tuple[StepPoint, ...]


@cache
def shipped_tables() -> tuple[Table, ...]:
    files = sorted(_FOLDER.glob("*.jsonl"))
    return tuple(Table(*parse_table(path.read_text("utf-8").splitlines(), path.name)) for path in files)
