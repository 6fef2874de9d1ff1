"""The attention kernels: compiled for sm_90a and sm_80 without a GPU, interpreted on a CPU, and on a GPU.

On a GPU the oracle is the reference in float32 over the same bfloat16 inputs. The yardstick of the error is plain torch
in bfloat16. Outputs start as NaN.
"""

import dataclasses
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from oscine.ops.attention import hopper, hopper_decode, hopper_prefill, reference
from oscine.ops.attention import triton as kernels
from oscine.ops.attention.decode import decode_kernel
from oscine.ops.attention.prefill import prefill_kernel
from oscine.ops.interface import UnrotatedQueries
from oscine.ops.launch import arrivals
from tests.ops.bound import CPU_TARGET, bound
from tests.ops.cases import ATTENTION_CASES, AttentionCase, AttentionInputs, attention_inputs
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import (
    Compiled,
    box_type,
    byte_box_type,
    compile_ahead,
    marked,
    run_interpreted,
    word_box_type,
)
from tests.ops.gluon_interpreter import run_gluon

Attention = Callable[..., Tensor]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SIGNATURE = {
    "out_ptr": "*bf16",
    "q_ptr": "*bf16",
    "q_stride": "i32",
    "cos_sin_ptr": "*fp32",
    "positions_ptr": "*i64",
    "kv_ptr": "*bf16",
    "table_ptr": "*i32",
    "lens_ptr": "*i32",
    "counts_ptr": "*i32",
    "sinks_ptr": "*bf16",
    "table_stride": "i32",
    "stride_page": "i64",
    "stride_kv": "i32",
    "stride_head": "i32",
    "scale": "fp32",
}
DIVISIBLE = ("q_stride", "stride_page", "stride_kv", "stride_head")
GPT_OSS = {"KV_HEADS": 8, "REPEATS": 8, "HEAD_DIM": 64, "PAGE": 64}


def compile_decode(tiling: dict[str, int], window: int, pages: str = "*bf16", arch: int = 90) -> Compiled:
    signature = SIGNATURE | {"kv_ptr": pages} | {"partial_ptr": "*fp32", "stats_ptr": "*fp32", "arrivals_ptr": "*i32"}
    signature |= {"num_sequences": "i32"}
    return compile_tiled(decode_kernel, signature, tiling, window, arch)


def compile_prefill(tiling: dict[str, int], window: int, pages: str = "*bf16", arch: int = 90) -> Compiled:
    lengths = dict.fromkeys(("first_sequence", "num_sequences", "num_tokens", "num_tiles"), "i32")
    signature = SIGNATURE | {"kv_ptr": pages, "starts_ptr": "*i32"} | lengths
    return compile_tiled(prefill_kernel, signature, tiling, window, arch)


def compile_tiled(kernel: Any, signature: dict[str, str], tiling: dict[str, int], window: int, arch: int) -> Compiled:
    options = {name: tiling[name] for name in ("num_warps", "maxnreg") if name in tiling}
    constants = GPT_OSS | {name: value for name, value in tiling.items() if name not in options}
    constants |= {"WINDOW": window, "PDL": arch >= 90}
    return compile_ahead(kernel, signature, constants, arch=arch, divisible=DIVISIBLE, **options)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("window", "num_decodes", "exact"),
    marked(
        ((window, *one) for window in (None, 128) for one in ((1, True), (32, False), (64, True), (512, False))),
        newest=[(None, 1, True)],
        oldest=[(128, 64, True), (None, 512, False)],
    ),
)
def test_decode_kernels_share_the_registers(window: int | None, num_decodes: int, exact: bool) -> None:
    tiling = kernels.decode_tiling(num_decodes, 8, 8, window, exact=exact)
    compiled = compile_decode(tiling, window or 0)
    assert 4 * compiled.registers * tiling["num_warps"] * 32 <= 65536  # four programs an SM hide each other's latencies
    assert "HMMA" in compiled.sass


@pytest.mark.compiles
@pytest.mark.parametrize("window", marked((None, 128), newest=[None], oldest=[128]))
def test_prefill_kernels_multiply_by_warp_groups(window: int | None) -> None:
    compiled = compile_prefill(kernels.prefill_tiling(CHIPS[90], 8), window or 0)
    assert compiled.spills == 0
    assert "HGMMA" in compiled.sass


