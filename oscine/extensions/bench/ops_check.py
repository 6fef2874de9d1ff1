"""Compares the ops of a device's platform with the references, at the shapes of a model's step.

    python -m oscine.extensions.bench.ops_check 20b

Three steps run op by op on the same random weights, keys and values: the platform's ops, the references in bfloat16,
and the references in float32, which are the truth. With FP8 activations all three steps round the activations to FP8.
The error of an op is the median over rows; it may be twice that of the references in bfloat16. Different rounding
sends a few tokens to other experts. Their rows are counted, and later ops are not compared on them. The exit status
is 3 if an op is wrong. With `--only OP` all other ops are references, so that a kernel which crashes or hangs can be
found.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from oscine.checkpoint.hub import PUBLISHED
from oscine.cli.error import WRONG
from oscine.extensions.bench.step_inputs import OpCall, StepLoad, random_weights, step_calls, step_pages
from oscine.model.config import ModelConfig
from oscine.ops.interface import Ops
from oscine.ops.platforms.apart import tried_apart
from oscine.ops.platforms.table import TABLE, choose, platform_of, resolve
from oscine.ops.target import ActivationDtype, Target

LOADS = (StepLoad(1, 1, 1024), StepLoad(8, 1, 1024), StepLoad(64, 1, 512), StepLoad(2, 640, 1024))
MOST = 2.0  # times the error of plain bfloat16
LEAST_ERROR = 1e-3  # what is below is right, whatever the error of bfloat16
FEWEST_ROWS = 32  # of which a few may choose another token, or other experts
SEEDS = 8  # of tokens that are tried, until one at least goes to the experts of the truth in all three steps


@dataclass(frozen=True, slots=True)
class Checked:
    op: str
    load: StepLoad
    error: float  # relative, median over rows
    of_bfloat16: float
    most: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.most  # not if it is NaN

    def __str__(self) -> str:
        what = f"{self.load.sequences} x {self.load.query_len}"
        verdict = "ok" if self.is_right else "WRONG"
        return f"{self.op:<18} {what:>9} {self.error:>10.2e} {self.of_bfloat16:>12.2e} {verdict:>6}"


HEADER = f"{'op':<18} {'tokens':>9} {'error':>10} {'of bfloat16':>12}"


@torch.inference_mode()
def check(
    config: ModelConfig,
    device: torch.device,
    ops: Ops,
    *,
    loads: tuple[StepLoad, ...] = LOADS,
    activations: ActivationDtype = "auto",
) -> Iterator[Checked]:
    """Two layers, one of each window. activations: of experts, in the references; `ops` are resolved with the same."""
    config = config.of_layers((0, 1))
    plain = resolve(replace(Target.of(device), activation_dtype=activations), choose("cpu"))
    sets = ((ops, torch.bfloat16), (plain, torch.bfloat16), (plain, torch.float32))
    weights = [random_weights(config, of, device, dtype) for of, dtype in sets]
    for load in loads:
        pages = step_pages(config, load, device, torch.bfloat16)
        for seed in range(SEEDS):
            steps = [
                step_calls(config, own, of, load, [page.to(dtype, copy=True) for page in pages], seed=seed)
                for own, (of, dtype) in zip(weights, sets, strict=True)
            ]
            if all(_same_experts(step[-1], steps[-1][-1], load.sequences).any() for step in steps):
                break
        yield from _compared(load, *steps)


def _compared(load: StepLoad, kernels: list[OpCall], roughs: list[OpCall], exacts: list[OpCall]) -> Iterator[Checked]:
    for kernel, rough, exact in zip(kernels, roughs, exacts, strict=True):
        if kernel.name == "sample":
            continue  # of logits that differ; `choose` has the same result
        found, yardstick, truth = (_rows(kernel.name, op.call(0)) for op in (kernel, rough, exact))
        same, same_rough = (_same_experts(op, exact, len(truth)).to(truth.device) for op in (kernel, rough))
        if kernel.name == "moe" and len(truth) >= FEWEST_ROWS:
            yield _choice("experts", load, ~same, ~same_rough)
        if kernel.name == "choose":
            if len(truth) >= FEWEST_ROWS:
                yield _choice("choose", load, (found != truth)[same], (yardstick != truth)[same_rough])
            continue
        error, of_bfloat16 = _error(found[same], truth[same]), _error(yardstick[same_rough], truth[same_rough])
        yield Checked(kernel.name, load, error, of_bfloat16, max(MOST * of_bfloat16, LEAST_ERROR))


def _choice(op: str, load: StepLoad, others: Tensor, of_bfloat16: Tensor) -> Checked:
    """Of the share of rows that choose something else than the truth does."""
    share, rough = float(others.float().mean()), float(of_bfloat16.float().mean())
    return Checked(op, load, share, rough, most=2 * rough + 0.05)


def _same_experts(call: OpCall, truth: OpCall, rows: int) -> Tensor:
    """[rows]; in all routings that the result depends on."""
    same = torch.ones(rows, dtype=torch.bool)
    for own_TK, of_TK in zip(call.routings, truth.routings, strict=True):
        same &= (own_TK.long().sort(-1).values == of_TK.long().sort(-1).values).all(-1).cpu()
    return same


def _rows(op: str, result: Any) -> Tensor:
    """[rows, columns] of an op's main result. Queries may be left unrotated: attention shows whether they are right."""
    rows: Tensor = result[1 if op == "norm_qkv" else 0] if isinstance(result, tuple) else result
    if not rows.is_floating_point():
        return rows
    if rows.dim() == 3:
        # partial sums of experts; heads stay beside each other
        rows = rows.float().sum(1) if rows.shape[-1] > _HEAD else rows.flatten(1)
    return rows.float()


