"""Decode attention on Hopper beside the Triton kernel: `python -m benchmarks.kernels.decode_attention`.

First the error of each against the reference in float32. Then all in turns, in CUDA graphs of several layers, so that
no layer finds its keys in the L2: median us of a layer, and the memory's speed that it reaches. gpt-oss's 64 query
heads on 8 key heads, full attention.
"""

import argparse
import random
import sys
from collections.abc import Callable
from functools import partial
from math import log
from statistics import median

import torch
from torch import Tensor

from benchmarks.kernels.inputs import page_table
from oscine.extensions.bench.timer import capture, seconds_on_gpu
from oscine.ops.attention import hopper, reference, triton
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM, PAGE = 64, 8, 64, 64
LAYERS = 4
LONG, MEDIUM, SHORT = 131_072, 16_384, 1_024


def lognormal(number: int, middle: int) -> list[int]:
    """Lengths with this median and a sigma of 1."""
    draw = random.Random(number)
    return [min(LONG, int(draw.lognormvariate(log(middle), 1))) for _ in range(number)]


CASES: dict[str, list[int]] = {
    **{f"{n} x 1,024": [SHORT] * n for n in (2, 8, 16, 24, 32, 64, 80, 128, 256)},
    **{f"{n} x 4,096": [4_096] * n for n in (64, 80, 128, 256)},
    **{f"{n} x 16,384": [MEDIUM] * n for n in (5, 6, 7, 8, 9, 12, 16, 20, 32, 36, 40, 64)},
    **{f"131,072 and {n - 1} x 1,024": [LONG] + [SHORT] * (n - 1) for n in (2, 8, 24, 64, 128, 256)},
    **{f"{n} about {middle:,}": lognormal(n, middle) for n, middle in ((8, 30_000), (40, 8_000), (64, 8_000))},
    **{f"{n} about {middle:,}": lognormal(n, middle) for n, middle in ((128, 1_000), (128, 6_000), (256, 3_000))},
    "63 x 1,024 and 131,072": [SHORT] * 63 + [LONG],
    "2 x 131,072 and 7 x 5,800": [LONG] * 2 + [5_800] * 7,
    "61,000 and 9 x 3,800": [61_000] + [3_800] * 9,
    "121,000 and 29 x 55,600": [121_000] + [55_600] * 29,
    "30 x 57,800": [57_800] * 30,
    "8 x 16,384 and 24 x 512": [MEDIUM] * 8 + [512] * 24,
    "64 spread to 19,400": list(range(500, 19_700, 300)),
}
MAX_ERROR = 8e-3  # relative, of results rounded to bfloat16 twice
CHECKED = 4_096  # pages, at most: the reference gathers them in float32


def batch_of(lens: list[int]) -> Batch:
    table = page_table([-(-length // PAGE) for length in lens], DEVICE)
    lens_S = torch.tensor(lens, dtype=torch.int32, device=DEVICE)
    ids = torch.zeros(len(lens), dtype=torch.int64, device=DEVICE)
    starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=DEVICE)
    return Batch(ids, lens_S.long() - 1, starts, lens_S, (PageGroup(table, ids),), None, len(lens))


def layers_of(lens: list[int]) -> list[triton.Inputs]:
    """The inputs of each layer, which share all but their pages."""
    batch, pages = batch_of(lens), sum(-(-length // PAGE) for length in lens)
    q_TQD = 1.5 * torch.randn(len(lens), HEADS, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    sinks = torch.randn(HEADS, device=DEVICE, dtype=torch.bfloat16)
    shape = pages, 2, KV_HEADS, PAGE, HEAD_DIM
    return [
        triton.Inputs(
            q_TQD, torch.randn(shape, device=DEVICE, dtype=torch.bfloat16), batch, batch.groups[0], sinks, None
        )
        for _ in range(LAYERS)
    ]


def kernels(target: Target, num_decodes: int) -> dict[str, Callable[[Tensor, triton.Inputs], None]]:
    found: dict[str, Callable[[Tensor, triton.Inputs], None]] = {"Triton": partial(triton.decode, target)}
    if num_decodes <= hopper.MAX_DECODES:
        tiling = hopper.decode_tiling(target, KV_HEADS, None)
        found["Hopper"] = partial(hopper.launch_decode, target, tiling=tiling)
    return found


def is_right(name: str, layer: triton.Inputs, launch: Callable[[Tensor, triton.Inputs], None]) -> bool:
    q_TQD, kv_pages, batch, group, sinks_Q, window, _ = layer
    expected = reference.attention(q_TQD.float(), kv_pages, batch, group, sinks_Q, window).view(q_TQD.shape)
    out = torch.full_like(q_TQD, torch.nan)
    launch(out, layer)
    error = float((out.float() - expected).norm() / expected.norm())
    if not error < MAX_ERROR:
        print(f"{name}: error {error:.3%}")
    return error < MAX_ERROR


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="turns of each kernel (default: %(default)s)")
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=tuple(CASES), metavar="NAME")
    options = parser.parse_args()
    target = Target.of(DEVICE)
    for name in options.cases:
        lens, layers = CASES[name], layers_of(CASES[name])
        found = kernels(target, len(lens))
        small = len(layers[0].kv_pages) <= CHECKED
        if small and not all(is_right(f"{name}, {kernel}", layers[0], run) for kernel, run in found.items()):
            sys.exit("wrong kernels are not timed")
        graphs = {
            kernel: capture(
                lambda i, run=run, layers=layers: run(torch.empty_like(layers[i].q_TQD), layers[i]), DEVICE, LAYERS
            )
            for kernel, run in found.items()
        }
        times: dict[str, list[float]] = {kernel: [] for kernel in found}
        for _ in range(options.rounds):
            for kernel, graph in graphs.items():
                graph.replay()
                times[kernel].append(seconds_on_gpu(graph.replay) / LAYERS)
        size = sum(lens) * KV_HEADS * 2 * HEAD_DIM * 2
        print(f"{name}{'' if small else ' (not checked)'}", flush=True)
        for kernel, taken in times.items():
            print(f"  {kernel:<12} {median(taken) * 1e6:8.1f} us {size / median(taken) / 1e12:6.2f} TB/s", flush=True)


if __name__ == "__main__":
    main()
