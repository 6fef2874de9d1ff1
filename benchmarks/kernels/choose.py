"""Choosing with and without all logits, and tile shapes of the screen: `python -m benchmarks.kernels.choose`.

For each number of rows this times lm_head and sample, the screened choice (greedy and with noise), and the int8 product
alone in all shapes that fit, the chosen one first. It also counts the tokens of a greedy row that are computed exactly.
A result that differs from that of the chosen shape is marked. The best shapes belong in hopper_gemm.TILES.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.extensions.bench.timer import time_call
from oscine.model.config import gpt_oss_120b
from oscine.ops.choose import hopper as screened
from oscine.ops.choose.hopper_gemm import TILES, logits
from oscine.ops.choose.screen_size import screen_bytes
from oscine.ops.interface import SamplingBatch
from oscine.ops.linear.hopper_stream import Tile, tile_for
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

DEVICE = torch.device("cuda")
CALLS = 4
# rows, chunks, stages, warps
SHAPES = ((64, 2, 5, 4), (64, 2, 3, 4), (64, 4, 2, 4), (128, 1, 5, 8), (128, 2, 3, 8), (128, 1, 5, 4), (256, 1, 2, 8))
SHARED = 113 * 1024  # bytes of shared memory of each of two programs


def tiles(num_rows: int) -> Iterator[Tile]:
    chosen = tile_for(num_rows, TILES)
    assert chosen is not None, "so many rows are not screened"
    yield chosen
    for rows, chunks, stages, warps in SHAPES:
        tile = Tile(chosen.max_tokens, stages, chunks, rows, warps=warps)
        if stages * chunks * 128 * (rows + 2 * tile.max_tokens) < SHARED and tile != chosen:
            yield tile


def report(name: str, num_rows: int, num_bytes: int, call: Callable[[], object], note: str = "") -> None:
    seconds = time_call(lambda _: call(), DEVICE, CALLS).seconds
    print(f"{num_rows:4} {name:>34} {seconds * 1e6:8.1f} us {num_bytes / seconds / 1e12:6.2f} TB/s{note}", flush=True)


def num_candidates(x_NH: Tensor, weight_VH: Tensor, screen: screened.Screen) -> float:
    """Mean number per greedy row, counted by exact logits."""
    logits_NV = x_NH.float() @ weight_VH.float().T
    bound_NV = screen.rest_V * (x_NH * screen.column_H).norm(dim=1, keepdim=True)
    floor_N1 = (logits_NV - bound_NV).amax(1, keepdim=True)
    return float((logits_NV + bound_NV >= floor_N1).sum(1).float().mean())


def compare(num_rows: int, weight_VH: Tensor, screen: screened.Screen) -> None:
    vocab, hidden = weight_VH.shape
    target = Target.of(DEVICE)
    ops, x_NH = resolve(target, choose("hopper")), torch.randn(num_rows, hidden, device=DEVICE).bfloat16()
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
            screen_bytes(vocab, hidden),
            lambda sampling=sampling: screened.screened(target, x_NH, weight_VH, screen, sampling),
            "" if same else "  OTHER TOKENS",
        )
    print(
        f"{num_rows:4} {'exact scores of a greedy row':>34} {num_candidates(x_NH, weight_VH, screen):8.0f}", flush=True
    )
    planes_2NH, scale_N, _, _ = screened.quantize(target, x_NH, screen)
    arguments = (planes_2NH, scale_N, screen.codes_VH, screen.scale_V)
    expected = None
    for tile in tiles(num_rows):
        found = logits(*arguments, tile)
        expected = found if expected is None else expected
        name = f"{tile.rows} rows, {tile.chunks} x {tile.stages}, {tile.warps} warps"
        note = "" if torch.allclose(found, expected, rtol=1e-5) else "  WRONG"
        report(name, num_rows, screen.codes_VH.nbytes, lambda tile=tile: logits(*arguments, tile), note)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rows",
        type=int,
        nargs="+",
        default=[1, 8, 16, 32, 64],
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
