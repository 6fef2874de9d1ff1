"""Scales of keys and values in FP8: of each token, or calibrated beforehand. `python -m benchmarks.precision.kv_scales`

1. Random rows of 64 values, those of the calibration and others: relative error of a row as it is stored.
2. The embedded model, a trained gpt-oss: the same of its keys and values, and the relative error of its logits, where
   all but the cache is float32 and the experts are those of the exact run. Scales are calibrated on sums.

A calibrated scale is float32 as in other servers, one per layer, kind (key or value) and KV head: the largest magnitude
seen over 448. (`oscine calibrate` reports the errors of its own scales, which are powers of two.) All elements are
e4m3, and those too large for their scale saturate. Errors are root mean squares over rows.

Shape suffixes as in oscine/ops/interface.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil

import torch
from torch import Tensor

from benchmarks.precision.formats import E4M3_LARGEST, Rounding, e4m3, with_scales
from benchmarks.precision.runs import Choices, batch, with_routing
from oscine.checkpoint.opened import open_model
from oscine.executor.kv.allocate import allocate_group
from oscine.extensions.bench.step_inputs import PAGE
from oscine.extensions.calibration.measure import Calibrated
from oscine.model.gpt_oss import GptOss
from oscine.ops.interface import QkvProjection
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target
from oscine.settings.config import ModelOptions
from training.evaluate import NANO, SEED, SKILLS
from training.packing import Encoder
from training.split import Draw

CPU = torch.device("cpu")
ROWS, HEAD_DIM = 20_000, 64
CALIBRATION = "addition, up to 3 digits"
MEASURED = (CALIBRATION, "tool call", "JSON valid for the schema", "recall at 2,000 tokens")
PROMPTS = 8  # of each skill
Change = Callable[[int, Tensor], Tensor]  # (layer, stored keys and values [T, 2, G, D]) -> what is stored instead


def calibrated(largest: Tensor) -> Rounding:
    """`largest`: of the calibration; its shape must fit that of the values."""
    scale = largest / E4M3_LARGEST
    return lambda values: e4m3(values / scale) * scale


def row_errors(stored: Tensor, exact: Tensor) -> Tensor:
    return (stored - exact).norm(dim=-1) / exact.norm(dim=-1)


def rms(errors: Tensor) -> float:
    return float(errors.square().mean().sqrt())


DYNAMIC: dict[str, Rounding] = {
    "power of two per token": with_scales(e4m3),
    "float32 per token": with_scales(e4m3, power_of_two=False),
}


def report_random_rows() -> None:
    normal = torch.randn(ROWS, HEAD_DIM)
    outlier = normal * torch.ones(HEAD_DIM).index_fill(0, torch.tensor([5]), 20)
    sizes = normal * torch.randn(ROWS, 1).mul(1.5).exp()
    cases = {  # the rows of the calibration, and those that are stored
        "normal": (normal, normal),
        "one channel x 20": (outlier, outlier),
        "sizes of rows log-normal, sigma 1.5": (sizes, sizes),
        "twice as large as in the calibration": (normal, 2 * normal),
        "eight times as large": (normal, 8 * normal),
        "a hundredth": (normal, normal / 100),
        "a ten-thousandth": (normal, normal / 10_000),
    }
    print(f"| rows | {' | '.join(DYNAMIC)} | calibrated | scale 1 |\n|---|---|---|---|---|")
    for name, (known, stored) in cases.items():
        roundings = (*DYNAMIC.values(), calibrated(known.abs().amax()), e4m3)
        errors = (rms(row_errors(rounding(stored), stored)) for rounding in roundings)
        print(f"| {name} | {' | '.join(f'{error:.2%}' for error in errors)} |")


class Nano:
    """The embedded model in float32, with a say in the keys and values that are stored."""

    def __init__(self) -> None:
        ops = resolve(Target(CPU), choose("cpu"))
        self._opened = opened = open_model(ModelOptions(str(NANO), device="cpu"))
        self.model = GptOss(opened.config, opened.load(ops=ops), ops)
        self._encoder = Encoder(NANO)

    def prompts(self, skill: str, first: int) -> list[Tensor]:
        """Of held-out conversations; others for each `first`."""
        make = next(one.make for one in SKILLS if one.name == skill)
        draws = (Draw(SEED + first + i, held_out=True) for i in range(PROMPTS))
        return [torch.tensor([self._encoder.prompt(make(draw))]) for draw in draws]

    def largest_seen(self, prompts: Sequence[Tensor]) -> Tensor:
        """Magnitudes of keys and values, [L, 2, G, 1]."""
        seen = Calibrated(self._opened, progress=False).look([prompt[0].tolist() for prompt in prompts])
        return seen.largest_L2G[..., None]

    @torch.inference_mode()
    def logits(self, prompt: Tensor, change: Change, imposed: Choices | None = None) -> tuple[Tensor, Choices]:
        """Also the router's choices. `imposed`: the experts to use instead."""
        choices: Choices = []
        config, ops = self.model.config, with_routing(self.model.ops, choices, imposed)
        layers = iter(range(config.num_hidden_layers))

        def norm_qkv(*inputs: object) -> tuple[Tensor, Tensor]:
            queries_and_sum = ops.norm_qkv(*inputs)  # type: ignore[arg-type]
            layer, projection = next(layers), inputs[4]
            assert isinstance(projection, QkvProjection)
            place = projection.slots_T // PAGE, slice(None), slice(None), projection.slots_T % PAGE
            projection.kv_pages[place] = change(layer, projection.kv_pages[place])
            return queries_and_sum

        model = GptOss(config, self.model.weights, replace(ops, norm_qkv=norm_qkv))
        groups = config.kv_groups(PAGE, "float32")
        kv = tuple(allocate_group(group, ceil(prompt.shape[1] / PAGE), CPU) for group in groups)
        return model.head(model.hidden(batch(prompt, len(groups), 0, prompt.shape[1]), kv)), choices


