"""Tile shapes of the Hopper experts, timed: `python -m benchmarks.kernels.experts [--experts 128] [--tokens 1 8 ...]`.

For each number of tokens first the plan that the op would choose, then others that fit the GPU. A result that is not
that of the chosen plan is marked; whether that one is right is for the tests to say. The best belong into hopper.plan.
"""

import argparse
from collections.abc import Iterator
from contextlib import closing

import torch

from oscine.ops.cases import random_experts, random_routing
from oscine.ops.compile_together import Compilers
from oscine.ops.moe import hopper
from oscine.ops.moe.hopper import Plan, Tiling
from oscine.perf.timer import time_call

HIDDEN = 2880
PER_TOKEN = 4
CALLS = 16
DEVICE = torch.device("cuda")


def tilings() -> Iterator[Tiling]:
    """Every shape that kept its registers and fits shared memory when it was compiled."""
    for splits in (1, 2, 3):
        yield Tiling(8, splits=splits)
        yield hopper.wide(8, stages=6, splits=splits)
    for tokens, stages in ((16, 4), (32, 3)):
        yield Tiling(tokens, stages=stages)
    for tokens, stages in ((16, 5), (32, 4), (64, 3)):
        yield hopper.wide(tokens, stages=stages)
    for tokens, units, stages in ((64, 3, 4), (64, 1, 14), (128, 1, 8), (128, 2, 4)):
        yield hopper.large(tokens, units=units, stages=stages)


def plans(tokens: int, experts: int) -> list[Plan]:
    """The chosen one, and pairs of equal token tiles near the mean number of tokens of an expert."""
    mean = tokens * PER_TOKEN / experts
    near = [t for t in tilings() if mean / 2 <= t.tokens <= 8 * max(mean, 1) and (t.splits == 1 or tokens <= 16)]
    whole = [t for t in near if t.splits == 1]
    pairs = [Plan(up, down) for up in whole for down in near if _but_splits(up) == _but_splits(down)]
    chosen = hopper.plan(tokens, PER_TOKEN, experts)
    return [chosen, *(plan for plan in pairs if plan != chosen)]


def _but_splits(tiling: Tiling) -> tuple[int, ...]:
    return tiling.tokens, tiling.consumers, tiling.units, tiling.stages, tiling.programs


def report(tokens: int, experts: int, prepared: hopper.HopperExperts, compilers: Compilers) -> None:
    x_TH = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
    routings = [random_routing(tokens, experts, PER_TOKEN, DEVICE) for _ in range(CALLS)]
    busy = sum(len(routing.expert_ids_TK.unique()) for routing in routings) / CALLS
    gigabytes = busy * 3 * HIDDEN * HIDDEN * (0.5 + 1 / 32) / 1e9
    candidates = plans(tokens, experts)
    with compilers.compile_together():
        for plan in candidates:
            hopper.run(x_TH, routings[0], prepared, 7.0, plan)
    expected = hopper.run(x_TH, routings[0], prepared, 7.0, candidates[0]).float().sum(1)
    for plan in candidates:
        y = hopper.run(x_TH, routings[0], prepared, 7.0, plan).float().sum(1)
        error = float((y - expected).norm() / expected.norm())
        calls = min(CALLS, max(2, 4096 // tokens))
        time = time_call(lambda i, plan=plan: hopper.run(x_TH, routings[i], prepared, 7.0, plan), DEVICE, calls)
        teraflops = tokens * PER_TOKEN * 3 * 2 * HIDDEN**2 / time.seconds / 1e12
        print(
            f"{tokens:6} {_name(plan):>34} {time.seconds * 1e6:9.1f} us {gigabytes / time.seconds / 1e3:6.2f} TB/s "
            f"{teraflops:6.0f} TFLOP/s{'  chosen' if plan is candidates[0] else ''}"
            f"{'' if error < 0.01 else f'  WRONG by {error:.1%}'}",
            flush=True,
        )


def _name(plan: Plan) -> str:
    up = plan.gate_up
    shape = f"n{up.tokens} c{up.consumers} u{up.units} s{up.stages} x{up.programs}"
    return shape + (f", splits {plan.down.splits}" if plan.down.splits > 1 else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64, 512, 1024, 8192])
    options = parser.parse_args()
    with closing(Compilers()) as compilers:
        published = random_experts(options.experts, HIDDEN, HIDDEN, DEVICE, torch.bfloat16, scales=(118, 122))
        prepared = hopper.prepare_experts(published)
        del published
        for tokens in options.tokens:
            report(tokens, options.experts, prepared, compilers)


if __name__ == "__main__":
    main()
