"""Tilings of the Hopper experts for many tokens against each other, at full load:
`python -m benchmarks.kernels.tilings`.

First the error of each tiling, of the whole op against the reference in float32 with activations of the same type; runs
must repeat to the bit. Then all tilings in turns, in whole rounds. In each turn a tiling runs for some tenths of a
second, so that the power limit shows:

    cold    us of the first milliseconds after a rest, as in the first prompt after a pause
    warm    median us of the last half of a turn, as in a server
    against the first tiling, which is the present plan

The weights are those of one layer, 30 times as large as the L2. Each call of a round has another routing.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from benchmarks.kernels.experts import DEVICE, HIDDEN, MAX_ERROR, MAX_FP8_ERROR, PER_TOKEN, Case, name_of
from benchmarks.kernels.inputs import random_experts
from benchmarks.kernels.routings import add_routing, draw_for
from oscine.extensions.bench.timer import capture, seconds_on_gpu
from oscine.ops.compile_together import Compilers
from oscine.ops.interface import MxExperts
from oscine.ops.moe import hopper, reference
from oscine.ops.moe.hopper import Tiling, large
from oscine.ops.target import Target

EXPERTS = 128
TOKENS = {"auto": (1024, 1536, 2048, 8192), "fp8": (1024, 2048, 8192)}  # by the type of activations
REST = 0.1  # seconds between turns
COLD = 0.008  # seconds
AGAIN = 8  # runs whose results must be those of the first, to the bit
BATCH = 0.02  # seconds of replays between two events


def tilings(tokens: int, fp8: bool) -> list[Tiling]:
    """The present plan, and what may be faster."""
    now = (hopper.plan_fp8 if fp8 else hopper.plan)(tokens, PER_TOKEN, EXPERTS, HIDDEN)
    others = fp8_tilings(tokens) if fp8 else exact_tilings(tokens)
    return [now, *(tiling for tiling in others if tiling != now)]


def exact_tilings(tokens: int) -> Iterator[Tiling]:
    if tokens <= 2048:
        yield large(64, units=3, stages=4)
        yield replace(large(64, units=3, stages=4), middle=48)
    yield large(128, units=3, stages=3)
    yield replace(large(128, units=3, stages=3), middle=96)
    if tokens > 2048:
        yield replace(large(128, units=2, stages=4), ahead=1)


def fp8_tilings(tokens: int) -> Iterator[Tiling]:
    if tokens <= 2048:
        small = large(64, units=3, stages=5, planes=1)
        yield small
        yield replace(small, middle=48)
    yield replace(large(128, units=3, stages=4, planes=1), middle=96)


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


@dataclass(frozen=True)
class Layer:
    """One layer's experts, for one type of activations, and what is measured with them."""

    target: Target
    prepared: hopper.HopperExperts
    cases: list[Case]

    @classmethod
    def of(cls, target: Target, published: MxExperts, tokens: Sequence[int], routing: str) -> "Layer":
        prepared, cases = hopper.prepare_experts(target, published), []
        for number in tokens:
            x_TH = torch.randn(number, HIDDEN, device=DEVICE).bfloat16()
            tried = tilings(number, prepared.fp8)
            cases.append(Case(x_TH, draw_for(target, x_TH, 8, EXPERTS, PER_TOKEN, routing), tried, target))
        return cls(target, prepared, cases)

    def compile(self) -> None:
        for case in self.cases:
            for tiling in case.tried:
                case.run(self.prepared, tiling)

    def check(self, published: MxExperts) -> bool:
        oracle, good = reference.prepare_experts(self.target, published), True
        for case in self.cases:
            good &= check(case, self.prepared, reference.moe(case.x_TH.float(), case.routings[0], oracle, 7.0))
        return good


def check(case: Case, prepared: hopper.HopperExperts, expected: torch.Tensor) -> bool:
    """Prints the error of each tiling; one that never ends is the last that is named. Returns whether all are right."""
    good = True
    for tiling in case.tried:
        print(f"  {len(case.x_TH):5} tokens  {name_of(tiling):<50}", end="  ", flush=True)
        first = case.run(prepared, tiling)
        same = all(torch.equal(case.run(prepared, tiling), first) for _ in range(AGAIN))
        error = float((first.float().sum(1) - expected).norm() / expected.norm())
        right = error < (MAX_FP8_ERROR if prepared.fp8 else MAX_ERROR)
        good &= right and same
        print(f"{error:.3%}{'' if right else '  WRONG'}{'' if same else '  NOT THE SAME AGAIN'}", flush=True)
    return good


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
    parser.add_argument("--tokens", type=int, nargs="+", help=f"numbers of tokens to measure (default: {TOKENS})")
    parser.add_argument(
        "--activation-dtype", choices=TOKENS, nargs="+", default=[*TOKENS], help="of experts (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="turns of each tiling (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.7, help="of a turn (default: %(default)s)")
    add_routing(parser)
    options = parser.parse_args()
    started = time.monotonic()

    def say(what: str) -> None:
        print(f"{what} after {time.monotonic() - started:.0f} s", flush=True)

    with closing(Compilers()) as compilers:
        published = random_experts(EXPERTS, HIDDEN, HIDDEN, DEVICE, torch.bfloat16, scales=(118, 122))
        layers = [
            Layer.of(
                replace(Target.of(DEVICE), activation_dtype=dtype),
                published,
                options.tokens or TOKENS[dtype],
                options.routing,
            )
            for dtype in options.activation_dtype
        ]
        say("weights")
        with compilers.compile_together():
            for layer in layers:
                layer.compile()
        say("compiled")
        good = [layer.check(published) for layer in layers]
        if not all(good):
            sys.exit("wrong tilings are not timed")
        say("checked")
        for layer in layers:
            for case in layer.cases:
                report(case, layer.prepared, options.rounds, options.seconds)
        say("measured")


if __name__ == "__main__":
    main()
