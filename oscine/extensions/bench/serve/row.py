"""Results as rows in the format of InferenceX: one flat JSON object per point, times in seconds."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oscine.extensions.bench.serve.measure import Measures, Summary
from oscine.extensions.bench.serve.run import Measured

Row = dict[str, Any]

_NO_ROW = "not a row of `oscine bench serve`"
_NEEDED = "model", "output_tput_per_gpu"

# Keys that only the user knows, with their values where nothing is said.
LABELS: Row = {
    "hw": "unknown",
    "framework": "unknown",
    "precision": "unknown",
    "spec_decoding": "none",
    "disagg": False,
    "is_multinode": False,
    "ep": 1,
    "dp_attention": False,
}


def row_of(measured: Measured, model: str, load: Mapping[str, Any], num_gpus: int, labels: Mapping[str, Any]) -> Row:
    """`load`: keys that describe the load. `labels` override all others."""
    found, arrival = measured.measures, measured.arrival
    row = {
        **LABELS,
        "model": model,
        "tp": num_gpus,
        **load,
        "conc": arrival.concurrency,
        "rate": arrival.rate,
        "tput_per_gpu": (found.output_tok_s + found.prompt_tok_s) / num_gpus,
        "output_tput_per_gpu": found.output_tok_s / num_gpus,
        "input_tput_per_gpu": found.prompt_tok_s / num_gpus,
        "completed": found.num_completed,
        "failed": found.num_failed,
        "duration": found.duration_s,
        "request_throughput": found.requests_per_s,
        "request_goodput": found.goodput,
        "total_input_tokens": found.prompt_tokens,
        "total_cached_tokens": found.cached_tokens,
        "total_output_tokens": found.output_tokens,
        **_times(found),
        **_energy(measured, num_gpus),
        **labels,
    }
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _times(found: Measures) -> Row:
    row: Row = {}
    times = {
        "first_event": found.first_event,
        "ttft": found.ttft,
        "tpot": found.tpot,
        "itl": found.itl,
        "e2el": found.e2el,
    }
    for name, summary in times.items():
        row |= {f"{statistic}_{name}": value for statistic, value in asdict(summary).items()}
    row |= {f"{statistic}_intvty": 1 / value for statistic, value in _positive(found.tpot)}
    return row


def _positive(summary: Summary) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in asdict(summary).items() if name != "std" and value > 0)


def _energy(measured: Measured, num_gpus: int) -> Row:
    energy_j, found = measured.energy_j, measured.measures
    if not energy_j or not found.output_tokens:
        return {"power_valid": False}
    return {
        "power_valid": True,
        "total_gpu_energy_j": energy_j,
        "avg_power_w": energy_j / found.duration_s / num_gpus,
        "joules_per_output_token": energy_j / found.output_tokens,
        "joules_per_total_token": energy_j / (found.output_tokens + found.prompt_tokens),
        "joules_per_successful_query": energy_j / found.num_completed,
    }


def append(path: Path, row: Row) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """Raises ValueError that names the line, and OSError."""
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            rows.append(_row(json.loads(line.decode())))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {_NO_ROW}: {error}") from None
    return rows


def _row(values: Any) -> Row:
    """Raises ValueError. Rows of other programs may have other keys, but a plot needs these figures."""
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    if missing := [name for name in _NEEDED if name not in values]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for name in ("output_tput_per_gpu", "median_intvty", "conc", "rate"):
        value = values.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"{name} must be a number, at least 0, not {value!r}")
    return values
