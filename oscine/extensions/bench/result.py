"""One line of benchmarks/results: the measurement of one point of load, with its machine and commit."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from oscine.settings.validators import load_of

RESULTS = Path("benchmarks/results/h200.jsonl")  # the source of tables and plots


def results_of(gpu: str) -> Path:
    """The results file of a device: RESULTS for "NVIDIA H200", a file beside it for "cpu"."""
    return RESULTS.with_name(f"{gpu.lower().removeprefix('nvidia ').replace(' ', '-')}.jsonl")


@dataclass(frozen=True, slots=True)
class Point:
    """A load: `concurrency` requests at once, each with isl prompt tokens and osl generated tokens."""

    concurrency: int
    isl: int
    osl: int

    @classmethod
    def parse(cls, text: str) -> "Point":
        """From "C:ISL:OSL". Raises ValueError."""
        if (load := load_of(text)) is None:
            raise ValueError(f"a point is C:ISL:OSL, like 64:1024:256, not {text!r}")
        point = cls(*load)
        if point.osl < 2:
            raise ValueError(f"a point needs at least 2 generated tokens, unlike {text!r}")
        return point

    def __str__(self) -> str:
        return f"{self.concurrency}:{self.isl}:{self.osl}"


class Layout(NamedTuple):
    """Over how many GPUs an engine divides what: the layers, the requests, the experts."""

    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1


_LIMITS = ("max_num_seqs", "max_num_batched_tokens")
_FIGURES = ("concurrency", "isl", "osl", "output_tok_s", "prefill_tok_s", "decode_step_ms", "tok_s_user")
_OPTIONAL = (*_LIMITS, "joules_per_output_token", "watts", "first_token_ms")
# What must be equal for two results to be comparable: model, ..., types of keys and of activations.
Key = tuple[str, Point, Layout, tuple[str, str]]


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
    roofline_share: float | None  # of the decode step; None for a chip without a known ceiling
    ready_s: float  # from process start to a ready engine
    gpu: str
    torch: str
    triton: str | None
    commit: str
    date: str  # UTC
    num_gpus: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_parallel_size: int = 1
    kv_cache_dtype: str = "auto"  # as the option has it; auto is exact, here and in the next
    activation_dtype: str = "auto"
    max_num_seqs: int | None = None  # of each engine, as the next; older lines lack both
    max_num_batched_tokens: int | None = None
    # Of all GPUs in the pass of osl tokens, prompts included. A line without them is of a machine that does not count.
    joules_per_output_token: float | None = None
    watts: float | None = None
    first_token_ms: float | None = None  # from a request to its first token; None with several requests at once

    @property
    def point(self) -> Point:
        return Point(self.concurrency, self.isl, self.osl)

    @property
    def layout(self) -> Layout:
        return Layout(self.tensor_parallel_size, self.data_parallel_size, self.expert_parallel_size)

    @property
    def key(self) -> Key:
        return self.model, self.point, self.layout, (self.kv_cache_dtype, self.activation_dtype)


def append(path: Path, result: Result) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_line(result)) + "\n")


def _line(result: Result) -> dict[str, Any]:
    return {key: value for key, value in asdict(result).items() if value is not None or key not in _OPTIONAL}


def read(path: Path) -> list[Result]:
    """Raises ValueError that names the line, and OSError if there is no such file."""
    results = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            results.append(_result(json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a result: {error}") from None
    return results


def _result(values: Any) -> Result:
    """Raises ValueError."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    needed = [field.name for field in fields(Result) if field.default is MISSING]
    if missing := [name for name in needed if name not in values]:
        raise ValueError(f"it lacks {', '.join(missing)}")
    if unknown := values.keys() - {field.name for field in fields(Result)}:
        raise ValueError(f"it has unknown keys: {', '.join(sorted(unknown))}")
    result = Result(**values)
    if not isinstance(result.model, str):
        raise ValueError(f"model must be a text, not {result.model!r}")
    for name in _FIGURES:
        value = values[name]
        if type(value) not in (int, float) or not 0 < value < inf:
            raise ValueError(f"{name} must be a positive number, not {value!r}")
    return result


def parse_results(parser: ArgumentParser, argv: Sequence[str] | None) -> tuple[Namespace, list[Result]]:
    """The arguments, and the results in the files that they name. Ends the process if one cannot be read."""
    parser.add_argument(
        "results", nargs="*", type=Path, default=[RESULTS], help=f"files of results (default: {RESULTS})"
    )
    args = parser.parse_args(argv)
    try:
        return args, [result for path in args.results for result in read(path)]
    except (ValueError, OSError) as error:
        parser.error(str(error))


def latest(results: Iterable[Result]) -> dict[Key, Result]:
    """The last one of each model, point and layout, in the order of their first appearance."""
    return {result.key: result for result in results}


def of_one_gpu(results: Iterable[Result]) -> list[Result]:
    """With exact keys, values and activations."""
    exact = "auto", "auto"
    return [one for one in results if one.num_gpus == 1 and (one.kv_cache_dtype, one.activation_dtype) == exact]
