"""Tilings of the prefill attention on Hopper against the Triton kernel:
`python -m benchmarks.kernels.prefill_attention`.

First the error of each tiling against the reference in float32, on small batches, and against the Triton kernel on each
case that is timed. Then all in turns, in CUDA graphs: median us of a call, TFLOP/s of the visible keys, and the ratio
to the Triton kernel. A case is (tokens, context) of each prompt, gpt-oss's 64 query heads on 8 key heads.
"""

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks.kernels.inputs import page_table
from oscine.extensions.bench.timer import capture, seconds_on_gpu
from oscine.ops.attention import hopper, reference, triton
from oscine.ops.compile_together import Compilers
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, PAGE, WINDOW = 64, 8, 64, 64, 128
Sequences = tuple[tuple[int, int], ...]
CASES: dict[str, tuple[Sequences, int | None]] = {
    "8 x 1,024": (((1024, 1024),) * 8, None),
    "1 x 1,024": (((1024, 1024),), None),
    "8,192": (((8192, 8192),), None),
    "8,192 of 32,768": (((8192, 32768),), None),
    "8,192 of 120,000": (((8192, 120000),), None),
    "32 of 65,536": (((32, 65536),), None),
    "128 of 16,384": (((128, 16384),), None),
    "512 of 32,768": (((512, 32768),), None),
    "128 of 2,048": (((128, 2048),), None),
    "64": (((64, 64),), None),
    "8 x 1,024, window": (((1024, 1024),) * 8, WINDOW),
    "1 x 1,024, window": (((1024, 1024),), WINDOW),
    "8,192 of 32,768, window": (((8192, 32768),), WINDOW),
}
SMALL: tuple[Sequences, ...] = (
    ((1, 70), (9, 130), (40, 40), (300, 1000)),
    ((333, 333), (1, 1), (65, 1291), (128, 128)),
)
MAX_ERROR = 8e-3  # relative, of results rounded to bfloat16 twice
BATCH = 0.004  # seconds of replays between two events
TILINGS = {
    "128 keys": {"BLOCK": 128, "STAGES": 4, "SHARES": 1},
    "128, shared": {"BLOCK": 128, "STAGES": 4, "SHARES": 16},
    "64 keys": {"BLOCK": 64, "STAGES": 8, "SHARES": 1},
}


@dataclass(frozen=True)
class Work:
    inputs: triton.Inputs  # with rotated queries
    left: triton.Inputs  # the same, with queries that attention rotates
    flop: float

    @classmethod
    def of(cls, sequences: Sequences, window: int | None) -> "Work":
        widths = [-(-context // PAGE) for _, context in sequences]
        flop = 0
        for count, context in sequences:
            seen = torch.arange(context - count, context) + 1
            flop += 4 * HEADS * HEAD_DIM * int((seen if window is None else seen.clamp(max=window)).sum())
        pages = torch.randn(sum(widths), 2, KV_HEADS, PAGE, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        counts, contexts = torch.tensor(sequences, dtype=torch.int32, device=DEVICE).unbind(1)
        starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        tokens = int(starts[-1])
        ids = torch.zeros(tokens, dtype=torch.int64, device=DEVICE)
        positions = torch.cat([torch.arange(context - count, context) for count, context in sequences]).to(DEVICE)
        group = PageGroup(page_table(widths, DEVICE), ids)
        batch = Batch(ids, ids, starts, contexts.contiguous(), (group,), None, 0)
        qkv = 1.5 * torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
        angles = torch.rand(int(contexts.max()), HEAD_DIM // 2, device=DEVICE) * 2 * torch.pi
        cos_sin = torch.cat((angles.cos(), angles.sin()), 1)
        sinks = torch.randn(HEADS, device=DEVICE, dtype=torch.bfloat16)
        left = triton.Inputs(qkv[:, :HEADS], pages, batch, group, sinks, window, (cos_sin, positions))
        cos, sin = cos_sin[positions, None].chunk(2, 2)
        first, second = qkv[:, :HEADS].float().chunk(2, 2)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), 2).bfloat16()
        return cls(left._replace(q_TQD=rotated, rotation=None), left, flop)

    def calls(self, target: Target) -> dict[str, Callable[[], Tensor]]:
        """The Triton kernel, then each tiling; a call returns what it wrote."""
        kernels: dict[str, Callable[..., None]] = {"Triton": partial(triton.prefill, target)}
        kernels |= {name: partial(hopper.launch_prefill, target, tiling=tiling) for name, tiling in TILINGS.items()}
        made: dict[str, Callable[[], Tensor]] = {}
        for name, launch in kernels.items():
            made[name] = partial(self._run, launch, self.inputs)
            made[f"{name}, rotating"] = partial(self._run, launch, self.left)
        return made

    def _run(self, launch: Callable[..., None], inputs: triton.Inputs) -> Tensor:
        out_TQD = torch.empty_like(self.inputs.q_TQD)
        launch(out_TQD, inputs=inputs)
        return out_TQD

    def expected(self) -> Tensor:
        q_TQD, kv_pages, batch, group, sinks_Q, window, _ = self.inputs
        return reference.attention(q_TQD.float(), kv_pages, batch, group, sinks_Q, window).view(q_TQD.shape)


def check(name: str, calls: dict[str, Callable[[], Tensor]], expected: Tensor) -> bool:
    good = True
    for variant, call in calls.items():
        print(f"  {name:<26} {variant:<28}", end=" ", flush=True)
        found = call()
        same = torch.equal(call(), found)
        error = float((found.float() - expected).norm() / expected.norm())
        right = error < MAX_ERROR
        good &= right and same
        print(f"{error:.3%}{'' if right else '  WRONG'}{'' if same else '  NOT THE SAME AGAIN'}", flush=True)
    return good


def report(name: str, work: Work, calls: dict[str, Callable[[], Tensor]], rounds: int) -> None:
    times: dict[str, list[float]] = {variant: [] for variant in calls}
    captured = {}
    for variant, call in calls.items():
        once = seconds_on_gpu(call)
        number = max(1, min(16, int(BATCH / once)))
        captured[variant] = capture(lambda _, call=call: call(), DEVICE, number), number
    for _ in range(max(1, rounds)):
        for variant, (graph, number) in captured.items():
            graph.replay()
            times[variant].append(seconds_on_gpu(graph.replay) / number)
    before = median(times["Triton"])
    print(name)
    for variant, taken in times.items():
        us = median(taken) * 1e6
        print(
            f"  {variant:<28} {us:9.1f} us {work.flop / us / 1e6:6.0f} TFLOP/s  {before * 1e6 / us:5.2f} x", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each tiling (default: %(default)s)")
    options = parser.parse_args()
    started, target = time.monotonic(), Target.of(DEVICE)

    def say(what: str) -> None:
        print(f"{what} after {time.monotonic() - started:.0f} s", flush=True)

    with closing(Compilers()) as compilers:
        small = [Work.of(sequences, window) for sequences in SMALL for window in (None, WINDOW)]
        cases = {name: Work.of(*case) for name, case in CASES.items()}
        with compilers.compile_together():
            for work in (*small, *cases.values()):
                for call in work.calls(target).values():
                    call()
        say("compiled")
        good = [check("small", work.calls(target), work.expected()) for work in small]
        for name, work in cases.items():
            calls = work.calls(target)
            good.append(check(name, calls, calls["Triton"]().float()))
        if not all(good):
            sys.exit("wrong tilings are not timed")
        say("checked")
        for name, work in cases.items():
            report(name, work, work.calls(target), options.rounds)
        say("measured")


if __name__ == "__main__":
    main()
