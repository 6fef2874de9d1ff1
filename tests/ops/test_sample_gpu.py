"""Sampling in Triton against the reference: interpreted on a CPU, compiled ahead, and on a GPU.

Both round differently. So a different choice is not an error if the two tokens are within rounding of each other: of
equal value, or on either side of a cut between them.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import sampling_batch
from oscine.ops.interface import SamplingBatch
from oscine.ops.launch import arrivals
from oscine.ops.sample import reference, triton
from oscine.ops.target import Communicator
from tests.ops.bound import bound
from tests.ops.compile_ahead import compile_ahead, run_interpreted
from tests.ops.ranks import best_in_turn

CPU = torch.device("cpu")
ROWS = 8


def logits(kind: str, vocab: int, device: torch.device, rows: int = ROWS) -> Tensor:
    """Row 1 has forbidden tokens and row 2 a negative zero."""
    generator = torch.Generator().manual_seed(vocab)
    made = {
        "spread": lambda: torch.randn(rows, vocab, generator=generator) * 4,
        "few values": lambda: torch.randint(0, 5, (rows, vocab), generator=generator).float(),
        "all equal": lambda: torch.zeros(rows, vocab),
    }[kind]()
    made[1, : vocab // 2] = -torch.inf
    made[2, vocab // 3] = -0.0
    return made.to(device)


def batches(vocab: int, device: torch.device) -> dict[str, SamplingBatch]:
    """top_k below and above what the kernels collect; top_p from one token to nearly all; rows that are greedy."""

    def rows(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    temperature = rows(0, 0.3, 1, 2, 0, 1, 1e-3, 1)
    top_k = rows(0, 1, 5, 50, 33, 1025, vocab - 1, vocab + 1, dtype=torch.int64)
    top_p = rows(0.9, 0.5, 0.999, 0.1, 1, 0.95, 0.01, 0.7)
    min_p = rows(0.9, 0.5, 0.05, 0.1, 1, 0.01, 0, 0.3)
    changes: dict[str, dict[str, object]] = {
        "greedy": {"greedy": True, "temperature_N": torch.zeros(ROWS, device=device)},
        "noise": {"temperature_N": temperature},
        "top_k": {"truncated": True, "top_k_N": top_k},
        "top_p": {"truncated": True, "top_p_N": top_p},
        "min_p": {"truncated": True, "min_p_N": min_p},
        "all": {"truncated": True, "top_k_N": top_k, "top_p_N": top_p.flip(0), "min_p_N": min_p / 9}
        | {"temperature_N": temperature},
    }
    seeds = {"seed_N": torch.arange(ROWS, device=device) * (2**33 + 12345), "position_N": rows(*range(ROWS)).long() * 7}
    return {name: sampling_batch(ROWS, device, **seeds, **change) for name, change in changes.items()}


def check(logits_NV: Tensor, batch: SamplingBatch, why: str) -> None:
    cuts: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        find_cuts = triton._find_cuts
        patch.setattr(triton, "_find_cuts", lambda *given: cuts.append(find_cuts(*given)) or cuts[-1])
        got, expected = (sample(logits_NV, batch).token_ids_N for sample in (bound(triton.sample), reference.sample))
    assert got.dtype == torch.int64
    for row in (got != expected).nonzero().flatten().tolist():
        close = [
            reference.sample(logits_NV[row : row + 1], one).token_ids_N.item() == got[row].item()
            for one in nudged(batch, row)
        ]
        assert any(close), (why, row, got[row].item(), expected[row].item())
    if batch.truncated:
        check_kept(reference.restrict(logits_NV, batch), batch, *cuts, why)
    assert not arrivals(logits_NV.device).any()


def check_kept(logits_NV: Tensor, batch: SamplingBatch, cut_N: Tensor, why: str) -> None:
    """The sets of tokens that are left, but for one at each of two cuts, or as many as have the mass of a rounding."""
    scaled_NV = logits_NV / batch.temperature_N.masked_fill(batch.temperature_N == 0, 1)[:, None]
    expected_NV = reference._truncate(scaled_NV, batch) > -torch.inf
    bits_NV = (scaled_NV + 0.0).view(torch.int32)
    order_NV = (bits_NV ^ ((bits_NV >> 31) & 0x7FFFFFFF)).long()
    lower_V = 0x7FFFFFFF - torch.arange(logits_NV.shape[1], device=logits_NV.device)
    got_NV = (order_NV << 32 | lower_V) >= cut_N[:, None]
    differ_NV = (got_NV != expected_NV) & logits_NV.isfinite()
    mass_N = (scaled_NV.softmax(-1) * differ_NV).sum(-1)
    assert ((differ_NV.sum(-1) <= 2) | (mass_N < 1e-5)).all(), (why, differ_NV.sum(-1).tolist())


def check_restriction(logits_NV: Tensor, why: str) -> None:
    """Bitwise; rows that share a mask, rows without one, and words for more tokens than there are."""
    vocab, device = logits_NV.shape[1], logits_NV.device
    generator = torch.Generator().manual_seed(vocab)
    masks_KW = torch.randint(-(2**31), 2**31, (3, vocab // 32 + 2), generator=generator).to(torch.int32).to(device)
    row_N = torch.tensor([2, -1, 0, 0, 1, -1, 2, 1], dtype=torch.int32, device=device)
    for name in ("greedy", "all"):
        batch = replace(batches(vocab, device)[name], allowed_KW=masks_KW, allowed_row_N=row_N)
        got, expected = (restrict(logits_NV, batch) for restrict in (bound(triton.restrict), reference.restrict))
        assert torch.equal(got, expected), (why, vocab)
        assert (expected.isinf() & logits_NV.isfinite()).any(-1).tolist() == [i >= 0 for i in row_N.tolist()]
    check(logits_NV, batch, why)


def check_parts(logits_NV: Tensor, batch: SamplingBatch) -> None:
    """Bitwise: each of two ranks has half of the vocabulary. Nothing is left to zero in what a part writes."""
    from oscine.extensions.parallel.comm.ops import sample_across

    def choose(own: Communicator) -> Tensor:
        part_NV = logits_NV.chunk(2, 1)[own.rank]
        return sample_across(bound(triton.best), own)(part_NV, batch).token_ids_N

    assert torch.equal(best_in_turn(2, choose), bound(triton.choose)(logits_NV, batch))
    assert not arrivals(logits_NV.device).any()


def nudged(batch: SamplingBatch, row: int) -> list[SamplingBatch]:
    """The row alone, with its cuts and its temperature moved by a few roundings."""
    fields = ("temperature_N", "top_k_N", "top_p_N", "min_p_N", "seed_N", "position_N")
    alone = replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in fields})
    if batch.allowed_row_N is not None:
        alone = replace(alone, allowed_row_N=batch.allowed_row_N[row : row + 1])
    by = (1 - 3e-6, 1 + 3e-6)
    return [
        replace(alone, top_p_N=alone.top_p_N * p, min_p_N=alone.min_p_N * m, temperature_N=alone.temperature_N * t)
        for p in by
        for m in by
        for t in by
    ]


def in_interpreter() -> None:
    """With fewer and smaller parts, so that a small vocabulary takes every path in seconds."""
    for name, value in {"PARTS": 4, "LANES": 32, "MAX_RANK": 32, "CAPACITY": 64}.items():
        setattr(triton, name, type(triton.PARTS)(value))
    for kind, vocab, names in (
        ("spread", 200, ("greedy", "noise", "top_p", "all")),
        ("few values", 100, ("all",)),
        ("all equal", 50, ("top_k", "all")),
    ):
        for name in names:
            check(logits(kind, vocab, CPU), batches(vocab, CPU)[name], f"{kind}, {name}")
    spread = logits("spread", 150, CPU)
    spread[:, 9] = torch.nan
    spread[3], spread[4] = torch.nan, -torch.inf
    for name in ("greedy", "noise", "all"):
        ids = bound(triton.sample)(spread, batches(150, CPU)[name]).token_ids_N.tolist()
        assert ids[3:5] == [-1, -1]
        assert all(0 <= id < 150 and id != 9 for id in ids[:3] + ids[5:])
    for name in ("greedy", "noise"):
        check_parts(spread, batches(150, CPU)[name])
        check_parts(logits("few values", 2200, CPU), batches(2200, CPU)[name])  # several programs of a part
    for vocab in (31, 150):
        check_restriction(logits("spread", vocab, CPU), "interpreted")
    batch = replace(batches(150, CPU)["greedy"], num_logprobs=3)
    spread = logits("spread", 150, CPU)
    for got, expected in zip(bound(triton.sample)(spread, batch), reference.sample(spread, batch), strict=True):
        assert torch.equal(got, expected)
    assert bound(triton.sample)(spread[:0], sampling_batch(0, CPU)).token_ids_N.shape == (0,)


@pytest.mark.needs("parallel")
def test_kernels_on_a_cpu() -> None:
    run_interpreted(in_interpreter)


ROW = {"logits": "*fp32", "stride": "i32", "temperature": "*fp32", "vocab": "i32"}
FOUND = {"top": "*fp32", "bound": "*i32", "total": "*fp32", "keys": "*i64", "count": "*i32"}
CHOOSE = ROW | {"seed": "*i64", "position": "*i64", "ids": "*i64", "best_value": "*fp32", "best_id": "*i32"}
CHOOSE |= {"arrivals": "*i32", "part": "i32"}
BLOCKS = {"BLOCK_B": 2048, "BLOCK_S": 256}
SPLIT = BLOCKS | {"values": None, "first": None}
OF_PART = {"values": "*fp32", "first": "i32"}
KERNELS = {
    "greedy": (triton._choose_kernel, CHOOSE, {"cut": None, "NOISE": False} | SPLIT, 4),
    "noise": (triton._choose_kernel, CHOOSE, {"cut": None, "NOISE": True} | SPLIT, 4),
    "truncated": (triton._choose_kernel, CHOOSE | {"cut": "*i64"}, {"NOISE": True} | SPLIT, 4),
    "a part, with noise": (triton._choose_kernel, CHOOSE | OF_PART, {"cut": None, "NOISE": True} | BLOCKS, 4),
    "scan": (triton._scan_kernel, ROW | {"lanes": "*fp32", "part": "i32"}, {"BLOCK_B": 4096}, 4),
    "bound": (
        triton._bound_kernel,
        {"lanes": "*fp32", "top_k": "*i64", "top": "*fp32", "bound": "*i32", "count": "*i32"},
        {},
        4,
    ),
    "collect": (triton._collect_kernel, ROW | FOUND | {"part": "i32"}, {"BLOCK_B": 4096}, 4),
    "cut": (
        triton._cut_kernel,
        ROW | FOUND | {"top_k": "*i64", "top_p": "*fp32", "min_p": "*fp32", "cut": "*i64"},
        {"BLOCK_B": 4096},
        8,
    ),
    "restrict": (
        triton._restrict_kernel,
        {"logits": "*fp32", "allowed": "*i32", "allowed_row": "*i32", "restricted": "*fp32"}
        | {"vocab": "i32", "stride": "i32", "words": "i32"},
        {"BLOCK_B": triton.RESTRICTED},
        4,
    ),
}


@pytest.mark.compiles
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_share_a_hopper_gpu(name: str) -> None:
    kernel, signature, constants, warps = KERNELS[name]
    compiled = compile_ahead(
        kernel,
        signature,
        constants | {"PDL": True},
        divisible=tuple({"stride", "vocab"} & set(signature)),
        num_warps=warps,
        launch_pdl=True,
    )
    assert compiled.shared <= 48 * 1024


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50, 3001, 201088])
@pytest.mark.parametrize("kind", ["spread", "few values", "all equal"])
def test_choices_are_the_reference_s(kind: str, vocab: int) -> None:
    device = torch.device("cuda")
    for name, batch in batches(vocab, device).items():
        check(logits(kind, vocab, device), batch, name)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [50, 3001, 201088])
def test_restricted_rows_are_the_reference_s(vocab: int) -> None:
    check_restriction(logits("spread", vocab, torch.device("cuda")), "on a GPU")


@pytest.mark.gpu
def test_a_row_does_not_depend_on_its_batch() -> None:
    device = torch.device("cuda")
    rows = logits("spread", 201088, device)
    batch = batches(201088, device)["all"]
    together = bound(triton.sample)(rows, batch).token_ids_N
    for row in range(ROWS):
        fields = ("temperature_N", "top_k_N", "top_p_N", "min_p_N", "seed_N", "position_N")
        alone = replace(batch, **{name: getattr(batch, name)[row : row + 1] for name in fields})
        assert bound(triton.sample)(rows[row : row + 1], alone).token_ids_N.item() == together[row].item()


@pytest.mark.gpu
def test_a_graph_replays_on_new_inputs() -> None:
    device = torch.device("cuda")
    fixed, batch = logits("spread", 201088, device), batches(201088, device)["all"]
    bound(triton.sample)(fixed, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = bound(triton.sample)(fixed, batch).token_ids_N
    for _ in range(2):
        fixed.copy_(fixed.roll(1000, 1))
        graph.replay()
        assert torch.equal(ids, bound(triton.sample)(fixed, batch).token_ids_N)


@pytest.mark.gpu
def test_rows_may_be_apart() -> None:
    wide = logits("spread", 3001, torch.device("cuda"))
    batch = batches(2999, torch.device("cuda"))["all"]
    apart = bound(triton.sample)(wide[:, :2999], batch).token_ids_N
    assert torch.equal(apart, bound(triton.sample)(wide[:, :2999].contiguous(), batch).token_ids_N)
