"""Kernels at the GPU's power limit: `python -m benchmarks.kernels.power [--tokens 8]`.

Each kernel runs for a second, while nvidia-smi reads power and clock. A kernel that is timed for a few milliseconds
runs at the full clock; in a server it may not. Runs with zeros show the cost of the data themselves.
"""

import argparse
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, median

import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from benchmarks.kernels.routings import draw_for
from oscine.extensions.bench.timer import capture, seconds_on_gpu
from oscine.model.config import gpt_oss_120b
from oscine.ops.choose import hopper as screened
from oscine.ops.choose.hopper_gemm import logits
from oscine.ops.interface import Routing
from oscine.ops.moe import hopper
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
SECONDS = 1.0  # of each case
SETTLED = 0.4  # of it, before power and clock are read
REST = 0.4  # seconds before the next
EVERY_MS = 20
CALLS = 16


@dataclass(frozen=True, slots=True)
class Sample:
    time: float
    megahertz: float
    watts: float


class Meter:
    """Reads nvidia-smi until the process ends."""

    def __init__(self) -> None:
        command = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
        self._samples: list[Sample] = []
        process = subprocess.Popen([*command, "-lms", str(EVERY_MS)], stdout=subprocess.PIPE, text=True)
        threading.Thread(target=self._read, args=(process,), daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            megahertz, watts = line.split(",")
            self._samples.append(Sample(time.monotonic(), float(megahertz), float(watts)))

    def between(self, start: float, end: float) -> list[Sample]:
        return [sample for sample in self._samples if start < sample.time < end]


def measure(meter: Meter, name: str, call: Callable[[int], object], calls: int = CALLS) -> None:
    """Prints a line; `call(i)` is the i-th of a round of `calls`."""
    graph = capture(call, DEVICE, calls)
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(REST)
    cold = seconds_on_gpu(graph.replay) / calls
    rounds = max(1, int(0.05 / (cold * calls)))

    def replay() -> None:
        for _ in range(rounds):
            graph.replay()

    start, times = time.monotonic(), []
    while (now := time.monotonic()) < start + SECONDS:
        times.append((now, seconds_on_gpu(replay) / calls / rounds))
    settled = start + SETTLED * SECONDS
    warm = median(seconds for when, seconds in times if when > settled)
    samples = meter.between(settled, time.monotonic())
    watts, megahertz = fmean(sample.watts for sample in samples), fmean(sample.megahertz for sample in samples)
    print(
        f"{name:<40} cold {cold * 1e6:8.1f} us  warm {warm * 1e6:8.1f} us {watts:6.0f} W {megahertz:6.0f} MHz "
        f"{watts * warm * 1e3:8.1f} mJ",
        flush=True,
    )


def report_experts(meter: Meter, tokens: int) -> None:
    config = gpt_oss_120b()
    hidden, experts, per_token = config.hidden_size, config.experts[0], config.num_experts_per_tok
    published = random_experts(experts, hidden, config.intermediate_size, DEVICE, torch.bfloat16, scales=(118, 122))
    target = Target.of(DEVICE)
    prepared = hopper.prepare_experts(target, published)
    tiling = hopper.plan(tokens, per_token, experts, config.intermediate_size)
    zero = replace(
        prepared,
        gate_up=replace(prepared.gate_up, nibbles=torch.zeros_like(prepared.gate_up.nibbles), descriptors={}),
        down=replace(prepared.down, nibbles=torch.zeros_like(prepared.down.nibbles), descriptors={}),
    )
    x_TH = torch.randn(tokens, hidden, device=DEVICE).bfloat16()
    for what, x, weights in (
        ("experts", x_TH, prepared),
        ("experts, tokens zero", torch.zeros_like(x_TH), prepared),
        ("experts, weights zero", x_TH, zero),
        ("experts, all zero", torch.zeros_like(x_TH), zero),
    ):
        routings = draw_for(target, x, CALLS, experts, per_token)
        measure(meter, what, partial(run, x, routings, weights, tiling))


def run(x_TH: Tensor, routings: list[Routing], weights: hopper.HopperExperts, tiling: hopper.Tiling, i: int) -> Tensor:
    return hopper.run(Target.of(DEVICE), x_TH, routings[i], weights, 7.0, tiling)


def report_head(meter: Meter, rows: int) -> None:
    config, target = gpt_oss_120b(), Target.of(DEVICE)
    ops = resolve(target, choose("hopper"))
    head_VH = torch.randn(config.vocab_size, config.hidden_size, device=DEVICE).mul_(0.02).bfloat16()
    x_NH = torch.randn(rows, config.hidden_size, device=DEVICE).bfloat16()
    measure(meter, "head in bfloat16", lambda _: ops.lm_head(x_NH, head_VH), 4)
    screen = screened.prepare(head_VH)
    assert screen is not None
    tile = screen.tile(rows)
    coded = screened.quantize(target, x_NH, screen, tile)
    arguments = target, coded.planes, coded.scale_N, coded.shift_N, screen.codes_2VJ, screen.scale_V, tile
    measure(meter, f"head in {8 if tile.whole else 4} bits", lambda _: logits(*arguments), 4)
    head_VH.zero_()
    x_NH.zero_()
    measure(meter, "head in bfloat16, all zero", lambda _: ops.lm_head(x_NH, head_VH), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8, help="tokens per step (default: %(default)s)")
    options = parser.parse_args()
    meter = Meter()
    report_experts(meter, options.tokens)
    report_head(meter, min(options.tokens, screened.MAX_TOKENS))


if __name__ == "__main__":
    main()
