"""Step times of other hardware, ready to use: shipped tables of ops, and what was fitted for them.

What was fitted is in data/fitted.json, by hardware and framework (`oscine plan --validate --fit` writes it). Hardware
without published measurements has the figures of the most similar one.
"""

import json
from collections.abc import Sequence
from functools import cache
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from oscine.extensions.plan.foreign.compose import GpuLayout, Rest, composed_table
from oscine.extensions.plan.foreign.ops import DATA, OpTable, shipped_ops
from oscine.timing.answer import NotMeasuredError
from oscine.timing.table import StepTable

FILE, ERRORS = DATA / "fitted.json", DATA / "errors.json"
# An assumption: servers with vLLM compute experts on these with 8-bit activations, by FlashInfer's kernels, as
# TensorRT-LLM does. vLLM's own table has 16-bit ones. On B200 both fit the training half alike (TPOT 3.4 and 3.8 %),
# but with its own table all ops would have to be 0.63 times as long.
_SHARED_KERNELS = ("b200_sxm", "gb200", "gb300")
_SIMILAR = {"gb200": "b200_sxm", "gb300": "b200_sxm", "rtx_pro_6000_server": "b200_sxm", "h100_sxm": "h200_sxm"}
_SHARED = "b200_sxm", "trtllm"  # the only one with measurements of engines that share experts; others have its figure
_OTHERS = {"sglang": "vllm"}  # frameworks without published measurements


class Delays(NamedTuple):
    """Between the engine's first token and the client's.

    That it grows with steps and prompt is seen alike in all frameworks; the published figures do not tell why.
    """

    seconds: float
    doubling_s: float  # per doubling of the GPUs
    steps: float
    steps_per_token: float  # of the prompt
    steps_per_engine: float  # per doubling of the engines that share experts


class Fitted(NamedTuple):
    """Of a hardware and framework."""

    rest: Rest
    delays: Delays

    def delay_s(self, layout: GpuLayout, prompt: int, tpot_s: float) -> float:
        columns = delay_columns(layout, prompt, tpot_s)
        return sum(a * b for a, b in zip(self.delays, columns, strict=True))


def delay_columns(layout: GpuLayout, prompt: int, tpot_s: float) -> list[float]:
    """What each of Delays is multiplied by. `prompt`: tokens."""
    return [1.0, log2(layout.gpus), tpot_s, tpot_s * prompt, tpot_s * log2(layout.engines)]


def tables_of(system: str, framework: str, shipped: Sequence[OpTable] | None = None) -> list[OpTable]:
    """The table of this hardware and framework, then others of this hardware. Raises NotMeasuredError."""
    found = {one.header.framework: one for one in shipped or shipped_ops() if one.header.system == system}
    if framework == "vllm" and system in _SHARED_KERNELS and "trtllm" in found:
        framework = "trtllm"
    if framework not in found:
        known = sorted({f"{one.header.system} with {one.header.framework}" for one in shipped or shipped_ops()})
        raise NotMeasuredError(f"no times of ops of {system} with {framework}: there are {', '.join(known)}")
    order = [framework, *(one for one in ("sglang", "vllm", "trtllm") if one in found and one != framework)]
    return [found[one] for one in order]


def fitted_of(system: str, framework: str) -> tuple[Fitted, str]:
    """And where it comes from: hardware and framework."""
    known = read_fitted(FILE)
    for name in (framework, _OTHERS.get(framework, framework)):
        for place in (system, _SIMILAR.get(system, system)):
            if (place, name) in known:
                found = known[place, name]
                rest = found.rest._replace(exchange_s=known[_SHARED].rest.exchange_s)
                return found._replace(rest=rest), f"{place} with {name}"
    raise NotMeasuredError(f"nothing was fitted for {system} with {framework}")


def exchange_from(system: str, framework: str, layout: GpuLayout) -> str | None:
    """The hardware and framework whose exchange between engines that share experts this layout has; None: it has its
    own, or no such engines."""
    if layout.engines == 1 or (system, framework) == _SHARED:
        return None
    return " with ".join(_SHARED)


class KnownError(NamedTuple):
    """Of predictions for published measurements that were not fitted; mean absolute errors in percent."""

    points: int
    tpot: float
    ttft: float


def error_of(system: str, framework: str) -> KnownError | None:
    """None where there are no measurements."""
    rows: list[dict[str, Any]] = json.loads(ERRORS.read_text("utf-8"))
    for row in rows:
        if (row["hardware"], row["framework"]) == (system, framework):
            return KnownError(row["points"], row["tpot"], row["ttft"])
    return None


def write_errors(path: Path, found: dict[tuple[str, str], KnownError]) -> None:
    rows = [{"hardware": system, "framework": framework, **one._asdict()} for (system, framework), one in found.items()]
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def step_table(
    system: str, framework: str, model: str, layout: GpuLayout, *, kv: str = "bfloat16", scaled: bool = False
) -> StepTable:
    """Of shipped tables. Raises NotMeasuredError."""
    fitted, _ = fitted_of(system, framework)
    exchange = exchange_from(system, framework, layout)
    tables = tables_of(system, framework)
    return composed_table(tables, model, layout, fitted.rest, exchange=exchange, kv=kv, scaled=scaled)


@cache
def read_fitted(path: Path) -> dict[tuple[str, str], Fitted]:
    rows: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))
    return {(row["hardware"], row["framework"]): Fitted(Rest(**row["rest"]), Delays(**row["delays"])) for row in rows}


def write_fitted(path: Path, found: dict[tuple[str, str], Fitted]) -> None:
    rows = [
        {"hardware": system, "framework": framework, "rest": _rounded(one.rest), "delays": _rounded(one.delays)}
        for (system, framework), one in sorted(found.items())
    ]
    path.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def _rounded(values: Rest | Delays) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in values._asdict().items()}
