"""All-reduce between GPUs of one host, timed in CUDA graphs: `python -m benchmarks.kernels.communication [--ranks 2]`.

Columns, in us per all-reduce of rows of 2,880 bfloat16: the stand-alone kernel; the norm that adds up over ranks, the
same norm without ranks, and the difference; NCCL; torch's kernels over symmetric memory, in one shot and in two.
A result that differs from NCCL's by more than rounding is marked. Rows go to benchmarks/results/communication.jsonl.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.kernels.ranks import Ranks, RanksError, run_ranks
from oscine.ops.comm.sums import ALONE, partial_sums
from oscine.ops.norm import triton as norm

ROWS = (1, 8, 64, 256, 1024, 8192)
HIDDEN = 2880
LIMIT = 55  # seconds, for all of it
RESULTS = Path(__file__).parents[1] / "results" / "communication.jsonl"


def in_graph(call: Callable[[], object], calls: int, barrier: Callable[[], None], replays: int = 15) -> float:
    """Median us per call. A round is as long as the slowest rank's, since each call waits for all."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
        call()
    stream.synchronize()
    barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(calls):
            call()
    barrier()
    times = []
    with torch.cuda.stream(stream):
        for _ in range(replays + 2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / calls)
    barrier()
    return median(times[2:])


def measure(ranks: Ranks) -> list[dict[str, Any]]:
    torch.manual_seed(ranks.rank)
    target = ranks.target(max(ROWS), HIDDEN)
    communicator: Any = target.communicator
    nccl = dist.new_group(backend="nccl")
    found = []
    for rows in ROWS:
        calls = 100 if rows <= 256 else 20
        x = torch.randn(rows, HIDDEN, device=ranks.device).bfloat16()
        residual, weight = torch.randn_like(x), torch.ones(HIDDEN, device=ranks.device).bfloat16()

        def by_nccl(x: Tensor = x) -> Tensor:
            total = x.clone()
            dist.all_reduce(total, group=nccl)
            return total

        def with_norm(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> Tensor:
            """Twice: the slots are used in turns."""
            for name in ("experts", "attention"):
                _, total = norm._norm(target, x, weight, 1e-5, residual, partial_sums(target, name, len(x), HIDDEN))
            return total

        def norm_alone(x: Tensor = x, residual: Tensor = residual, weight: Tensor = weight) -> Tensor:
            return norm._norm(target, x, weight, 1e-5, residual, ALONE)[1]

        expected = by_nccl()
        right = torch.allclose(communicator.all_reduce(x).float(), expected.float(), atol=0.02, rtol=0.02)
        right &= torch.allclose(with_norm().float(), expected.float() + residual.float(), atol=0.04, rtol=0.02)
        row: dict[str, Any] = {"rows": rows, "bytes": x.nbytes, "right": right}

        def note(name: str, us: float, row: dict[str, Any] = row) -> None:
            row[name] = round(us, 2)

        note("push", in_graph(lambda x=x: communicator.all_reduce(x), calls, communicator.barrier))
        note("with norm", in_graph(with_norm, calls // 2, communicator.barrier) / 2)
        note("norm alone", in_graph(norm_alone, calls, communicator.barrier))
        reduced = x.clone()
        note("nccl", in_graph(lambda t=reduced: dist.all_reduce(t, group=nccl), calls, communicator.barrier))
        for name, op in _torch_kernels(ranks, x):
            note(name, in_graph(op, calls, communicator.barrier))
        found.append(row)
        if ranks.rank == 0:
            print(json.dumps(row), flush=True)
    failed = bool(communicator.failed.item())
    return [row | {"failed": failed, "ranks": ranks.num_ranks} for row in found]


def _torch_kernels(ranks: Ranks, x: Tensor) -> list[tuple[str, Callable[[], object]]]:
    import torch.distributed._symmetric_memory as symmetric

    shared = symmetric.empty(x.numel(), dtype=x.dtype, device=x.device)
    symmetric.rendezvous(shared, ranks.group)
    shared.copy_(x.view(-1))
    name, ops = ranks.group.group_name, torch.ops.symm_mem
    kernels = [("torch two shots", lambda: ops.two_shot_all_reduce_(shared, "sum", name))]
    if x.nbytes < 16 << 20:
        kernels.insert(0, ("torch one shot", lambda: ops.one_shot_all_reduce(shared, "sum", name)))
    return kernels


COLUMNS = ("push", "with norm", "norm alone", "nccl", "torch one shot", "torch two shots")


def report(rows: list[dict[str, Any]]) -> None:
    print("rows      KB " + " ".join(f"{name:>15}" for name in (*COLUMNS, "in the norm")))
    for row in rows:
        cells = [f"{row[name]:15.2f}" if name in row else f"{'':15}" for name in COLUMNS]
        cells.append(f"{row['with norm'] - row['norm alone']:15.2f}")
        wrong = "" if row["right"] else "  WRONG"
        print(f"{row['rows']:5} {row['bytes'] / 1024:7.1f} " + " ".join(cells) + wrong)
    if any(row["failed"] for row in rows):
        print("A POLL FAILED")


def write(rows: list[dict[str, Any]]) -> None:
    with RESULTS.open("a") as file:
        for row in rows:
            for name in COLUMNS:
                if name in row and name != "nccl":
                    line = {"ranks": row["ranks"], "bytes": row["bytes"], "kernel": name, "us": row[name]}
                    file.write(json.dumps(line | {"nccl_us": row["nccl"]}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs to use (default: %(default)s)")
    options = parser.parse_args()
    try:
        rows = run_ranks("benchmarks.kernels.communication", "measure", options.ranks, LIMIT)[0]
    except RanksError as error:
        print(error)
        raise SystemExit(1) from error
    report(rows)
    if all(row["right"] and not row["failed"] for row in rows):
        write(rows)


if __name__ == "__main__":
    main()
