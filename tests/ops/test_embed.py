"""The embedding of parts of the vocabulary adds up to that of all of it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oscine.ops.comm.sums import ALONE
from oscine.ops.embed import reference, triton
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Communicator
from tests.ops.bound import CPU_TARGET, bound
from tests.ops.compile_ahead import compile_ahead, run_interpreted
from tests.ops.ranks import on_every_rank

CPU = torch.device("cpu")


def check_parts(embed_part: Callable[..., Tensor], device: torch.device, dtype: torch.dtype, hidden: int) -> None:
    """Bitwise; tokens at the ends of parts, a token of no part, a part's row of NaN, which nothing else may read."""
    weight_VH = torch.randn(40, hidden, device=device).to(dtype)
    weight_VH[[0, 9, 10, 29, 39]] = torch.nan
    token_ids_T = torch.tensor([1, 8, 11, 19, 20, 28, 30, 38, 1, 9, -1, 40], device=device)
    for first in range(0, 40, 10):
        x_TH = embed_part(token_ids_T, weight_VH[first : first + 10], first)
        assert x_TH.dtype == dtype
        for token, x_H in zip(token_ids_T.tolist(), x_TH, strict=True):
            expected_H = weight_VH[token] if token in range(first, first + 10) else torch.zeros_like(x_H)
            assert torch.equal(x_H.nan_to_num(7), expected_H.nan_to_num(7)), (first, token)
    assert embed_part(token_ids_T[:0], weight_VH[:10], 0).shape == (0, hidden)


def in_interpreter() -> None:
    check_parts(bound(triton.embed_part), CPU, torch.float32, 48)


def test_parts_by_torch() -> None:
    check_parts(reference.embed_part, CPU, torch.bfloat16, 24)


def test_parts_by_the_kernel() -> None:
    run_interpreted(in_interpreter)


@pytest.mark.gpu
def test_parts_on_a_gpu() -> None:
    check_parts(bound(triton.embed_part), torch.device("cuda"), torch.bfloat16, 2880)


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [80, 90, 120])
def test_the_kernel_fits(arch: int) -> None:
    pointers = {"token_ids": "*i64", "weight": "*bf16", "x": "*bf16", "first": "i32", "vocab": "i32"}
    constants = ALONE | {"H": 2880, "BLOCK_H": 4096, "PDL": arch >= 90}
    options = {"launch_pdl": True} if arch >= 90 else {}
    compiled = compile_ahead(triton.embed_part_kernel, pointers, constants, arch=arch, num_warps=16, **options)
    assert compiled.registers <= 64


@pytest.mark.needs("parallel")
@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_ranks_embed_as_one(num_ranks: int) -> None:
    weight_VH, token_ids_T = torch.randn(64, 16), torch.randint(0, 64, (50,))

    def embed_on(own: Communicator) -> Tensor:
        ops = resolve(replace(CPU_TARGET, communicator=own), choose("cpu"))
        return ops.embed(token_ids_T, weight_VH.chunk(num_ranks)[own.rank])

    assert all(torch.equal(x_TH, weight_VH[token_ids_T]) for x_TH in on_every_rank(num_ranks, embed_on))
