"""Tile shapes of the Hopper experts, timed: `python -m benchmarks.kernels.experts [--ranks 2] [--tokens 1 8 ...]`.

For each number of tokens: first the plan that the op would choose, then others that fit the GPU. A result that differs
from that of the chosen plan is marked; tests check the chosen one. The best plans belong in hopper.plan.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from benchmarks.kernels.routings import draw_for
from oscine.bench.timer import time_call
from oscine.ops.compile_together import Compilers
from oscine.ops.interface import Routing
from oscine.ops.moe import hopper
from oscine.ops.moe.hopper import Tiling
from oscine.ops.target import Target

HIDDEN = 2880
PER_TOKEN = 4
CALLS = 16
DEVICE = torch.device("cuda")


def tilings() -> Iterator[Tiling]:
    """Shapes that compile without spills and fit shared memory."""
    for splits in (1, 2, 3):
        yield Tiling(8, planes=True, halves=True, dynamic=True, splits=splits)
        for stages, programs in ((4, 4), (8, 3)):
            yield Tiling(
                8, planes=True, halves=True, dynamic=True, splits=splits, consumers=1, stages=stages, programs=programs
            )
    for tokens, stages in ((16, 4), (32, 3)):
        yield Tiling(tokens, stages=stages, halves=True)
    for tokens, units, stages in ((64, 3, 4), (64, 1, 14), (128, 1, 8), (128, 2, 4)):
        yield hopper.large(tokens, units=units, stages=stages)


def candidates(tokens: int, experts: int, intermediate: int) -> list[Tiling]:
    """The chosen tiling, and those near the mean number of tokens per expert."""
    mean = tokens * PER_TOKEN / experts
    near = [t for t in tilings() if mean / 2 <= t.tokens <= 8 * max(mean, 1) and (t.splits == 1 or tokens <= 16)]
    if tokens == 1:  # every tile has this one token
        near = [replace(t, tokens=4, halves=False, dynamic=False) for t in near if t.planes]
    chosen = hopper.plan(tokens, PER_TOKEN, experts, intermediate)
    return [chosen, *(tiling for tiling in near if tiling != chosen)]


@dataclass(frozen=True, slots=True)
class Case:
    x_TH: Tensor
    routings: list[Routing]
    tried: list[Tiling]

    @classmethod
    def of(cls, tokens: int, experts: int, intermediate: int) -> "Case":
        x_TH = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        return cls(x_TH, draw_for(x_TH, CALLS, experts, PER_TOKEN), candidates(tokens, experts, intermediate))

    def run(self, prepared: hopper.HopperExperts, tiling: Tiling, i: int = 0) -> Tensor:
        return hopper.run(Target.of(DEVICE), self.x_TH, self.routings[i], prepared, 7.0, tiling)


def report(case: Case, prepared: hopper.HopperExperts) -> None:
    tokens = len(case.x_TH)
    busy = sum(len(routing.expert_ids_TK.unique()) for routing in case.routings) / CALLS
    weights = 3 * HIDDEN * prepared.intermediate
    gigabytes = busy * weights * (0.5 + 1 / 32) / 1e9
    expected = case.run(prepared, case.tried[0]).float().sum(1)
    for tiling in case.tried:
        error = float((case.run(prepared, tiling).float().sum(1) - expected).norm() / expected.norm())
        calls = min(CALLS, max(2, 4096 // tokens))
        time = time_call(lambda i, tiling=tiling: case.run(prepared, tiling, i), DEVICE, calls)
        teraflops = tokens * PER_TOKEN * 2 * weights / time.seconds / 1e12
        print(
            f"{tokens:6} {_name(tiling):>34} {time.seconds * 1e6:9.1f} us {gigabytes / time.seconds / 1e3:6.2f} TB/s "
            f"{teraflops:6.0f} TFLOP/s{'  chosen' if tiling is case.tried[0] else ''}"
            f"{'' if error < 0.01 else f'  WRONG by {error:.1%}'}",
            flush=True,
        )


def _name(tiling: Tiling) -> str:
    shape = f"n{tiling.tokens} c{tiling.consumers} u{tiling.units} s{tiling.stages} x{tiling.programs}"
    shape += " planes" if tiling.planes else ""
    return shape + (" halves" if tiling.halves else "") + (f", splits {tiling.splits}" if tiling.splits > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128, help="experts of the layer (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="that divide the experts' columns (default: %(default)s)")
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1, 8, 64, 512, 1024, 8192],
        help="numbers of tokens to measure (default: %(default)s)",
    )
    options = parser.parse_args()
    with closing(Compilers()) as compilers:
        columns = HIDDEN // options.ranks // 32 * 32
        published = random_experts(options.experts, HIDDEN, columns, DEVICE, torch.bfloat16, scales=(118, 122))
        prepared = hopper.prepare_experts(published)
        del published
        cases = [Case.of(tokens, options.experts, columns) for tokens in options.tokens]
        with compilers.compile_together():  # all at once: an already compiled kernel would run on undefined inputs
            for case in cases:
                for tiling in case.tried:
                    case.run(prepared, tiling)
        for case in cases:
            report(case, prepared)


if __name__ == "__main__":
    main()
