"""The kernels that write and read keys and values in FP8: interpreted, compiled for GPUs that are not there, and on a
GPU.

Interpreted kernels write the same bytes as the reference, and read them as it does. The oracle of reads is the
reference in float32 over the same bytes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from oscine.kv_dtype import KVDtype
from oscine.kv_group import KVGroup
from oscine.ops.attention import hopper
from oscine.ops.attention import triton as kernels
from oscine.ops.interface import QkvProjection
from oscine.ops.kv.fp8 import elements_and_exponents
from oscine.ops.kv.reference import load
from oscine.ops.launch import arrivals
from oscine.ops.qkv import hopper as qkv_hopper
from oscine.ops.qkv import reference as qkv_reference
from oscine.ops.qkv import triton as qkv_portable
from oscine.ops.rope import reference as rope_reference
from oscine.ops.rope import triton as rope
from tests.ops.bound import bound
from tests.ops.cases import ATTENTION_CASES, AttentionCase, AttentionInputs, attention_inputs, in_fp8
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import Compiled, compile_ahead, marked, run_interpreted
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.test_attention_gpu import (
    CPU,
    CUDA,
    Attention,
    compile_decode,
    compile_decode_on_hopper,
    compile_prefill,
    each_kernel_and_case,
    in_plain_torch,
    rms,
    run,
    truth,
    with_and_without_decodes,
)
from tests.ops.test_fp8 import with_outliers
from tests.ops.test_linear_gpu import Projection, as_it_is, compile_qkv, packed, projection, relative_error

BYTE = 0xA5  # of pages before anything is written
FITTING, CLIPPING = 121, 118  # calibrated exponents for normal rows: the second one is too small for the largest
SATURATES = "F2FP.SATFINITE.E4M3"  # larger values become 448, and NaN stays


def written_by(
    op: Callable[..., Tensor], dtype: torch.dtype, exponents_2G: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Queries, and all bytes of the pages."""
    generator = torch.Generator().manual_seed(0)
    page_size, groups, queries, head_dim = 16, 2, 6, 32
    slots = torch.randperm(4 * page_size, generator=generator)[:37]
    qkv = torch.randn(len(slots), (queries + 2 * groups) * head_dim, generator=generator)
    qkv *= torch.randn(len(slots), 1, generator=generator).mul(8).exp2()
    qkv[5], qkv[6, 200] = 0, torch.nan
    angles = torch.rand(50, head_dim // 2, generator=generator) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    pool = torch.full(
        (4, *KVGroup(None, (0, 1), groups, page_size, head_dim, KVDtype.FP8).page_shape), BYTE, dtype=torch.uint8
    )
    q = op(qkv.to(dtype), cos_sin, torch.arange(len(slots)), pool[:, 1], slots, exponents_2G)
    return q, pool


def interpret_writes() -> None:
    calibrated = torch.tensor([[118, 121], [127, 110]], dtype=torch.uint8)  # many rows are larger, or far smaller
    for dtype, exponents in ((torch.float32, None), (torch.bfloat16, None), (torch.float32, calibrated)):
        (q, pool), (expected_q, expected_pool) = (
            written_by(op, dtype, exponents) for op in (bound(rope.rope_and_write), rope_reference.rope_and_write)
        )
        rtol = 1e-6 if dtype == torch.float32 else 2**-7  # the interpreter cuts off where a GPU rounds to bfloat16
        torch.testing.assert_close(q, expected_q, rtol=rtol, atol=1e-6, equal_nan=True)
        assert torch.equal(pool, expected_pool)


def interpret_reads() -> None:
    for case in ATTENTION_CASES[1::2]:
        inputs = in_fp8(with_outliers(attention_inputs(case, CPU, torch.float32)))
        torch.testing.assert_close(run(inputs, case), truth(inputs, case), rtol=1e-5, atol=2e-6)
        assert not arrivals(CPU).any()


def interpret_both() -> None:
    interpret_writes()
    interpret_reads()