@pytest.mark.compiles
@pytest.mark.parametrize("window", [None, 128])
def test_decode_on_hopper_multiplies_what_tma_brings(window: int | None) -> None:
    compiled = compile_decode_on_hopper(hopper.decode_tiling(CHIPS[90], 8, window), window or 0)
    assert compiled.spills == 0
    assert compiled.registers <= 128
    assert "HGMMA" in compiled.sass
    assert "UTMALDG" in compiled.sass
    assert 2 * compiled.shared <= 227 * 1024  # two programs an SM


def compile_decode_on_hopper(tiling: dict[str, int], window: int, *, fp8: bool = False) -> Compiled:
    signature = {"queries": box_type(8, 64), "table_stride": "i32", "num_sequences": "i32", "scale": "fp32"}
    signature |= {"out_ptr": "*bf16", "sinks_ptr": "*bf16"} | dict.fromkeys(("partial_ptr", "stats_ptr"), "*fp32")
    signature |= dict.fromkeys(("table_ptr", "lens_ptr", "arrivals_ptr"), "*i32")
    constants: dict[str, int | None] = {"KV_HEADS": 8, "WINDOW": window} | tiling
    if fp8:
        signature |= {"pages": byte_box_type(64, 1, 2, 1, 64, 64), "scales": byte_box_type(0, 1, 2, 1, 1, 64)}
    else:
        signature["pages"], constants["scales"] = box_type(1, 2, 1, 64, 64), None
    return compile_ahead(hopper_decode.decode_kernel, signature, constants, num_warps=4, launch_pdl=True)


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("window", "shared", "rotated"),
    marked(
        (*product((None,), (False, True), (False, True)), (128, False, False), (128, False, True)),
        newest=[(None, True, False)],
        oldest=[(None, False, False), (128, False, True)],
    ),
)
def test_prefill_on_hopper_shares_the_registers(window: int | None, shared: bool, rotated: bool) -> None:
    signature = {"queries": box_type(8, 8, 64), "pages": box_type(1, 1, 1, 64, 64)}
    signature |= dict.fromkeys(("out_ptr", "sinks_ptr"), "*bf16")
    signature |= dict.fromkeys(("table_ptr", "starts_ptr", "lens_ptr", "counts_ptr", "counter_ptr"), "*i32")
    signature |= dict.fromkeys(("table_stride", "first_sequence", "num_sequences", "num_tokens"), "i32")
    signature["sums_ptr"] = "*fp32"
    constants: dict[str, int | None] = {"KV_HEADS": 8, "WINDOW": window or 0} | hopper.prefill_tiling(
        window, shared=shared
    )
    if rotated:
        constants["angles"] = None
    else:
        signature["angles"] = word_box_type(8, 32, swizzle=128, dtype="fp32")
    registers = hopper_prefill.LAUNCH_REGISTERS.value
    options = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
    compiled = compile_ahead(hopper_prefill.prefill_kernel, signature, constants, may_spill=True, **options)
    assert compiled.spills_in_loops == 0
    assert compiled.registers == registers
    assert "HGMMA" in compiled.sass
    assert "UTMALDG" in compiled.sass


PORTABLE = bound(kernels.attention)


def run(inputs: AttentionInputs, case: AttentionCase, attention: Attention = PORTABLE) -> Tensor:
    return attention(inputs.q_TQD, inputs.kv_pages, inputs.batch, inputs.group, inputs.sinks_Q, case.window)


def truth(inputs: AttentionInputs, case: AttentionCase) -> Tensor:
    q = inputs.q_TQD.float()
    return reference.attention(q, inputs.kv_pages, inputs.batch, inputs.group, inputs.sinks_Q, case.window)


def rotated_later(inputs: AttentionInputs) -> tuple[AttentionInputs, AttentionInputs]:
    """(the same with queries as norm_qkv leaves them to attention, the same with these queries rotated)."""
    device, (_, heads, head_dim) = inputs.q_TQD.device, inputs.q_TQD.shape
    cos_sin = torch.rand(40_000, head_dim, device=device) * 6 - 3  # attention takes any factors
    positions_T = inputs.batch.positions_T
    cos, sin = (factors[:, None, :] for factors in cos_sin[positions_T].chunk(2, 1))
    first, second = inputs.q_TQD.float().chunk(2, 2)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), 2).to(inputs.q_TQD.dtype)
    projection = torch.full((len(rotated), heads + 4, head_dim), torch.nan, dtype=rotated.dtype, device=device)
    projection[:, :heads] = inputs.q_TQD
    left = UnrotatedQueries(projection[:, :heads], cos_sin, positions_T)
    return dataclasses.replace(inputs, q_TQD=left), dataclasses.replace(inputs, q_TQD=rotated)  # type: ignore[arg-type]


