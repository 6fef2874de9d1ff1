"""Runs a function of a module in one process per rank, each on its own GPU if there is one.

    results = run_ranks("benchmarks.kernels.communication", "measure", num_ranks=2, limit=55)

The function gets a Ranks, and returns what JSON can hold. All processes are killed at the limit, or when one fails.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oscine.extensions.parallel.comm.collectives import CollectiveCommunicator
from oscine.extensions.parallel.comm.symmetric import SymmetricCommunicator
from oscine.ops.target import Target

ENVIRONMENT = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "OMP_NUM_THREADS": "2"}
ENDING = 10  # seconds that other ranks have to end by themselves after one has failed


class RanksError(Exception):
    """Says what each rank printed."""


@dataclass(frozen=True)
class Ranks:
    """What one rank knows of all."""

    rank: int
    num_ranks: int
    device: torch.device
    group: dist.ProcessGroup  # of gloo

    def communicator(self, max_rows: int, hidden: int) -> SymmetricCommunicator:
        return SymmetricCommunicator(self.rank, self.num_ranks, self.device, self.group, max_rows, hidden)

    def collectives(self) -> CollectiveCommunicator:
        """Over NCCL between GPUs, over gloo on a CPU."""
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        return CollectiveCommunicator(self.group, dist.new_group(backend=backend))

    def target(self, max_rows: int, hidden: int) -> Target:
        return Target.of(self.device, self.communicator(max_rows, hidden))


def run_ranks(module: str, function: str, num_ranks: int = 2, limit: float = 120) -> list[Any]:
    """What each rank returned. Raises RanksError."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(num_ranks)]
        found = [Path(folder, f"{rank}.json") for rank in range(num_ranks)]
        ranks = []
        for rank, (log, result) in enumerate(zip(logs, found, strict=True)):
            arguments = [module, function, str(rank), str(num_ranks), str(store.port), str(result)]
            with log.open("w") as output:
                ranks.append(
                    subprocess.Popen(
                        [sys.executable, "-u", "-m", "benchmarks.kernels.ranks", *arguments],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=os.environ | ENVIRONMENT,
                    )
                )
        try:
            in_time = _wait(ranks, time.monotonic() + limit)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if not in_time or any(process.returncode for process in ranks):
            told = [
                f"--- rank {rank}: {ranks[rank].returncode}\n{log.read_text()[-6000:]}" for rank, log in enumerate(logs)
            ]
            raise RanksError("\n".join([f"{module}.{function}" + ("" if in_time else f": over {limit} s"), *told]))
        return [json.loads(result.read_text()) for result in found]


def _wait(ranks: list[subprocess.Popen[bytes]], deadline: float) -> bool:
    """Whether all end before the deadline, which comes closer when one fails."""
    failed = False
    while any(process.poll() is None for process in ranks):
        if not failed and any(process.poll() for process in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + ENDING)
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.05)
    return True


def _be_rank(module: str, function: str, rank: int, num_ranks: int, port: int, result: Path) -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    found = getattr(importlib.import_module(module), function)(Ranks(rank, num_ranks, device, group))
    result.write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    try:
        _be_rank(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6]), Path(sys.argv[6]))
    except BaseException:
        traceback.print_exc()
        sys.stdout.flush()
        os._exit(1)  # at once, whatever the GPU still does
    os._exit(0)
