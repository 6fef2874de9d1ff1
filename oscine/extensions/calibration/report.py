"""What a calibration found and changes: as a table, and as JSON."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from oscine.extensions.calibration.measure import Change, Errors
from oscine.extensions.calibration.scales import BIAS

KINDS = ("keys", "values")


@dataclass(frozen=True, slots=True)
class Row:
    """Keys or values of one layer. Errors are relative to the root mean square of all elements."""

    layer: int
    kind: str
    largest: list[float]  # of each KV head, in the prompts of the choice
    exponents: list[int]  # of each KV head: a scale is 2^n
    dynamic_error: float  # a scale per token
    calibrated_error: float
    clamped: float  # share of the elements


def rows_of(largest_L2G: Tensor, exponents_L2G: Tensor, errors: Errors, head_dim: int) -> list[Row]:
    squares_L2, elements = errors.squares.sum(-1), errors.tokens * head_dim * exponents_L2G.shape[-1]
    dynamic_L2, calibrated_L2 = (
        (wrong.sum(-1) / squares_L2).nan_to_num(0.0).sqrt() for wrong in (errors.dynamic, errors.calibrated)
    )
    clamped_L2 = errors.clamped.sum(-1) / elements
    return [
        Row(
            layer,
            name,
            largest_L2G[layer, kind].tolist(),
            (exponents_L2G[layer, kind].int() - BIAS).tolist(),
            float(dynamic_L2[layer, kind]),
            float(calibrated_L2[layer, kind]),
            float(clamped_L2[layer, kind]),
        )
        for layer in range(len(exponents_L2G))
        for kind, name in enumerate(KINDS)
    ]


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    prompts: int  # of the choice
    tokens: int
    checked: int  # prompts whose answers were compared
    rows: list[Row]
    dynamic: Change  # of next tokens
    calibrated: Change
    file: str

    def as_json(self) -> dict[str, Any]:
        changes = {name: _change(getattr(self, name)) for name in ("dynamic", "calibrated")}
        return {
            **{name: getattr(self, name) for name in ("model", "prompts", "tokens", "checked", "file")},
            "layers": [asdict(row) for row in self.rows],
            "next_tokens": changes,
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.model}: {self.prompts:,} prompts, {self.tokens:,} tokens; measured on {self.checked:,} prompts"
        yield ""
        yield "                                           relative error, scales:    beyond"
        yield "layer  kind    largest  scales            per token  calibrated  the scale"
        for row in self.rows:
            low, high = min(row.exponents), max(row.exponents)
            scales = f"2^{low}" if low == high else f"2^{low} to 2^{high}"
            errors = f"{row.dynamic_error:>9.2%}  {row.calibrated_error:>10.2%}  {row.clamped:>9.4%}"
            yield f"{row.layer:>5}  {row.kind:<6}  {max(row.largest):>7.4g}  {scales:<16}  {errors}"
        yield ""
        yield "next tokens, against exact keys and values"
        yield "scales      equal greedy tokens  change of log-probabilities: mean  largest"
        for name, change in (("per token", self.dynamic), ("calibrated", self.calibrated)):
            numbers = _change(change)
            equal, mean, largest = (numbers[key] for key in ("equal_greedy", "mean_change", "largest_change"))
            yield f"{name:<10}  {equal:>19.2%}  {mean:>33.5f}  {largest:>7.4f}"


def _change(change: Change) -> dict[str, float]:
    return {
        "positions": change.positions,
        "equal_greedy": change.equal / change.positions,
        "mean_change": change.total / change.positions,
        "largest_change": change.largest,
    }