def with_and_without_decodes(inputs: AttentionInputs) -> list[AttentionInputs]:
    """As given; with the number of decodes on the device alone; with all declared as chunks of one token."""
    found = [inputs, counted(inputs)]
    if inputs.batch.num_decodes:
        found.append(dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, num_decodes=0)))
    return found


def counted(inputs: AttentionInputs) -> AttentionInputs:
    """Only the device knows how many sequences are decodes, and how many are not empty."""
    batch, lens_S = inputs.batch, inputs.batch.query_starts_S1.diff().tolist()
    decodes = next((i for i, length in enumerate(lens_S) if length != 1), len(lens_S))
    filled = sum(length > 0 for length in lens_S)
    counts_2 = torch.tensor([decodes, filled], dtype=torch.int32, device=batch.context_lens_S.device)
    batch = dataclasses.replace(batch, num_decodes=len(lens_S), counts_2=counts_2)
    return dataclasses.replace(inputs, batch=batch)


# As CUDA graphs of prompts have it: a sequence with more tokens than its context, then empty ones.
FILLED_CASES = [
    AttentionCase("a step filled up", ((1, 70), (9, 130), (40, 1), (0, 1), (0, 1)), window=window)
    for window in (None, 128, 20)
]


def all_as_chunks(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> AttentionInputs:
    inputs = attention_inputs(case, device, dtype)
    return dataclasses.replace(inputs, batch=dataclasses.replace(inputs.batch, num_decodes=0))


def interpret_all_cases() -> None:
    for case in ATTENTION_CASES:
        inputs = attention_inputs(case, CPU, torch.float32)
        torch.testing.assert_close(run(inputs, case), truth(inputs, case), rtol=1e-5, atol=2e-6)
        left, rotated = rotated_later(inputs)
        torch.testing.assert_close(run(left, case), truth(rotated, case), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run(counted(inputs), case), truth(inputs, case), rtol=1e-5, atol=2e-6)
    for case in FILLED_CASES:
        chunks = all_as_chunks(case, CPU, torch.float32)
        for inputs in (chunks, counted(chunks)):
            found = run(inputs, case)
            torch.testing.assert_close(found, in_plain_torch(inputs, case), rtol=1e-5, atol=2e-6)
            assert not found[10:49].any(), "padding before the last token attends to nothing"
    assert not arrivals(CPU).any()


def interpret_decodes_alone() -> None:
    """Several blocks of a split; more parts than a context may have splits; rows of chunks are left as they are."""
    for sequences in (((1, 5_000), (1, 300), (9, 130), (40, 40), (3, 70)), ((1, 2_500),)):
        for window in (None, 128, 300):
            case = AttentionCase("", sequences, num_query_heads=4, num_kv_heads=2, head_dim=16, window=window)
            inputs = attention_inputs(case, CPU, torch.float32)
            decodes, expected = inputs.batch.num_decodes, truth(inputs, case)
            for one in (inputs, counted(inputs)):
                out_TQD = torch.full_like(one.q_TQD, torch.nan)
                given = kernels.Inputs(one.q_TQD, one.kv_pages, one.batch, one.group, one.sinks_Q, window)
                kernels.decode(CPU_TARGET, out_TQD, given)
                found = out_TQD.flatten(1)
                torch.testing.assert_close(found[:decodes], expected[:decodes], rtol=1e-5, atol=2e-6)
                assert found[decodes:].isnan().all(), "rows of chunks are for another kernel"
                assert not arrivals(CPU).any()


def test_interpreted_decodes_write_their_rows_alone() -> None:
    run_interpreted(interpret_decodes_alone)


def test_interpreted_kernels_equal_the_reference() -> None:
    run_interpreted(interpret_all_cases)


def in_plain_torch(inputs: AttentionInputs, case: AttentionCase) -> Tensor:
    """One sequence and head at a time, in the dtype of the inputs throughout; the sink is a key without a value."""
    out = torch.empty_like(inputs.q_TQD)
    repeats = case.num_query_heads // case.num_kv_heads
    token = 0
    for row, (count, context) in enumerate(case.sequences):
        first = 0 if case.window is None else max(0, context - count - case.window + 1)
        key_C = torch.arange(first, context, device=out.device)
        page_C = inputs.group.page_table_SB[row, key_C // case.page_size].long()
        pairs_C2GD = inputs.kv_pages[page_C, :, :, key_C % case.page_size]
        query_L1 = torch.arange(context - count, context, device=out.device)[:, None]
        hidden_LC = key_C > query_L1
        if case.window is not None:
            hidden_LC |= key_C <= query_L1 - case.window
        for head in range(case.num_query_heads):
            keys, values = pairs_C2GD[:, :, head // repeats].unbind(1)
            scores = inputs.q_TQD[token : token + count, head] @ keys.T * case.head_dim**-0.5
            scores = scores.masked_fill(hidden_LC, -torch.inf)
            sink = inputs.sinks_Q[head].expand(count, 1)
            weights = torch.cat((scores, sink), 1).softmax(1)[:, :-1]
            out[token : token + count, head] = weights @ values
        token += count
    return out.flatten(1)


def rms(error: Tensor) -> float:
    return error.float().square().mean().sqrt().item()


LARGE_CASES = tuple(
    AttentionCase(why, sequences, num_query_heads=64, num_kv_heads=8, window=window)
    for why, sequences in (
        ("one long decode", ((1, 33_333),)),
        ("few decodes", tuple((1, 700 * i + 1) for i in range(7))),
        ("decodes that fill no wave", ((1, 16_384),) * 7),
        ("as many decodes as Hopper takes", tuple((1, 1 + i * 53 % 1700) for i in range(64))),
        ("many decodes", tuple((1, 1 + i * 37 % 1500) for i in range(130))),
        ("long decodes among many", tuple((1, 40_000 if i % 99 == 7 else 1 + i * 37 % 900) for i in range(300))),
        (
            "decodes and prompts",
            (*((1, 100 * i + 1) for i in range(20)), (1024, 1024), (1000, 3333), (5, 900), (1, 77)),
        ),
        ("more chunks than are searched at once", tuple((1 + i % 30, 30 + i * 11 % 400) for i in range(70))),
        ("last chunk of a long prompt", ((300, 20_000),)),
        ("chunks of few tokens", ((33, 30_000), (1, 9_001), (7, 64), (24, 1_030))),
    )
    for window in (None, 128)
)


@pytest.fixture
def nan_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty_like", "empty"):
        empty = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, empty=empty, **kwargs: empty(*args, **kwargs).fill_(torch.nan))


def fits_hopper(case: AttentionCase) -> bool:
    return case.num_query_heads == 8 * case.num_kv_heads


each_kernel_and_case = pytest.mark.parametrize(
    ("attention", "case"),
    [pytest.param(bound(kernels.attention), case, marks=pytest.mark.gpu) for case in ATTENTION_CASES + LARGE_CASES]
    + [
        pytest.param(bound(hopper.attention), case, marks=pytest.mark.hopper)
        for case in ATTENTION_CASES + LARGE_CASES
        if fits_hopper(case)
    ],
    ids=lambda value: f"{value.why}, window {value.window}" if isinstance(value, AttentionCase) else value.__module__,
)


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_outputs")
@pytest.mark.parametrize("case", FILLED_CASES, ids=lambda case: f"window {case.window}")
def test_padding_attends_to_nothing(case: AttentionCase) -> None:
    chunks = all_as_chunks(case, CUDA, torch.bfloat16)
    expected = in_plain_torch(all_as_chunks(case, CUDA, torch.float32), case)
    for inputs in (chunks, counted(chunks)):
        found = run(inputs, case)
        assert not found[10:49].any()
        torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.usefixtures("nan_outputs")
@each_kernel_and_case
def test_error_is_at_most_twice_that_of_plain_torch(attention: Attention, case: AttentionCase) -> None:
    inputs = attention_inputs(case, CUDA, torch.bfloat16)
    check_error(attention, case, with_and_without_decodes(inputs))


@pytest.mark.gpu
@pytest.mark.usefixtures("nan_outputs")
@pytest.mark.parametrize("attention", [kernels.attention, hopper.attention], ids=["triton", "hopper"])
@pytest.mark.parametrize("case", LARGE_CASES, ids=lambda case: f"{case.why}, window {case.window}")
def test_attention_rotates_what_is_left_to_it(attention: Attention, case: AttentionCase) -> None:
    check_rotating(attention, case, attention_inputs(case, CUDA, torch.bfloat16))


def check_rotating(attention: Attention, case: AttentionCase, inputs: AttentionInputs) -> None:
    left, rotated = rotated_later(inputs)
    expected = truth(rotated, case)
    allowed = 2 * rms(in_plain_torch(rotated, case) - expected)
    for inputs in (left, rotated):
        assert rms(run(inputs, case, bound(attention)) - expected) <= allowed
    assert not arrivals(expected.device).any()


def interpret_decodes_on_hopper() -> None:
    for sequences in (
        ((1, 1), (1, 63), (1, 64), (1, 65)),
        ((1, 2000), (1, 2), (1, 700)),  # several programs share a context, and some have none
        ((1, 3700), *((1, 1 + i * 153 % 700) for i in range(11))),  # more pages of a program than it has stages
    ):
        for window in (None, 128):
            case = AttentionCase("", sequences, num_query_heads=16, num_kv_heads=2, window=window)
            check_error(bound(hopper.attention), case, [attention_inputs(case, CPU, torch.bfloat16)])


def test_interpreted_decodes_on_hopper() -> None:
    run_gluon(interpret_decodes_on_hopper)


# Prompts of few tokens, whose contexts several programs share: all, some, and none of a tile's parts have a mask.
SHARED = (((3, 4_200),), ((26, 2_062),), ((1, 2_100), (5, 60)))


def interpret_prefill_on_hopper() -> None:
    """Several sequences, prefixes, ragged lengths, chunks longer than the ring of blocks, and padding."""
    for sequences in (((1, 70), (9, 130), (40, 40)), ((77, 300), (150, 150), (1, 129), (3, 64)), ((30, 800),), *SHARED):
        for window in (None, 128):
            case = AttentionCase("", sequences, num_query_heads=16, num_kv_heads=2, window=window)
            check_rotating(hopper.attention, case, all_as_chunks(case, CPU, torch.bfloat16))
    for filled in FILLED_CASES:
        case = dataclasses.replace(filled, num_query_heads=16)
        chunks = all_as_chunks(case, CPU, torch.bfloat16)
        for inputs, first in ((chunks, 0), (counted(chunks), 1)):  # the decode is for another kernel
            found = run(inputs, case, bound(hopper.attention))
            assert not found[10:49].any()
            torch.testing.assert_close(found[first:], in_plain_torch(inputs, case)[first:], rtol=2e-2, atol=2e-2)


def test_steps_of_few_tokens_share_contexts() -> None:
    assert hopper.shares_contexts(CHIPS[90], 1_583, 8)
    assert not hopper.shares_contexts(CHIPS[90], 1_584, 8)  # four tiles and key heads per program


def test_interpreted_prefill_on_hopper() -> None:
    run_gluon(interpret_prefill_on_hopper)


def check_error(attention: Attention, case: AttentionCase, variants: list[AttentionInputs]) -> None:
    expected = truth(variants[0], case)
    allowed = 2 * rms(in_plain_torch(variants[0], case) - expected)
    for variant in variants:
        assert rms(run(variant, case, attention) - expected) <= allowed
    assert not arrivals(expected.device).any()


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param(bound(kernels.attention), marks=pytest.mark.gpu, id="triton"),
        pytest.param(bound(hopper.attention), marks=pytest.mark.hopper, id="hopper"),
    ],
)
@pytest.mark.parametrize("window", [None, 128])
def test_one_captured_graph_serves_every_context_length(attention: Attention, window: int | None) -> None:
    case = AttentionCase("three decodes", ((1, 2000),) * 3, num_query_heads=16, num_kv_heads=2, window=window)
    inputs = attention_inputs(dataclasses.replace(case, window=None), CUDA, torch.bfloat16)
    inputs.kv_pages.nan_to_num_()
    run(inputs, case, attention)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(inputs, case, attention)
    for lengths in ((1, 1, 1), (64, 65, 1999), (1024, 3, 2000)):
        inputs.batch.context_lens_S.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        graph.replay()
        torch.testing.assert_close(out.float(), truth(inputs, case), rtol=2e-2, atol=2e-3)
