"""Tables of step times: files of JSON lines, first a header, then a line per point.

Unknown keys are ignored, so that a table of a newer version can be read.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from math import inf
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from oscine.timing.answer import CLASSES, Cell, Class
from oscine.timing.features import StepFeatures
from oscine.timing.kinds import GraphSizes

Kind = Literal["decode", "verify", "prompts", "mixed"]


@dataclass(frozen=True, slots=True)
class Header:
    """What was measured, and where. The figures of a point are those of one engine."""

    model: str
    layers: int
    hidden: int  # elements of a row that GPUs exchange
    gpu: str  # name in the driver
    source: str  # how it was measured
    figures: Class = "measured"
    bytes_per_s: float = 0.0  # of its memory, by clock and width; 0: not known
    flops_per_s: float = 0.0  # dense bfloat16, by clock and number of cores; 0: not known
    framework: str = "oscine"
    version: str = ""
    commit: str = ""
    licence: str = ""  # of points that are not our own
    sha256: str = ""  # of the file that they come from
    num_gpus: int = 1
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1  # engines that share experts
    link_latency_s: float = 0.0  # of a message between two of the GPUs
    link_bytes_per_s: float = 0.0  # in one direction
    weights: str = ""  # "random", or a checkpoint
    dtype: str = ""
    drafts_by: str = ""  # the method that made the drafts of steps that verify them; "": none, or not known
    kv_cache_dtype: str = "auto"
    activation_dtype: str = "auto"
    max_num_seqs: int = 0  # limits of the engine; 0: not known
    max_num_batched_tokens: int = 0
    max_model_len: int = 0
    page_size: int = 0  # tokens
    kv_tokens: int = 0  # that the cache held, in full-attention pages
    decode_graphs: tuple[int, ...] = ()
    prompt_graphs: tuple[int, ...] = ()
    packages: dict[str, str] = field(default_factory=dict)  # name -> version
    machine: dict[str, Any] = field(default_factory=dict)  # its state: driver, clocks, temperatures
    date: str = ""  # UTC

    def __post_init__(self) -> None:
        if self.figures not in CLASSES:
            raise ValueError(f"figures are not of the class {self.figures!r}")
        for sizes in (self.decode_graphs, self.prompt_graphs):
            if [*sizes] != sorted(set(sizes)) or not all(size > 0 for size in sizes):
                raise ValueError("sizes of CUDA graphs must be above 0 and ascend")

    @property
    def graphs(self) -> GraphSizes:
        """Sizes of the CUDA graphs that the measured engine had."""
        decode = tuple(self.decode_graphs)
        return GraphSizes(decode, tuple(self.prompt_graphs), max(decode, default=self.max_num_seqs))


@dataclass(frozen=True, slots=True)
class StepPoint:
    """The time of one step, by the sum of its contexts. Its prompts are alike."""

    kind: Kind
    ms: float  # between the ends of two steps, the host's part included
    rows: int = 0  # with one token each, drafts included
    context: int = 0  # tokens that each row reads, on average
    tokens: int = 0  # of prompts
    pairs: int = 0  # of a query and a key, over all prompts
    sequences: int = 0  # of prompts
    sampled: int = 0
    drafts: int = 0
    size: int = 0  # of the CUDA graph; 0: none
    host_ms: float = 0.0  # of the host alone, until the step was launched
    mad: float = 0.0  # milliseconds: median deviation from the median
    count: int = 0  # samples
    drift: float = 0.0  # relative difference between the first and the last measurement
    watts: float | None = None  # of all GPUs
    held_out: bool = False  # for checks alone

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"no step is of the kind {self.kind!r}")
        has_rows, has_tokens = self.kind != "prompts", self.kind in ("prompts", "mixed")
        if not (0 < self.ms < inf and (self.rows > 0) == has_rows and (self.tokens > 0) == has_tokens):
            raise ValueError("milliseconds, and the rows or tokens of this kind, must be above 0; others must be 0")
        if not (0 < self.drafts < self.rows if self.kind == "verify" else self.drafts == 0):
            raise ValueError("a step that verifies has drafts, fewer than rows; others have none")
        if min(self.context, self.pairs) < 0 or 0 != self.size < self.rows + self.tokens:
            raise ValueError("context and pairs must not be negative; a CUDA graph must hold all rows and tokens")

    @property
    def key(self) -> tuple[Any, ...]:
        """What a table has one point of."""
        return self.kind, self.rows, self.context, self.tokens, self.pairs, self.drafts

    @property
    def features(self) -> StepFeatures:
        """The features of the measured step."""
        context = self.rows * self.context
        return StepFeatures(self.rows, context, self.tokens, self.pairs, self.sequences, self.sampled, self.drafts)


class Surface(Protocol):
    """Step times as a function of a step's features."""

    def cell(self, step: StepFeatures, *, scaled: bool) -> Cell:
        """`scaled`: whether it may go on beyond the points. Raises NotMeasuredError."""
        ...


class StepTable:
    """Step times of one engine. Beyond its points it raises NotMeasuredError, unless it may scale."""

    def __init__(
        self, header: Header, surface: Surface, points: Sequence[StepPoint] = (), *, scaled: bool = False
    ) -> None:
        self.header, self.points = header, tuple(points)
        self.surface, self._scaled = surface, scaled

    def cell(self, step: StepFeatures) -> Cell:
        """Raises NotMeasuredError."""
        return self.surface.cell(step, scaled=self._scaled)

    def step_s(self, step: StepFeatures) -> float:
        """Raises NotMeasuredError."""
        return self.cell(step).step_s(step.decode_context)


def parse_table(lines: Iterable[str], name: str) -> tuple[Header, tuple[StepPoint, ...]]:
    """Raises ValueError that names the line."""
    header: Header | None = None
    points: dict[tuple[Any, ...], StepPoint] = {}
    for number, line in enumerate(lines, 1):
        try:
            values = json.loads(line)
            if header is None:
                header = Header(**_known(Header, values))
                continue
            point = StepPoint(**_known(StepPoint, values))
            if points.setdefault(point.key, point) is not point:
                raise ValueError("once more a step of this size")
        except (ValueError, TypeError, AttributeError) as error:
            what = "not a line of a table of step times, which `oscine profile` writes"
            raise ValueError(f"{name}:{number}: {what}: {error}") from None
    if header is None or not points:
        raise ValueError(f"{name} has no step times")
    return header, tuple(points.values())


def write_table(path: Path, header: Header, points: Iterable[StepPoint]) -> None:
    """Raises OSError. Values that are the defaults are left out."""
    records: list[Header | StepPoint] = [header, *points]
    lines = [json.dumps(_shortened(one)) for one in records]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def _known(record: type, values: Any) -> dict[str, Any]:
    """Raises ValueError if there is no value for a field without a default."""
    if not isinstance(values, dict):
        raise ValueError("no object")
    needed = [one.name for one in fields(record) if one.default is MISSING and one.default_factory is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    return {one.name: values[one.name] for one in fields(record) if one.name in values}


def _shortened(record: Header | StepPoint) -> dict[str, Any]:
    values = asdict(record)
    return {one.name: values[one.name] for one in fields(record) if values[one.name] != one.default}
