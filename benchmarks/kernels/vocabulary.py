"""What ranks do with the vocabulary, timed in CUDA graphs: `python -m benchmarks.kernels.vocabulary [--ranks 2]`.

At the published sizes. Columns, in us: the choice of greedy rows and of rows with noise, and embedding with a greedy
choice after it; each by one rank with all of the vocabulary, then by ranks that have parts of it. Rows of which the
ranks choose another token than one rank does are marked.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.communication import in_graph
from benchmarks.kernels.inputs import sampling_batch
from benchmarks.kernels.ranks import Ranks, RanksError, run_ranks
from oscine.ops.interface import Ops
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

ROWS = (1, 2, 8, 32, 64)
VOCAB, HIDDEN = 201_088, 2880
LIMIT = 55  # seconds, for all of it
COLUMNS = ("greedy", "noise", "embed + greedy")


class Vocabulary:
    """The embedding, which is also the head, as the ops of one target have it."""

    def __init__(self, target: Target, weight_VH: Tensor) -> None:
        self.ops: Ops = resolve(target, choose("hopper"))
        self.weight_VH, self._prepared = weight_VH, self.ops.chooser.prepare(weight_VH)

    def calls(self, rows: int) -> dict[str, Callable[[], Tensor]]:
        """Each returns the chosen tokens; the inputs are the same on all ranks."""
        device = self.weight_VH.device
        generator = torch.Generator(device).manual_seed(rows)
        x_NH = torch.randn((rows, HIDDEN), generator=generator, device=device).bfloat16()
        ids_N = torch.randint(VOCAB, (rows,), generator=generator, device=device)
        greedy = sampling_batch(rows, device, greedy=True, temperature_N=torch.zeros(rows, device=device))
        noise = sampling_batch(rows, device)

        def embed_and_choose() -> Tensor:
            return self._choose(self.ops.embed(ids_N, self.weight_VH), greedy)

        calls = lambda: self._choose(x_NH, greedy), lambda: self._choose(x_NH, noise), embed_and_choose
        return dict(zip(COLUMNS, calls, strict=True))

    def _choose(self, x_NH: Tensor, sampling: Any) -> Tensor:
        return self.ops.chooser.choose(x_NH, self.weight_VH, self._prepared, sampling)


def measure(ranks: Ranks) -> list[dict[str, Any]]:
    generator = torch.Generator(ranks.device).manual_seed(1)
    whole_VH = torch.randn((VOCAB, HIDDEN), generator=generator, device=ranks.device).mul_(0.02).bfloat16()
    part_VH = whole_VH.chunk(ranks.num_ranks)[ranks.rank].clone()
    target = ranks.target(max(ROWS), HIDDEN)
    communicator: Any = target.communicator
    alone, own = Vocabulary(Target.of(ranks.device), whole_VH), Vocabulary(target, part_VH)
    found = []
    for rows in ROWS:
        row: dict[str, Any] = {"rows": rows, "right": True}
        for name, by_ranks in own.calls(rows).items():
            by_one = alone.calls(rows)[name]
            row["right"] &= torch.equal(by_one(), by_ranks())
            row[name] = [in_graph(call, 20, communicator.barrier) for call in (by_one, by_ranks)]
        found.append(row | {"failed": bool(communicator.failed.item())})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use (default: %(default)s)")
    options = parser.parse_args()
    try:
        rows = run_ranks("benchmarks.kernels.vocabulary", "measure", options.ranks, LIMIT)[0]
    except RanksError as error:
        print(error)
        raise SystemExit(1) from error
    print("rows" + "".join(f"{name:>24}" for name in COLUMNS))
    for row in rows:
        cells = [f"{row[name][0]:13.1f} {row[name][1]:10.1f}" for name in COLUMNS]
        print(f"{row['rows']:4}" + "".join(cells) + ("" if row["right"] else "  WRONG"))
    if any(row["failed"] for row in rows):
        print("A POLL FAILED")


if __name__ == "__main__":
    main()
