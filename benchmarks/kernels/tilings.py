"""Tilings of the exact Hopper experts against each other at full load: `python -m benchmarks.kernels.tilings`.

First the error of each tiling, of the whole op against the reference in float32; runs must repeat to the bit. Then all
tilings in turns, in whole rounds. In each turn a tiling runs for some tenths of a second, so that the power limit
shows:

    cold    us of the first milliseconds after a rest, as in the first prompt after a pause
    warm    median us of the last half of a turn, as in a server
    against the first tiling, which is the present plan

The weights are those of one layer, 30 times as large as the L2. Each call of a round has another routing.
"""

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from benchmarks.kernels.experts import DEVICE, HIDDEN, MOST_ERROR, PER_TOKEN, Case, name_of
from benchmarks.kernels.inputs import random_experts
from benchmarks.kernels.routings import draw_for
from oscine.bench.timer import capture, seconds_on_gpu
from oscine.ops.compile_together import Compilers
from oscine.ops.moe import hopper, reference
from oscine.ops.moe.hopper import Tiling, large, stacked
from oscine.ops.target import Target

EXPERTS = 128
TOKENS = (256, 512, 1024, 2048, 8192)
REST = 0.1  # seconds between turns
COLD = 0.008  # seconds
AGAIN = 8  # runs whose results must be those of the first, to the bit
BATCH = 0.02  # seconds of replays between two events


def tilings(tokens: int) -> Iterator[Tiling]:
    """The present plan, and what may be faster."""
    now = hopper.plan(tokens, PER_TOKEN, EXPERTS, HIDDEN)
    yield now
    if tokens <= 256:
        yield stacked(16, stack=3, units=2, stages=3, programs=4)
        yield stacked(16, stack=5, units=1, stages=5, programs=3)
        yield stacked(16, stack=5, units=2, stages=4, programs=2)
    elif tokens <= 512:
        yield replace(now, quarters=True)
        yield stacked(32, stack=3, units=2, stages=3, programs=3)
        yield stacked(32, stack=5, units=2, stages=3, programs=2)
    elif tokens <= 1024:
        yield replace(now, staged=True, dynamic=True)
        yield replace(now, staged=True, dynamic=True, quarters=True)
        yield replace(now, staged=True, dynamic=True, quarters=True, units=1, stages=8, stack=2)
        yield stacked(64, stack=5, units=1, stages=5, programs=2)
        yield replace(stacked(64, stack=4, units=1, stages=6, programs=2), staged=True)
        yield replace(stacked(64, stack=3, units=2, stages=3, programs=2), staged=True)
    else:
        wide = replace(large(128, units=1, stages=8), staged=True)
        longer = replace(wide, dynamic=True, units=2, stages=4)
        if tokens <= 2048:
            yield replace(now, staged=True, dynamic=True, quarters=True)
            yield stacked(64, stack=5, units=1, stages=5, programs=2)
            yield replace(wide, dynamic=True, quarters=True)
        else:
            yield wide
            yield replace(wide, dynamic=True)
            yield longer
        yield replace(longer, quarters=True)


@dataclass
class Times:
    """Seconds of a call."""

    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Graph:
    """Calls of one tiling."""

    graph: torch.cuda.CUDAGraph
    calls: int

    @classmethod
    def of(cls, case: Case, prepared: hopper.HopperExperts, tiling: Tiling) -> "Graph":
        calls = min(len(case.routings), max(2, 8192 // len(case.x_TH)))
        return cls(capture(lambda i: case.run(prepared, tiling, i), DEVICE, calls), calls)

    def per_call(self, replays: int) -> float:
        def replay() -> None:
            for _ in range(replays):
                self.graph.replay()

        return seconds_on_gpu(replay) / replays / self.calls

    def turn(self, seconds: float, times: Times) -> None:
        torch.cuda.synchronize()
        time.sleep(REST)
        replay = self.per_call(1) * self.calls
        times.cold.append(self.per_call(max(1, int(COLD / replay))))
        start, batch = time.monotonic(), max(1, int(BATCH / replay))
        while (now := time.monotonic()) < start + seconds:
            taken = self.per_call(batch)
            if now > start + seconds / 2:
                times.warm.append(taken)


def check(case: Case, prepared: hopper.HopperExperts, expected: torch.Tensor) -> None:
    """Prints the error of each tiling; one that never ends is the last that is named."""
    for tiling in case.tried:
        print(f"  {len(case.x_TH):5} tokens  {name_of(tiling):<50}", end="  ", flush=True)
        first = case.run(prepared, tiling)
        same = all(torch.equal(case.run(prepared, tiling), first) for _ in range(AGAIN))
        error = float((first.float().sum(1) - expected).norm() / expected.norm())
        print(
            f"{error:.3%}{'' if error < MOST_ERROR else '  WRONG'}{'' if same else '  NOT THE SAME AGAIN'}", flush=True
        )


def report(case: Case, prepared: hopper.HopperExperts, rounds: int, seconds: float) -> None:
    graphs = {tiling: Graph.of(case, prepared, tiling) for tiling in case.tried}
    times = {tiling: Times() for tiling in case.tried}
    for _ in range(rounds):
        for tiling, graph in graphs.items():
            graph.turn(seconds, times[tiling])
    now = times[case.tried[0]]
    print(f"  {len(case.x_TH):5} tokens{'':40} cold us          warm us")
    for tiling, one in times.items():
        cold, warm = median(one.cold), median(one.warm)
        print(
            f"  {name_of(tiling):<50} {cold * 1e6:7.1f} {cold / median(now.cold) - 1:+7.1%}  "
            f"{warm * 1e6:7.1f} {warm / median(now.warm) - 1:+7.1%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=TOKENS, help="numbers of tokens to measure (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each tiling (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of a turn (default: %(default)s)")
    options = parser.parse_args()
    started = time.monotonic()
    target = Target.of(DEVICE)
    with closing(Compilers()) as compilers:
        published = random_experts(EXPERTS, HIDDEN, HIDDEN, DEVICE, torch.bfloat16, scales=(118, 122))
        prepared = hopper.prepare_experts(target, published)
        cases = []
        for tokens in options.tokens:
            x_TH = torch.randn(tokens, HIDDEN, device=DEVICE).bfloat16()
            routings = draw_for(target, x_TH, 8, EXPERTS, PER_TOKEN)
            cases.append(Case(x_TH, routings, list(tilings(tokens)), target))
        print(f"weights after {time.monotonic() - started:.0f} s", flush=True)
        with compilers.compile_together():  # all at once: an already compiled kernel would run on undefined inputs
            for case in cases:
                for tiling in case.tried:
                    case.run(prepared, tiling)
        print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
        oracle = reference.prepare_experts(target, published)
        for case in cases:
            check(case, prepared, reference.moe(case.x_TH.float(), case.routings[0], oracle, 7.0))
        del oracle
        print(f"checked after {time.monotonic() - started:.0f} s", flush=True)
        for case in cases:
            report(case, prepared, options.rounds, options.seconds)
        print(f"after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