_HEAD = 64  # columns of a head


def _error(found: Tensor, truth: Tensor) -> float:
    rows = (found.double() - truth.double()).norm(dim=-1) / truth.double().norm(dim=-1).clamp(min=1e-9)
    return float(rows.median()) if len(rows) and rows.isfinite().all() else float("nan")


def choice_of(platform: str, only: str | None) -> dict[str, str]:
    """op -> backend: those of the platform, or of one op, beside references. Raises ValueError for an unknown op."""
    backends = choose(platform)
    if only is None:
        return backends
    if only not in backends:
        raise ValueError(f"there is no op {only!r}: {', '.join(backends)}")
    return choose("cpu", {only: backends[only]})


def check_model(name: str, activations: ActivationDtype, only: str | None, say: Callable[[str], None]) -> bool:
    """Of the GPU. Whether all ops are right; only: the op that is not the reference, None: none is."""
    device = torch.device("cuda", 0)
    target = replace(Target.of(device), activation_dtype=activations)
    platform = platform_of(target)
    if activations != "auto" and (lacking := platform.lacking_for_fp8_experts(PUBLISHED[name]().hidden_size)):
        say(f"{name}, FP8 activations: not here, they need {lacking}")
        return True
    choice = choice_of(platform.name, only)
    if only in (None, "moe") and (wrong := tried_apart(platform, target)):
        say(f"platform {platform.name}: {wrong}")
        return False
    say(f"{name}, platform {platform.name}, activations of experts {activations}")
    say(HEADER)
    right = True
    for checked in check(PUBLISHED[name](), device, resolve(target, choice), activations=activations):
        say(str(checked))
        right &= checked.is_right
    return right


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=PUBLISHED)
    parser.add_argument("--activation-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--only", choices=TABLE, metavar="OP", help="check this op alone (default: all)")
    args = parser.parse_args()
    right = check_model(args.model, args.activation_dtype, args.only, lambda line: print(line, flush=True))
    raise SystemExit(0 if right else WRONG)


if __name__ == "__main__":
    main()
