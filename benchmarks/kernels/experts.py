"""Tile shapes of the Hopper experts, timed: `python -m benchmarks.kernels.experts [--ranks 2] [--tokens 1 8 ...]`.

For each number of tokens: first the plan that the op would choose, then others that fit the GPU. The error is that of
the whole op, against the reference in float32 with activations of the same type. The best plans belong in hopper.plan.
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from benchmarks.kernels.routings import add_routing, draw_for
from oscine.extensions.bench.timer import time_call
from oscine.ops.compile_together import Compilers
from oscine.ops.interface import Routing
from oscine.ops.moe import hopper, reference
from oscine.ops.moe.hopper import Tiling
from oscine.ops.target import Target

HIDDEN = 2880
PER_TOKEN = 4
CALLS = 16
MAX_ERROR = 0.006  # sums in bfloat16, which the caller adds up
MAX_FP8_ERROR = 0.02  # sums before SwiGLU of a few bits less, which now and then round to another h
DEVICE = torch.device("cuda")


def exact_tilings() -> Iterator[Tiling]:
    """Shapes that compile without spills and fit shared memory."""
    for splits in (1, 2, 3):
        yield Tiling(8, planes=2, halves=True, dynamic=True, splits=splits)
        for stages, programs in ((4, 4), (8, 3)):
            yield Tiling(
                8, planes=2, halves=True, dynamic=True, splits=splits, consumers=1, stages=stages, programs=programs
            )
    for (tokens, stages), dynamic in itertools.product(((16, 4), (32, 3)), (False, True)):
        yield Tiling(tokens, stages=stages, halves=True, dynamic=dynamic)
    for tokens, units, stages in ((64, 3, 4), (64, 1, 14), (128, 1, 8), (128, 2, 4)):
        for dynamic in (False, True):
            yield replace(hopper.large(tokens, units, stages), dynamic=dynamic)


def fp8_tilings() -> Iterator[Tiling]:
    """The same for FP8 activations."""
    single = {"consumers": 1, "programs": 4}  # a warpgroup of its own per program
    for splits in (1, 2, 3):
        yield Tiling(8, planes=1, dynamic=True, splits=splits)
        yield Tiling(8, planes=1, dynamic=True, splits=splits, stages=5)
        yield Tiling(8, planes=1, dynamic=True, splits=splits, **single)
        yield Tiling(8, planes=1, dynamic=True, splits=splits, stages=8, consumers=1, programs=3)
    for tokens, dynamic in itertools.product((16, 32), (False, True)):
        yield Tiling(tokens, planes=1, halves=True, dynamic=dynamic)
        yield Tiling(tokens, planes=1, halves=True, dynamic=dynamic, **single)
    for (tokens, units, stages), dynamic in itertools.product(((64, 3, 5), (128, 3, 4), (128, 2, 6)), (False, True)):
        yield replace(hopper.large(tokens, units, stages, planes=1), dynamic=dynamic)


def candidates(tokens: int, experts: int, intermediate: int, fp8: bool) -> list[Tiling]:
    """The chosen tiling, and those near the mean number of tokens per expert."""
    mean, tilings = tokens * PER_TOKEN / experts, fp8_tilings() if fp8 else exact_tilings()
    near = [
        t for t in tilings if min(mean / 2, 128) <= t.tokens <= 8 * max(mean, 1) and (t.splits == 1 or tokens <= 16)
    ]
    if tokens == 1:  # every tile has this one token
        near = [replace(t, tokens=8 // t.planes, halves=False, dynamic=False) for t in near if t.planes]
    chosen = (hopper.plan_fp8 if fp8 else hopper.plan)(tokens, PER_TOKEN, experts, intermediate)
    return [chosen, *(tiling for tiling in near if tiling != chosen)]


@dataclass(frozen=True, slots=True)
class Case:
    x_TH: Tensor
    routings: list[Routing]
    tried: list[Tiling]
    target: Target

    @classmethod
    def of(cls, target: Target, tokens: int, experts: int, intermediate: int, routing: str) -> "Case":
        x_TH = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
        tried = candidates(tokens, experts, intermediate, target.activation_dtype == "fp8")
        return cls(x_TH, draw_for(target, x_TH, CALLS, experts, PER_TOKEN, routing), tried, target)

    def run(self, prepared: hopper.HopperExperts, tiling: Tiling, i: int = 0) -> Tensor:
        return hopper.run(self.target, self.x_TH, self.routings[i], prepared, 7.0, tiling)


def report(case: Case, prepared: hopper.HopperExperts, expected: Tensor) -> None:
    tokens = len(case.x_TH)
    busy = sum(len(routing.expert_ids_TK.unique()) for routing in case.routings) / CALLS
    weights = 3 * HIDDEN * prepared.intermediate
    gigabytes = busy * weights * (0.5 + 1 / 32) / 1e9
    for tiling in case.tried:
        error = float((case.run(prepared, tiling).float().sum(1) - expected).norm() / expected.norm())
        calls = min(CALLS, max(2, 4096 // tokens))
        time = time_call(lambda i, tiling=tiling: case.run(prepared, tiling, i), DEVICE, calls)
        teraflops = tokens * PER_TOKEN * 2 * weights / time.seconds / 1e12
        print(
            f"{tokens:6} {name_of(tiling):>42} {time.seconds * 1e6:9.1f} us {gigabytes / time.seconds / 1e3:6.2f} TB/s "
            f"{teraflops:6.0f} TFLOP/s{'  chosen' if tiling is case.tried[0] else ''}"
            f"  error {error:.2%}{'' if error < (MAX_FP8_ERROR if prepared.fp8 else MAX_ERROR) else '  WRONG'}",
            flush=True,
        )


def name_of(tiling: Tiling) -> str:
    shape = f"n{tiling.tokens} c{tiling.consumers} u{tiling.units} s{tiling.stages} x{tiling.programs}"
    shape += f" p{tiling.planes}" if tiling.planes else ""
    shape += " staged" if tiling.staged else ""
    shape += " dynamic" if tiling.dynamic else ""
    shape += f" middle {tiling.middle}" if tiling.middle else ""
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
    parser.add_argument(
        "--activation-dtype", choices=("auto", "fp8"), default="auto", help="of the experts (default: %(default)s)"
    )
    add_routing(parser)
    options = parser.parse_args()
    target = replace(Target.of(DEVICE), activation_dtype=options.activation_dtype)
    with closing(Compilers()) as compilers:
        columns = HIDDEN // options.ranks // 32 * 32
        published = random_experts(options.experts, HIDDEN, columns, DEVICE, torch.bfloat16, scales=(118, 122))
        prepared = hopper.prepare_experts(target, published)
        cases = [Case.of(target, tokens, options.experts, columns, options.routing) for tokens in options.tokens]
        with compilers.compile_together():
            for case in cases:
                for tiling in case.tried:
                    case.run(prepared, tiling)
        oracle = reference.prepare_experts(target, published)
        for case in cases:
            report(case, prepared, reference.moe(case.x_TH.float(), case.routings[0], oracle, 7.0))


if __name__ == "__main__":
    main()
