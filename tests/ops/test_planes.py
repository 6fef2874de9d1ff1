"""FP8 planes of activations: interpreted on a CPU, compiled ahead, and on a GPU; those of norms: test_norm_gpu.py."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from oscine.ops import planes
from oscine.ops.moe.fp8 import round_rows
from tests.ops.bound import CPU_TARGET, bound
from tests.ops.compile_ahead import TO_E4M3, compile_ahead, run_interpreted

CPU = torch.device("cpu")
TYPES = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
CASES = [(2, 32), (2, 288), (2, 2880), (1, 64), (1, 320), (1, 2880)]  # planes, columns
POINTERS = {"values": "*fp8e4nv", "scale": "*fp32"}  # to planes


def merge(split: planes.Planes) -> Tensor:
    """float32 [T, H] of the planes: the definition, column by column."""
    columns = range(split.values_TPH.shape[-1])
    if split.number == 1:
        place_H = torch.tensor([i & ~60 | (i & 12) << 2 | (i & 48) >> 2 for i in columns])
        return split.values_TPH.float()[:, 0, place_H.to(split.scale_T.device)] * split.scale_T[:, None]
    place_H = torch.tensor([i & ~15 | (i & 7) << 1 | i >> 3 & 1 for i in columns])
    high_TH, low_TH = split.values_TPH.float()[..., place_H.to(split.scale_T.device)].unbind(1)
    return (high_TH + low_TH / 16) * split.scale_T[:, None]


def check_planes(split: planes.Planes, x_TH: Tensor) -> None:
    """Two: everything is within 2^-21 of the largest of its row, and what is above 2^-13 of it exact.

    One: what the reference of FP8 activations rounds to.
    """
    assert split.values_TPH.dtype == torch.float8_e4m3fn
    assert split.values_TPH.is_contiguous()
    assert x_TH.dtype == torch.bfloat16
    wide_TH, merged_TH = x_TH.float(), merge(split)
    largest_T1 = wide_TH.abs().amax(-1, keepdim=True)
    if split.number == 1:
        assert torch.equal(merged_TH, round_rows(wide_TH))
        assert ((merged_TH - wide_TH).abs() <= torch.maximum(wide_TH.abs() / 16, 2**-17 * largest_T1)).all()
    else:
        large_TH = wide_TH.abs() >= 2**-13 * largest_T1
        assert torch.equal(merged_TH[large_TH], wide_TH[large_TH])
        assert ((merged_TH - wide_TH).abs() <= 2**-21 * largest_T1).all()
    assert (split.scale_T.view(torch.int32) & 0x7FFFFF == 0).all()  # powers of two
    live_T = largest_T1[:, 0] > 0
    exponents_T = torch.frexp(largest_T1[:, 0]).exponent - torch.frexp(split.scale_T).exponent
    assert (exponents_T[live_T] == 7).all()


def rows(hidden: int, device: torch.device) -> Tensor:
    """Normal, of all magnitudes, every bfloat16 between 1 and 2, zeros, one outlier, tiny, huge."""
    generator = torch.Generator().manual_seed(0)
    x_TH = torch.randn((8, hidden), generator=generator)
    x_TH[1] *= torch.exp2(torch.rand(hidden, generator=generator) * -30)
    x_TH[2] = 1 + torch.arange(hidden) % 128 / 128
    x_TH[3] = 0
    x_TH[4] = 1e-3
    x_TH[4, 17] = -3e4
    x_TH[5] *= 1e-30
    x_TH[6] *= 1e37
    x_TH[7] = 0
    x_TH[7, -1] = 2.0**-100
    return x_TH.bfloat16().to(device)


def round_as_torch() -> None:
    """In a process of run_interpreted: conversions of floats."""
    interpreter._convert_float = _convert


def _convert(data: Any, source: Any, target: Any, _: object) -> Any:
    """Triton's own does not round to even, and loses the carry of a rounding into the exponent."""
    converted = torch.frombuffer(bytearray(data.tobytes()), dtype=TYPES[source]).to(TYPES[target])
    unsigned = np.dtype(f"uint{target.primitive_bitwidth}")
    return converted.view(torch.uint8).numpy().view(unsigned).reshape(data.shape)


def in_interpreter() -> None:
    round_as_torch()
    for count, hidden in CASES:
        check_planes(bound(planes.split)(rows(hidden, CPU), count), rows(hidden, CPU))
    nothing = bound(planes.split)(rows(32, CPU)[:0], 2)
    assert nothing.values_TPH.shape == (0, 2, 32)
    check_range_and_nan(CPU, 1)
    check_range_and_nan(CPU, 2)


def check_range_and_nan(device: torch.device, count: int) -> None:
    """Subnormal rows keep a scale that can be multiplied with; a NaN or an infinity stays in its row."""
    x_TH = torch.ones((5, 64), dtype=torch.bfloat16, device=device)
    x_TH[0] = 2.0**-130
    x_TH[1, 3] = torch.nan
    x_TH[2, 40] = torch.inf
    x_TH[3] = torch.finfo(torch.bfloat16).max / (3 - count)  # one plane rounds the largest to infinity
    split = bound(planes.split)(x_TH, count)
    assert split.scale_T.isfinite().all()
    assert (split.scale_T >= torch.finfo(torch.float32).tiny).all()
    check_planes(planes.Planes(*(tensor[3:] for tensor in split)), x_TH[3:])
    assert (merge(split)[0] - x_TH[0].float()).abs().max() <= 2.0**-134


def test_kernels_on_a_cpu() -> None:
    run_interpreted(in_interpreter)


def test_planes_are_wanted_where_experts_have_few_tokens() -> None:
    assert planes.wanted(CPU_TARGET, 128, 4, 128) == 2
    assert planes.wanted(CPU_TARGET, 129, 4, 128) == 0
    assert planes.wanted(CPU_TARGET, 16, 4, 1) == 2
    assert planes.wanted(CPU_TARGET, 17, 4, 1) == 0
    assert planes.wanted(replace(CPU_TARGET, activation_dtype="fp8"), 8192, 4, 128) == 1


@pytest.mark.compiles
@pytest.mark.parametrize("count", [1, 2])
def test_the_kernel_compiles_without_spills_and_stores_words(count: int) -> None:
    kernel = compile_ahead(
        planes._split_kernel,
        {"x": "*bf16"} | POINTERS,
        {"H": 2880, "BLOCK_H": 4096, "PLANES": count, "PDL": True},
        launch_pdl=True,
        num_warps=16,
    )
    assert kernel.spills == 0
    assert kernel.sass.count("STG.E.64") == count
    assert kernel.unpacked_after == (TO_E4M3 if count == 2 else set())


@pytest.mark.hopper
@pytest.mark.parametrize(("count", "hidden"), CASES)
def test_split_on_a_gpu(count: int, hidden: int) -> None:
    device = torch.device("cuda")
    check_planes(bound(planes.split)(rows(hidden, device), count), rows(hidden, device))
    check_range_and_nan(device, count)