def test_interpreted_kernels_write_and_read_what_the_reference_does() -> None:
    run_interpreted(interpret_both)


@pytest.mark.compiles
@pytest.mark.parametrize(("num_decodes", "programs"), [pytest.param(1, 3, marks=pytest.mark.slow), (32, 3), (64, 5)])
def test_decode_kernels_share_the_registers(num_decodes: int, programs: int) -> None:
    tiling = kernels.decode_tiling(num_decodes, 8, 8, None)
    compiled = compile_decode(tiling, 0, "*u8")
    assert programs * compiled.registers * tiling["num_warps"] * 32 <= 65536  # one decode has two programs an SM
    assert "E4M3" in compiled.sass, "a conversion that the chip has"
    assert "F2F.BF16" not in compiled.sass, "a slow one"
    assert compiled.ttgir.count("ttg.async_copy_global_to_local") >= 2 * tiling["STAGES"]


@pytest.mark.compiles
def test_decode_on_hopper_multiplies_what_tma_brings() -> None:
    compiled = compile_decode_on_hopper(hopper.decode_tiling(CHIPS[90], 8, None), 0, fp8=True)
    assert compiled.registers <= 168
    assert "HGMMA" in compiled.sass
    assert "UTMALDG" in compiled.sass
    assert "F2F.BF16" not in compiled.sass
    assert 2 * compiled.shared <= 227 * 1024  # two programs an SM


@pytest.mark.compiles
def test_prefill_kernels_multiply_by_warp_groups() -> None:
    compiled = compile_prefill(kernels.prefill_tiling(CHIPS[90], 8, fp8=True), 0, "*u8")
    assert "HGMMA" in compiled.sass
    assert "E4M3" in compiled.sass


@pytest.mark.compiles
@pytest.mark.parametrize("arch", marked((89, 90, 100, 120), newest=[], oldest=[89]))
def test_kernels_fit_other_chips(arch: int) -> None:
    compile_decode(kernels.decode_tiling(64, 8, 8, None), 0, "*u8", arch)
    compile_prefill(kernels.prefill_tiling(CHIPS[arch], 8, fp8=True), 0, "*u8", arch)
    compile_rope(arch)


@cache
def compile_rope(arch: int, *, calibrated: bool = False) -> Compiled:
    types = {"qkv_ptr": "*bf16", "cos_sin_ptr": "*fp32", "q_ptr": "*bf16", "kv_ptr": "*u8", "num_tokens": "i32"}
    types |= dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64")
    types |= dict.fromkeys(("kv_page_stride", "kv_kind_stride", "kv_head_stride", "kv_slot_stride"), "i32")
    sizes = {"QUERY_HEADS": 64, "KV_HEADS": 8, "HALF": 32, "PAGE": 64, "TOKENS": 16, "HEADS": 8, "PDL": arch >= 90}
    types |= {"exponents_ptr": "*u8"} if calibrated else {}
    sizes |= {} if calibrated else {"exponents_ptr": None}  # type: ignore[dict-item]
    compiled = compile_ahead(rope.rope_and_write_kernel, types, sizes, arch=arch, num_warps=4)
    assert SATURATES in compiled.sass
    return compiled


@pytest.mark.compiles
def test_calibrated_exponents_spare_the_search_for_the_largest() -> None:
    assert compile_rope(90, calibrated=True).sass.count("SHFL") < compile_rope(90).sass.count("SHFL")


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("num_tokens", "parts"), marked([(1, 4), (3, 2), (9, 1)], newest=[(3, 2)], oldest=[(1, 4), (9, 1)])
)
def test_heads_have_several_programs_on_hopper_with_calibrated_exponents(num_tokens: int, parts: int) -> None:
    pages, exponents = torch.empty(1, 2, 8, 65, 64, dtype=torch.uint8), torch.empty(2, 8, dtype=torch.uint8)
    weight = torch.empty(80 * 64, 2880, dtype=torch.bfloat16)
    tile = qkv_hopper.choose_tile(num_tokens, weight, pages, exponents)
    assert tile == qkv_hopper.choose_tile(num_tokens, weight, pages.bfloat16())
    assert tile is not None
    assert tile.parts == parts
    compiled = compile_qkv(tile, "*u8", exponents="*u8")
    assert SATURATES in compiled.sass
    assert "HGMMA" in compiled.sass


