"""What each rank does in test_collectives.py: over NCCL between GPUs, over gloo on a CPU."""

import os
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.ranks import Ranks
from oscine.checkpoint.hub import NANO_FOLDER
from oscine.engine.core.loop import EngineLoop
from oscine.executor.start.load import load_executor
from oscine.executor.start.stopwatch import Stopwatch
from oscine.extensions.parallel.comm import collectives
from oscine.extensions.parallel.comm.ops import across
from oscine.extensions.parallel.start.communicator import reach_each_other
from oscine.ops.norm import reference
from oscine.ops.target import Communicator
from oscine.settings.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions
from oscine.types import GenerationRequest, SamplingParams

OPTIONS = EngineOptions(
    model=ModelOptions(str(NANO_FOLDER), device="cpu", max_model_len=1024),
    cache=CacheOptions(kv_cache_bytes=32 << 20),
    scheduler=SchedulerOptions(max_num_seqs=4, max_num_batched_tokens=64, overlap=False),
    num_threads=1,
    quiet=True,
)
PROMPT = [*range(300, 400)]
REPLAYS = 200


def parts(ranks: Ranks, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """What each rank has; every rank knows all."""
    drawn = (torch.randn(shape, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks.num_ranks))
    return [(8 * part).to(dtype).to(ranks.device) for part in drawn]


def messages(ranks: Ranks) -> list[str]:
    """What is wrong with single messages."""
    collectives._GATHERED = 1 << 12  # so that there are several pieces
    own, rank, wrong = ranks.collectives(), ranks.rank, []

    def check(name: str, found: Tensor, expected: Tensor) -> None:
        if found.shape != expected.shape or not torch.equal(found.nan_to_num(), expected.nan_to_num()):
            wrong.append(f"{name}: {found.flatten()[:4].tolist()} is not {expected.flatten()[:4].tolist()}")

    for dtype in (torch.float32, torch.bfloat16):
        for shape in ((1, 2880), (7, 33), (129, 64)):
            tensors = parts(ranks, shape, dtype)
            before = tensors[rank].clone()
            check(f"sum of {shape} {dtype}", own.all_reduce(tensors[rank]), sum(t.float() for t in tensors).to(dtype))
            check("what was given", tensors[rank], before)
    for shape in ((0, 5), (3,), (1, 7), (5, 33), (64, 1000), (2, 3, 4)):
        for dtype in (torch.float32, torch.int64):
            tensors = parts(ranks, shape, dtype)
            check(f"parts of {shape} {dtype}", own.all_gather(tensors[rank]), torch.cat(tensors, -1))
            check("on the host", own.all_gather(tensors[rank].cpu()), torch.cat(tensors, -1).cpu())
    turned = [tensor.T for tensor in parts(ranks, (6, 4), torch.float32)]
    check("not contiguous", own.all_gather(turned[rank]), torch.cat(turned, -1))
    nan, low = torch.nan, -torch.inf
    values_RN = torch.tensor([[1.0, 3.0, nan, low, 2.0], [2.0, 3.0, 1.0, low, nan]], device=ranks.device)
    ids_RN = torch.arange(10, device=ranks.device).view(2, 5)
    best = own.best(values_RN[rank], ids_RN[rank])
    check("the best", best, torch.tensor([5, 1, 7, -1, 4], device=ranks.device))
    own.barrier()
    return [*wrong, *_norms(ranks, own), *_in_a_graph(ranks, own)]


def _norms(ranks: Ranks, own: Communicator) -> list[str]:
    """A norm of partial sums adds them up over ranks: one row of each token, however many partial sums it has."""
    sent: list[tuple[int, ...]] = []

    class Counting:
        rank, num_ranks = own.rank, own.num_ranks

        def all_reduce(self, partial: Tensor) -> Tensor:
            sent.append(tuple(partial.shape))
            return own.all_reduce(partial)

    ops: dict[str, Any] = dict.fromkeys(("embed_part", "lm_head", "best_of_few", "norm_qkv", "norm_route"))
    norm = across(ops | {"rms_norm": reference.rms_norm}, Counting())["rms_norm"]  # type: ignore[arg-type]
    weight_H = torch.ones(64, device=ranks.device)
    for shape in ((5, 64), (5, 3, 64)):
        tensors = parts(ranks, shape, torch.float32)
        total_TH = sum(t if t.dim() == 2 else t.sum(1) for t in tensors)
        residual_TH = torch.ones(5, 64, device=ranks.device)
        y_TH, x_TH = norm(tensors[ranks.rank], weight_H, 1e-5, residual_TH)
        expected = reference.rms_norm(total_TH, weight_H, 1e-5, residual_TH)
        if not torch.allclose(y_TH, expected[0], atol=1e-5) or not torch.allclose(x_TH, expected[1], atol=1e-5):
            return [f"the norm of {shape}"]
    return [] if sent == [(5, 64)] * 2 else [f"messages of {sent}"]


def _in_a_graph(ranks: Ranks, own: Communicator) -> list[str]:
    """A step of messages that is captured once and replayed, between eager ones."""
    if ranks.device.type == "cpu":
        return []
    x_TH = torch.zeros(8, 2880, dtype=torch.bfloat16, device=ranks.device)
    values_N, ids_N = (torch.zeros(8, dtype=dtype, device=ranks.device) for dtype in (torch.float32, torch.int64))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total_TH = own.all_reduce(own.all_reduce(x_TH))
        best_N = own.best(values_N, ids_N)
    wrong = []
    for i in range(REPLAYS):
        x_TH.fill_(i % 7 + ranks.rank)
        values_N.fill_(float(ranks.rank == i % 2))
        ids_N.fill_(10 * ranks.rank + i)
        graph.replay()
        eager = own.all_reduce(x_TH)
        expected = 2 * (2 * (i % 7) + 1)
        if not ((total_TH == expected).all() and (2 * eager == expected).all() and (best_N == 10 * (i % 2) + i).all()):
            wrong.append(f"replay {i}: {total_TH[0, 0]}, {eager[0, 0]}, {best_N[0]}")
    return wrong


def answer(communicator: Communicator) -> list[int]:
    """What the embedded model says on a CPU."""
    executor = load_executor(OPTIONS, lambda text: None, Stopwatch(), lambda opened: communicator).executor
    memory, groups = executor.memory.slots, executor.memory.groups
    engine = EngineLoop(executor, OPTIONS, groups=groups, memory=memory, max_model_len=1024)
    engine.add(GenerationRequest("a", PROMPT, SamplingParams(max_tokens=16, temperature=0.0)))
    found: list[int] = []
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
    return found


def access(ranks: Ranks) -> list[bool]:
    """What the ranks agree on where all GPUs, one of them, or none can reach the other, and where that is hidden."""
    found, device = [], torch.device("cuda", ranks.rank)
    os.environ.pop("OSCINE_NO_PEER_ACCESS", None)
    for reaching in ((0, 1), (0,), ()):
        torch.cuda.can_device_access_peer = lambda own, other, who=reaching: own in who and own != other
        found.append(reach_each_other(device, ranks.group))
    torch.cuda.can_device_access_peer = lambda own, other: True
    os.environ["OSCINE_NO_PEER_ACCESS"] = str(ranks.rank)  # on one of them
    return [*found, reach_each_other(device, ranks.group)]


def on_a_cpu(ranks: Ranks) -> dict[str, Any]:
    return {"wrong": messages(ranks), "tokens": answer(ranks.collectives()), "access": access(ranks)}