def measure(
    nano: Nano, prompts: Sequence[Tensor], rounding_of: Callable[[int], Rounding]
) -> tuple[float, float, float]:
    """Errors of keys, of values, of logits."""
    rows: list[Tensor] = []
    wrong = size = 0.0

    def store(layer: int, kv_T2GD: Tensor) -> Tensor:
        stored = rounding_of(layer)(kv_T2GD)
        rows.append(row_errors(stored, kv_T2GD))
        return stored

    for prompt in prompts:
        exact, choices = nano.logits(prompt, lambda _, kv: kv)
        wrong += float((nano.logits(prompt, store, choices)[0] - exact).square().sum())
        size += float(exact.square().sum())
    keys, values = torch.cat(rows).unbind(1)
    return rms(keys), rms(values), (wrong / size) ** 0.5


def report_nano() -> None:
    nano = Nano()
    largest = nano.largest_seen(nano.prompts(CALIBRATION, PROMPTS))
    methods: dict[str, Callable[[int], Rounding]] = {
        **{name: lambda _, rounding=rounding: rounding for name, rounding in DYNAMIC.items()},  # type: ignore[misc]
        "calibrated": lambda layer: calibrated(largest[layer]),
        "scale 1": lambda _: e4m3,
    }
    print(f"| errors of keys, values, logits | {' | '.join(methods)} |\n|---|---|---|---|---|")
    for skill in MEASURED:
        prompts = nano.prompts(skill, 0)
        errors = (measure(nano, prompts, rounding_of) for rounding_of in methods.values())
        cells = (", ".join(f"{error:.2%}" for error in of_method) for of_method in errors)
        print(f"| {skill} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    torch.manual_seed(0)
    report_random_rows()
    print()
    report_nano()


if __name__ == "__main__":
    main()