@pytest.mark.compiles
@pytest.mark.variant
def test_weights_of_12_bits_have_calibrated_exponents_too() -> None:
    narrow = compile_qkv(qkv_hopper.BF12_TILES[0], "*u8", narrow=True, exponents="*u8")
    assert SATURATES in narrow.sass


@pytest.mark.compiles
@pytest.mark.variant
def test_heads_have_one_program_on_hopper() -> None:
    pages = torch.empty(1, 2, 8, 65, 64, dtype=torch.uint8)
    for rows in (80 * 64, qkv_hopper.FEW_HEADS * 64):
        weight = torch.empty(rows, 2880, dtype=torch.bfloat16)
        for num_tokens in (1, 9, 17, 64):
            tile = qkv_hopper.choose_tile(num_tokens, weight, pages)
            assert tile is not None
            assert (tile.parts, tile.max_tokens >= num_tokens) == (1, True)
            compile_qkv(tile, "*u8")


def check_norm_qkv(
    op: Callable[..., tuple[Tensor, Tensor]],
    case: Projection,
    prepare: Callable[[Tensor], Any] = as_it_is,
    exponent: int | None = None,
) -> None:
    """Against keys and values computed in float32, at most a twentieth worse than those rounded to FP8.

    `exponent`: a calibrated one of the first head's keys. Heads and kinds have different ones.
    """
    *sizes, page, head_dim = case.pool.shape[1:]
    shape = KVGroup(None, (0, 1, 2), sizes[-1], page, head_dim, KVDtype.FP8).page_shape
    stored = []
    for run_op, dtype, made in ((op, torch.bfloat16, prepare), (qkv_reference.norm_qkv, torch.float32, as_it_is)):
        pool = torch.full((len(case.pool), *shape), BYTE, dtype=torch.uint8, device=case.pool.device)
        norm, residual, weight, bias = (
            t.to(dtype) for t in (case.norm_H, case.residual_TH, case.weight_FH, case.bias_F)
        )
        place = case.cos_sin, case.positions_T, pool[:, 1], case.slots_T
        exponents_2G = None
        if exponent is not None:
            exponents_2G = (exponent + torch.arange(2 * sizes[-1], device=pool.device) % 3).to(torch.uint8).view(2, -1)
        run_op(case.x_TJH, norm, 1e-5, residual, QkvProjection(made(weight), bias, *place, exponents_2G))
        assert (pool[:, ::2] == BYTE).all()
        assert int((pool != BYTE).sum()) <= len(case.slots_T) * 2 * sizes[-1] * (head_dim + 1)
        pages = load(pool[:, 1], torch.arange(len(pool), device=pool.device))
        stored.append(pages[case.slots_T // page, :, :, case.slots_T % page])
        if exponents_2G is not None:
            written = elements_and_exponents(pool[:, 1])[1][case.slots_T // page, :, :, case.slots_T % page]
            assert (written == exponents_2G).all()
    _, _, exact = case.run(qkv_reference.norm_qkv, torch.float32)
    expected = exact[:, 1][case.slots_T // page, :, :, case.slots_T % page]
    if exponent == CLIPPING:
        assert relative_error(stored[0], stored[1]) < 0.05
        assert (stored[0].abs() == 448 * 2.0 ** (exponent - 127)).any()
        return
    found, best = (relative_error(pages, expected) for pages in stored)
    assert found <= 1.05 * best


def interpret_projections() -> None:
    for num_tokens in (1, 9, 33):
        case = projection(num_tokens, "cpu", hidden=576, query_heads=2, kv_heads=1, page=16)
        check_norm_qkv(bound(qkv_hopper.norm_qkv), case)
    for num_tokens in (3, 9, 17):  # weights in 12 bits, with one program of a head
        case = projection(num_tokens, "cpu", hidden=192, query_heads=2, kv_heads=1, page=16)
        check_norm_qkv(bound(qkv_hopper.norm_qkv), case, packed)
    for num_tokens, exponent in ((1, FITTING), (3, CLIPPING)):  # several programs of a head
        case = projection(num_tokens, "cpu", hidden=448, query_heads=2, kv_heads=1, page=16)
        for prepare in (as_it_is, packed):
            check_norm_qkv(bound(qkv_hopper.norm_qkv), case, prepare, exponent)


@pytest.mark.hopper
@pytest.mark.parametrize("exponent", [FITTING, CLIPPING])
@pytest.mark.parametrize("prepare", [as_it_is, packed])
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 17, 33, 65])
def test_norm_qkv_with_calibrated_exponents_on_gpu(
    num_tokens: int, prepare: Callable[[Tensor], Any], exponent: int
) -> None:
    check_norm_qkv(bound(qkv_hopper.norm_qkv), projection(num_tokens, "cuda"), prepare, exponent)


@pytest.mark.hopper
@pytest.mark.parametrize("num_tokens", [1, 3, 9, 17, 33])
def test_norm_qkv_of_12_bits_on_gpu(num_tokens: int) -> None:
    check_norm_qkv(bound(qkv_hopper.norm_qkv), projection(num_tokens, "cuda"), packed)


@pytest.mark.parametrize(
    "op",
    [
        pytest.param(bound(qkv_portable.norm_qkv), marks=pytest.mark.gpu, id="triton"),
        pytest.param(bound(qkv_hopper.norm_qkv), marks=pytest.mark.hopper, id="hopper"),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 17, 64, 65, 777])
@pytest.mark.parametrize("heads", [{}, {"query_heads": 32, "kv_heads": 4}], ids=str)
def test_norm_qkv_on_gpu(op: Callable[..., tuple[Tensor, Tensor]], heads: dict[str, int], num_tokens: int) -> None:
    check_norm_qkv(op, projection(num_tokens, "cuda", **heads))


def check_reads(attention: Attention, case: AttentionCase, variants: list[AttentionInputs]) -> None:
    """The error is at most twice that of plain torch over the same values in bfloat16, which has them exactly."""
    inputs = variants[0]
    expected, device = truth(inputs, case), inputs.q_TQD.device
    values = load(inputs.kv_pages, torch.arange(len(inputs.kv_pages), device=device)).bfloat16()
    allowed = 2 * rms(in_plain_torch(replace(inputs, kv_pages=values), case) - expected)
    for variant in variants:
        assert rms(run(variant, case, attention) - expected) <= allowed
    assert not arrivals(device).any()


@each_kernel_and_case
def test_attention_on_gpu(attention: Attention, case: AttentionCase) -> None:
    check_reads(attention, case, with_and_without_decodes(in_fp8(attention_inputs(case, CUDA, torch.bfloat16))))


def interpret_decodes_on_hopper() -> None:
    for sequences in (
        ((1, 1), (1, 63), (1, 64), (1, 65)),
        ((1, 2000), (1, 2), (1, 700)),  # several programs share a context, and some have none
        ((1, 3700), *((1, 1 + i * 153 % 700) for i in range(11))),  # more pages of a program than it has stages
    ):
        case = AttentionCase("", sequences, num_query_heads=16, num_kv_heads=2)
        check_reads(bound(hopper.attention), case, [in_fp8(with_outliers(attention_inputs(case, CPU, torch.bfloat16)))])


def interpret_both_on_hopper() -> None:
    interpret_projections()
    interpret_decodes_on_hopper()


def test_interpreted_kernels_of_hopper() -> None:
    run_gluon(interpret_both_on_hopper)
