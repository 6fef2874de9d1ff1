"""One line of benchmarks/results: what was measured at one point of load, where, and on which commit.

Knows the keys of the files; must not know how anything is measured or drawn.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

RESULTS = Path("benchmarks/results/h200.jsonl")  # what tables and plots are made of


def results_of(gpu: str) -> Path:
    """Where the results of a device are kept: of "NVIDIA H200" in RESULTS, of "cpu" beside it."""
    return RESULTS.with_name(f"{gpu.lower().removeprefix('nvidia ').replace(' ', '-')}.jsonl")


@dataclass(frozen=True, slots=True)
class Point:
    """A load: so many requests at once, each of isl prompt tokens and osl generated ones."""

    concurrency: int
    isl: int
    osl: int

    @classmethod
    def parse(cls, text: str) -> "Point":
        """From "C:ISL:OSL". Raises ValueError."""
        try:
            concurrency, isl, osl = (int(part) for part in text.split(":"))
        except ValueError:
            raise ValueError(f"a point is C:ISL:OSL, like 64:1024:256, not {text!r}") from None
        if min(concurrency, isl) < 1 or osl < 2:
            raise ValueError(f"a point needs requests, prompt tokens and at least 2 generated tokens, unlike {text!r}")
        return cls(concurrency, isl, osl)

    def __str__(self) -> str:
        return f"{self.concurrency}:{self.isl}:{self.osl}"


@dataclass(frozen=True, slots=True)
class Result:
    """The fields are the keys of a line, in this order."""

    model: str
    concurrency: int
    isl: int
    osl: int
    output_tok_s: float
    prefill_tok_s: float
    decode_step_ms: float  # (time of osl tokens - time of 1 token) / (osl - 1)
    tok_s_user: float  # 1 / decode step
    roofline_share: float | None  # of the decode step; None for a chip whose ceiling is not known
    ready_s: float  # from process start to a ready engine
    gpu: str
    torch: str
    triton: str | None
    commit: str
    date: str  # UTC

    @property
    def point(self) -> Point:
        return Point(self.concurrency, self.isl, self.osl)

    @property
    def key(self) -> tuple[str, Point]:
        return self.model, self.point


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def read(path: Path) -> list[Result]:
    """Raises ValueError that names the line, OSError when there is no such file."""
    results = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            results.append(Result(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a result: {error}") from None
    return results


def latest(results: Iterable[Result]) -> dict[tuple[str, Point], Result]:
    """The last one of each model and point, in the order of their first appearance."""
    return {result.key: result for result in results}
