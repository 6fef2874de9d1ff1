"""Choosing with and without all logits, and tile shapes of the screen: `python -m benchmarks.kernels.choose`.

For each number of rows this times lm_head and sample, the screened choice (greedy and with noise), and the products of
the screen alone in all shapes that fit, the chosen one first. It also counts the tokens of a greedy row that are
computed exactly. A result that differs from that of the chosen shape is marked. The best shapes belong in COARSE_TILES
and TILES of hopper_gemm.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.extensions.bench.timer import time_call
from oscine.model.config import gpt_oss_120b
from oscine.ops.choose import hopper as screened
from oscine.ops.choose.hopper_gemm import Tile, logits
from oscine.ops.interface import SamplingBatch
from oscine.ops.linear.hopper_stream import CHUNK_BYTES
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
CALLS = 4
# rows, stages, warps, programs per SM
SHAPES = (
    (64, 3, 4, 2),
    (64, 4, 4, 2),
    (64, 6, 4, 2),
    (64, 2, 4, 2),
    (64, 2, 4, 3),
    (64, 3, 4, 3),
    (64, 8, 4, 1),
    (128, 2, 8, 2),
    (128, 3, 8, 2),
    (128, 3, 8, 1),
    (128, 4, 8, 1),
    (128, 6, 8, 1),
    (256, 2, 8, 1),
    (256, 3, 8, 1),
)
SHARED = 226 * 1024  # bytes per SM


def tiles(chosen: Tile) -> Iterator[Tile]:
    """The chosen one, then all that fit."""
    yield chosen
    for rows, stages, warps, programs in SHAPES:
        tile = replace(chosen, rows=rows, stages=stages, warps=warps, programs=programs)
        bytes_of_stage = CHUNK_BYTES * (rows * (1 + tile.whole) + 4 * tile.max_tokens)
        if programs * stages * bytes_of_stage < SHARED and tile != chosen:
            yield tile


def report(name: str, num_rows: int, num_bytes: int, call: Callable[[], object], note: str = "") -> None:
    seconds = time_call(lambda _: call(), DEVICE, CALLS).seconds
    print(f"{num_rows:4} {name:>44} {seconds * 1e6:8.1f} us {num_bytes / seconds / 1e12:6.2f} TB/s{note}", flush=True)


def num_candidates(x_NH: Tensor, weight_VH: Tensor, screen: screened.Screen) -> float:
    """Mean number per greedy row, counted by exact logits."""
    logits_NV = x_NH.float() @ weight_VH.float().T
    bound_V = screen.rest_V if screen.tile(len(x_NH)).whole else screened.COARSE_BOUND * screen.scale_V
    bound_NV = bound_V * (x_NH * screen.column_H).norm(dim=1, keepdim=True)
    floor_N1 = (logits_NV - bound_NV).amax(1, keepdim=True)
    return float((logits_NV + bound_NV >= floor_N1).sum(1).float().mean())


def compare(num_rows: int, weight_VH: Tensor, screen: screened.Screen) -> None:
    hidden = weight_VH.shape[1]
    target = Target.of(DEVICE)
    ops, x_NH = resolve(target, choose("hopper")), torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
    chosen = screen.tile(num_rows)
    num_bytes = screen.codes_2VJ.nbytes // (1 if chosen.whole else 2)
    batches: dict[str, SamplingBatch] = {}
    for heat, name in ((0.0, "greedy"), (1.0, "drawn")):
        temperature_N = torch.full((num_rows,), heat, device=DEVICE)
        batches[name] = sampling_batch(num_rows, DEVICE, temperature_N=temperature_N, greedy=heat == 0)
    for name, sampling in batches.items():
        all_logits = ops.sample(ops.lm_head(x_NH, weight_VH), sampling).token_ids_N
        same = torch.equal(screened.screened(target, x_NH, weight_VH, screen, sampling), all_logits)
        report(
            f"{name}, all logits",
            num_rows,
            weight_VH.nbytes,
            lambda sampling=sampling: ops.sample(ops.lm_head(x_NH, weight_VH), sampling),
        )
        report(
            f"{name}, screened",
            num_rows,
            num_bytes,
            lambda sampling=sampling: screened.screened(target, x_NH, weight_VH, screen, sampling),
            "" if same else "  OTHER TOKENS",
        )
    left = num_candidates(x_NH, weight_VH, screen)
    print(f"{num_rows:4} {'exact scores of a greedy row':>44} {left:8.0f}", flush=True)
    coded = screened.quantize(target, x_NH, screen, chosen)
    arguments = (target, coded.planes, coded.scale_N, coded.shift_N, screen.codes_2VJ, screen.scale_V)
    report("activations", num_rows, x_NH.nbytes, lambda: screened.quantize(target, x_NH, screen, chosen))
    expected = logits(*arguments, chosen)
    for tile in tiles(chosen):
        name = f"{tile.rows} rows, {tile.stages} stages, {tile.warps} warps, {tile.programs} programs"
        note = "" if torch.allclose(logits(*arguments, tile), expected, rtol=1e-5) else "  WRONG"
        report(name, num_rows, num_bytes, lambda tile=tile: logits(*arguments, tile), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 4, 8, 16, 32, 64],
        help="numbers of rows to measure (default: %(default)s)",
    )
    options = parser.parse_args()
    config = gpt_oss_120b()
    weight_VH = torch.randn(config.vocab_size, config.hidden_size, device=DEVICE).mul_(0.02).bfloat16()
    screen = screened.prepare(weight_VH)
    assert screen is not None
    for num_rows in options.rows:
        compare(num_rows, weight_VH, screen)


if __name__ == "__main__":
    main()
