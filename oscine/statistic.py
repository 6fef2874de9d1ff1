"""What a statistic is: declared once, as the default of a field of a record such as oscine.types.EngineStats.

Metrics, sums over engines and the loads that scaling looks at follow from the declaration.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Kind = Literal["gauge", "counter", "summary", "histogram", "positions"]  # all but gauges only grow
# /metrics of a model, of one that fetches pages from other engines, that drafts, that offloads pages, of a replica;
# scaling.
Reader = Literal["engine", "transfers", "speculation", "offload", "replica", "load"]
_DECLARED = "statistic"  # key of a field's metadata


@dataclass(frozen=True, slots=True)
class Statistic:
    field: str
    kind: Kind
    help: str
    metric: str  # its name in /metrics, which has "oscine:" or "oscine:replica_" before it
    readers: tuple[Reader, ...]
    count: str = ""  # of a sum: the field with the number of its summands

    @property
    def only_grows(self) -> bool:
        return self.kind != "gauge"

    @property
    def load_name(self) -> str:
        return self.field.removeprefix("num_")


def statistic(default: T, kind: Kind, help: str, metric: str, *readers: Reader, count: str = "") -> T:
    """The default of a dataclass field that is a statistic."""
    declared = Statistic("", kind, help, metric, readers, count)
    of_field: T = field(default=default, metadata={_DECLARED: declared})
    return of_field


def gauge(help: str, metric: str, *readers: Reader) -> int:
    return statistic(0, "gauge", help, metric, *readers)


def counter(help: str, metric: str = "", *readers: Reader) -> int:
    return statistic(0, "counter", help, metric, *readers)


def seconds(help: str, metric: str, *readers: Reader, count: str = "") -> float:
    """A counter of seconds that are added up; a summary where it is said how many were."""
    return statistic(0.0, "summary" if count else "counter", help, metric, *readers, count=count)


def histogram(help: str, metric: str, count: str) -> dict[str, Statistic]:
    """Metadata of a list whose entry k counts observations above 2^(k-1) and at most 2^k."""
    return {_DECLARED: Statistic("", "histogram", help, metric, ("engine",), count)}


def by_position(help: str, metric: str) -> dict[str, Statistic]:
    """Metadata of a list of counters, whose index is the label `position`."""
    return {_DECLARED: Statistic("", "positions", help, metric, ("speculation",))}


def declared(record: Any) -> Iterator[Statistic]:
    """The statistics of a dataclass."""
    for of in dataclasses.fields(record):
        if _DECLARED in of.metadata:
            yield dataclasses.replace(of.metadata[_DECLARED], field=of.name)
