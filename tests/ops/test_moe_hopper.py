"""The Hopper mixture of experts: what the compiler makes of its kernels, the sort, and its numbers on a Hopper GPU."""

import re
from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
from triton.experimental.gluon import language as gl

from benchmarks.kernels.inputs import counted, random_experts, random_routing
from benchmarks.kernels.tilings import TOKENS, tilings
from benchmarks.precision.emulation import plain_moe
from oscine.ops import planes
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import hopper, reference
from oscine.ops.moe.hopper_gemm import gemm
from tests.ops.bound import CPU_TARGET, bound, target_of
from tests.ops.compile_ahead import TO_E4M3, Compiled, compile_ahead, marked, run_interpreted
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.gluon_interpreter.program import Program
from tests.ops.test_planes import round_as_torch

IS_3_9 = hasattr(gl.shared_memory_descriptor, "reinterpret")  # as of compat.py
MAX_SPILLED_BYTES = 40 * IS_3_9  # per thread, outside of loops of staged tilings
# Data that moves between threads, or to spilled registers.
MOVES = rf"\b(SHFL|LDSM|MOVM{'' if IS_3_9 else '|STL|LDL'})\b"
MAX_SHARED = 227 * 1024  # bytes of shared memory of an H100 or H200 processor that programs may use
OF_RANKS = (736, 384)  # intermediate columns of each of four and eight ranks, filled up to blocks of 32
# Tokens, experts, intermediate columns: the published models, and one of two ranks where its tiles differ. By default
# each way to multiply is compiled for one of the two products, with the tile that leaves the fewest registers.
TABLE = [
    *((tokens, 128, 2880) for tokens in (1, 4, 8, 16, 64, 256, 512, 1024, 8192)),
    (64, 32, 2880),
    *((tokens, 128, 1440) for tokens in (1, 4, 8)),
    *((tokens, 128, columns) for columns in OF_RANKS for tokens in (1, 8, 64, 512)),
]
SIZES = marked(
    ((gated, *sizes) for gated in (True, False) for sizes in TABLE),
    newest=[(True, 1, 128, 2880), (False, 8, 128, 2880), (True, 64, 128, 2880)],
    oldest=[
        *((True, tokens, 128, columns) for tokens, columns in ((8, 2880), (8192, 2880), (8, 1440))),
        *((False, tokens, 128, 2880) for tokens in (1, 512)),
    ],
)
NO_SCALES = {"scales_ptr": None, "sorted_scales_ptr": None}


def compile_gemm(
    tiling: hopper.Tiling,
    *,
    gated: bool,
    tokens: int,
    per_token: int = 4,
    intermediate: int = 2880,
    choice: int = 0,
    rank: int = 0,
) -> Compiled:
    def descriptor(dtype: str, shape: list[int], swizzle: int, bits: int) -> str:
        return f"tensordesc<{dtype}[{','.join(map(str, shape))}],{gl.NVMMASharedLayout(swizzle, bits, len(shape))!r}>"

    direct = tiling.planes > 0 and not rank and hopper.is_direct(tokens, per_token, tiling.tokens)
    dtype, columns, swizzle, bits = (
        ("fp8e4nv", tiling.planes * tiling.tokens, 64, 8) if tiling.planes else ("fp16", tiling.tokens, 128, 16)
    )
    lone = direct or tokens == 1
    narrow = [1, tiling.planes, 64] if lone else [max(columns // (4 if (tiling.middle > 0) else 2), 8), 64]
    signature = {
        "nibbles_desc": descriptor("u8", [8, 256], 0, 8),
        "scales_desc": descriptor("i32", [triton.next_power_of_2(tiling.units), 32], 0, 32),
        "tokens_desc": descriptor(dtype, [columns, 64], swizzle, bits),
        "narrow_desc": descriptor(dtype, narrow, 0 if lone else swizzle, bits),
        "table_ptr": "*fp32" if choice else "*i32",
        "out_ptr": ("*fp8e4nv" if tiling.planes else "*fp16") if gated else "*bf16",
        "rows_ptr": "*i32",
        "token_scales_ptr": "*fp32",
        "order_ptr": "*i32",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "tile_counters_ptr": "*i32",
        "num_tokens": "i32",
    }
    missing = dict.fromkeys(("factors_desc", "values_desc", "lists_ptr"))
    if rank:
        signature |= {"factors_desc": descriptor("bf16", [1, 1, 64, 16], 32, 16), "lists_ptr": "*i32"}
        box = [max(tiling.planes, 1) * tiling.tokens, 16]
        signature["values_desc"], missing = descriptor("bf16", box, 32, 16), {}
    splits = 1 if gated else tiling.splits
    columns, rows = (2880, intermediate) if gated else (intermediate, 2880)
    unit_rows = -(-rows // 32) if gated else 45
    constants = hopper.constants(
        tiling, splits, k_units=-(-columns // 64), unit_rows=unit_rows, rows=rows, per_token=per_token, limit=7.0
    )
    return compile_ahead(
        gemm,
        signature,
        constants
        | {"GATED": gated, "SINGLE": tokens == 1, "DIRECT": direct, "CHOICE": choice}
        | {"RANK": rank, "MOST": 8 if rank else 0}
        | missing,
        num_warps=4,
        maxnreg=tiling.registers,
        may_spill=rank > 0 or (tiling.staged and IS_3_9),  # outside of loops, as Triton 3.9 does
    )


@pytest.mark.compiles
@pytest.mark.parametrize(("gated", "tokens", "experts", "intermediate"), SIZES)
def test_loops_stay_in_registers(gated: bool, tokens: int, experts: int, intermediate: int) -> None:
    tiling = hopper.plan(tokens, 4, experts, intermediate)
    kernel = compile_gemm(tiling, gated=gated, tokens=tokens, intermediate=intermediate)
    assert kernel.spills <= MAX_SPILLED_BYTES * tiling.staged
    assert kernel.registers <= tiling.registers
    # 2 instructions of FP8 or 4 of fp16 to a unit; no data moves between threads to make the operand
    loops = 1 + tiling.halves + (tiling.tokens == 128) + (tiling.middle > 0)
    units = tiling.units * tiling.consumers
    products = (loops + (tiling.middle > 0)) * units  # two for the middle size
    assert kernel.sass.count("QGMMA.64x") == (2 * products if tiling.planes else 0)
    assert kernel.sass.count("HGMMA.64x") == (0 if tiling.planes else 4 * products)
    assert not re.search(MOVES, kernel.sass)
    assert ("UTMALDG.3D" in kernel.sass) == (tokens <= 8)  # a lone token
    assert kernel.shared * tiling.programs <= MAX_SHARED
    assert kernel.unpacked_after == (TO_E4M3 if tiling.planes and gated else set())
    if not tiling.staged:  # results are loaded so, too
        assert len(re.findall(r"LDS\.128", kernel.sass)) == loops * units


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("gated", "experts"), marked(product((True, False), (32, 128)), newest=[(True, 128)], oldest=[(False, 32)])
)
def test_a_kernel_that_chooses_stays_in_registers(gated: bool, experts: int) -> None:
    tiling = hopper.plan(1, 4, experts, 2880)
    kernel = compile_gemm(tiling, gated=gated, tokens=1, choice=experts)
    assert kernel.spills == 0
    assert kernel.registers <= tiling.registers
    assert kernel.sass.count("REDUX") >= 2 * 2 * 4, "producer and consumer, two for each choice"


@pytest.mark.compiles
@pytest.mark.slow
@pytest.mark.parametrize(("fp8", "tokens"), [(dtype == "fp8", n) for dtype in TOKENS for n in TOKENS[dtype]])
def test_loops_of_tilings_to_compare_stay_in_registers(fp8: bool, tokens: int) -> None:
    for tiling in tilings(tokens, fp8):
        for gated in (True, False):
            kernel = compile_gemm(tiling, gated=gated, tokens=tokens)
            assert kernel.spills <= MAX_SPILLED_BYTES * tiling.staged
            assert kernel.registers <= tiling.registers
            assert kernel.shared * tiling.programs <= MAX_SHARED
            assert not re.search(MOVES, kernel.sass)


@pytest.mark.compiles
@pytest.mark.variant
def test_a_few_tokens_with_many_experts_each_are_sorted() -> None:
    kernel = compile_gemm(hopper.plan(3, 16, 32, 2880), gated=True, tokens=3, per_token=16)
    assert kernel.spills == 0


@pytest.mark.compiles
@pytest.mark.parametrize("rows", [1, 4])
def test_sort_compiles(rows: int) -> None:
    signature = dict.fromkeys(("ids_ptr", "counts_ptr", "ranks_ptr", "order_ptr", "table_ptr"), "*i32")
    if rows == 1:  # planes
        signature |= {"x_ptr": "*i16", "sorted_ptr": "*i16", "scales_ptr": "*fp32", "sorted_scales_ptr": "*fp32"}
    else:
        signature |= {"x_ptr": "*bf16", "sorted_ptr": "*fp16"}
    signature["pairs"] = "i32"
    constants = {"K": 4, "H": 2880, "E": 128, "TILE": 8, "ROWS": rows, "BLOCK_E": 128, "BLOCK_H": 1024}
    constants |= {"BLOCK_P": 64, "PDL": True} if rows == 1 else {"BLOCK_P": 1, "PDL": True} | NO_SCALES
    kernel = compile_ahead(hopper.sort_kernel, signature, constants, num_warps=4, launch_pdl=True)
    assert kernel.spills == 0
    assert "LDG.E.128" in kernel.sass or rows == 1


def sort_in_interpreter() -> None:
    for tokens, experts, per_token, hidden, tile in [(5, 8, 4, 64, 8), (300, 7, 2, 96, 16), (40, 128, 4, 32, 64)]:
        words = tile == 8  # of planes, which have scales; else bf16 that becomes fp16
        routing = random_routing(tokens, experts, per_token, torch.device("cpu"))
        pairs, most = tokens * per_token, min(experts, tokens * per_token) + tokens * per_token // tile
        x_TH = torch.randn(tokens, hidden).mul(1e5 if tokens == 40 else 1).bfloat16()
        if words:
            x_TH = x_TH.view(torch.int16)
        scale_T, sorted_scales = torch.rand(tokens), torch.full((pairs,), torch.nan)
        counted = pairs > 32
        rows = torch.full((pairs, hidden), -1, dtype=torch.int16 if words else torch.float16)
        pair_of_row = torch.full((pairs,), -1, dtype=torch.int32)
        table = torch.full((4 + 4 * most,), -1, dtype=torch.int32)
        hopper.sort_kernel[(triton.cdiv(pairs, 8),)](
            x_TH,
            scale_T if words else None,
            routing.expert_ids_TK,
            routing.counts_E if counted else None,
            routing.ranks_TK if counted else None,
            rows,
            sorted_scales,
            pair_of_row,
            table,
            pairs,
            K=per_token,
            H=hidden,
            E=experts,
            TILE=tile,
            ROWS=8,
            BLOCK_E=triton.next_power_of_2(experts),
            BLOCK_H=1024,
            BLOCK_P=1 if counted else 32,
            PDL=False,
        )
        order = routing.expert_ids_TK.flatten().argsort(stable=True)
        assert torch.equal(pair_of_row.long(), order)
        if words:
            assert torch.equal(rows, x_TH[order // per_token])
            assert torch.equal(sorted_scales, scale_T[order // per_token])
        else:
            assert torch.equal(rows, x_TH[order // per_token].float().clamp(-65504, 65504).half())
        want, start = [], 0
        for expert, count in enumerate(routing.counts_E.tolist()):
            want += [[expert, start + first, min(count - first, tile)] for first in range(0, count, tile)]
            start += count
        assert table[0] == len(want) <= most
        assert table[4 : 4 + 4 * len(want)].view(-1, 4)[:, :3].tolist() == want


def test_sort_in_the_interpreter() -> None:
    run_interpreted(sort_in_interpreter)


def test_odd_sizes_are_refused() -> None:
    experts = published_experts(2, 64, 48, torch.device("cpu"))
    with pytest.raises(ValueError, match="multiples of 32"):
        hopper.prepare_experts(CPU_TARGET, experts)


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 37, 300, 1000])
@pytest.mark.parametrize(("experts", "size"), [(8, 256), (32, 288), (5, 2880)], ids=["nano", "odd", "wide"])
def test_error_is_that_of_bf16(tokens: int, experts: int, size: int) -> None:
    check_error(tokens, experts, size, size, torch.device("cuda"))


def interpret_experts() -> None:
    round_as_torch()
    cpu = torch.device("cpu")
    for tokens in (1, 3, 9):  # tiles of one rank's experts
        check_error(tokens, 5, 32, 32, cpu)
    hopper.THIN = 0  # from here on those of whole experts, small as these are
    check_error(9, 5, 96, 32, cpu)  # sorted, row by row
    hopper.SPREAD = 0  # fewer programs to interpret
    check_error(1, 5, 96, 96, cpu)  # no table
    check_error(1, 5, 224, 320, cpu)  # several stages, so that memory of earlier tokens is used again
    check_error(2, 5, 32, 224, cpu)  # no sort; fewer stages than parts of the sum
    check_error(8, 5, 224, 320, cpu)  # the sum in three parts
    check_error(17, 16, 32, 32, cpu)  # tiles of which some are half full
    check_error(40, 4, 32, 32, cpu)  # large tiles
    # not sorted: all tokens on the same experts, and each on its own
    check_ids(torch.tensor([[3, 0, 4, 1]] * 8), 32, 32)
    check_ids(torch.arange(16).view(4, 4).flip(0), 32, 32)
    # experts that are the first choice of one token and a later one of another
    check_ids(torch.tensor([[4, 0, 2, 1], [2, 4, 3, 0], [1, 3, 0, 2]]), 32, 32)
    check_ids((torch.arange(5)[:, None] + 2 * torch.arange(4)) % 8, 32, 32)
    check_ids(torch.arange(32).view(4, 8) % 9, 32, 32)  # sorted: pairs of eight tokens would not fit a word
    check_ids(torch.arange(48).view(3, 16) % 19, 32, 32)  # sorted, though tokens are so few
    for tokens in (3, 40):  # in FP8, in fp16
        check_scales(tokens)
        check_small_activations(tokens)
        check_nan_stays_in_its_row(tokens)
    check_given_planes(1)
    check_given_planes(12)
    nothing = bound(hopper.moe)(torch.empty(0, 64).bfloat16(), random_routing(0, 8, 4, cpu), prepared_experts(), 7.0)
    assert nothing.sum(1).shape == (0, 64)


def interpret_choice() -> None:
    check_choice(32, 2, torch.device("cpu"), 32)
    check_choice(64, 4, torch.device("cpu"), 32)


def test_interpreted_choice() -> None:
    run_gluon(interpret_choice)


@pytest.mark.hopper
@pytest.mark.parametrize("experts", [32, 128])
def test_choice_on_gpu(experts: int) -> None:
    check_choice(experts, 4, torch.device("cuda"), 256)


def check_choice(experts: int, per_token: int, device: torch.device, size: int) -> None:
    """What is computed is that of the experts of the largest logits; ids and weights are written."""
    torch.manual_seed(experts)
    prepared = hopper.prepare_experts(target_of(device), published_experts(experts, size, size, device))
    x_TH = torch.randn(1, size, device=device).bfloat16()
    distinct = torch.randn(experts, device=device)
    ties = torch.zeros(experts, device=device)
    ties[3::2] = -0.0
    odd = distinct.clone()
    odd[5], odd[9], odd[11], odd[31] = torch.nan, torch.inf, -torch.inf, 20.0
    lowest = torch.full_like(distinct, -torch.inf)
    lowest[17] = torch.nan
    for logits_E in (distinct, -distinct.abs() * 1e-40, ties, odd.clamp(max=30), lowest.clamp(min=-1e30)):
        as_number_E = logits_E.nan_to_num(-torch.inf, 1e30, -torch.inf)
        order = sorted(range(experts), key=lambda i: (-float(as_number_E[i]), i))[:per_token]
        ids_TK = torch.tensor([order], dtype=torch.int32, device=device)
        weights_TK = logits_E[ids_TK.long()].softmax(-1)
        empty = Routing(torch.full_like(ids_TK, -1), torch.full_like(weights_TK, torch.nan))
        left = empty._replace(logits_TE=logits_E[None])
        found = bound(hopper.moe)(x_TH, left, prepared, 7.0)
        assert torch.equal(left.expert_ids_TK, ids_TK)
        torch.testing.assert_close(left.weights_TK, weights_TK)
        given = Routing(ids_TK, left.weights_TK)
        assert torch.equal(found, bound(hopper.moe)(x_TH, given, prepared, 7.0))


def test_interpreted_error_is_that_of_bf16() -> None:
    run_gluon(interpret_experts)


def interpret_tilings() -> None:
    """Tiles of one to four quarters, which are staged; 96 or 160 columns do not fill the last tile of weight rows."""
    quarters = hopper.Tiling(32, units=1, stages=3, halves=True, middle=24, dynamic=True)
    for tiling in (quarters, replace(quarters, staged=True, dynamic=False), hopper.large(64, units=2, stages=3)):
        hopper.plan = lambda *_, tiling=tiling: tiling
        for tokens in (7, 24, 37):  # of four experts that all tokens choose
            check_error(tokens, 4, 96, 160, torch.device("cpu"))
        check_nan_stays_in_its_row(40)
    hopper.plan = lambda *_: hopper.large(128, units=3, stages=3)
    check_error(70, 4, 32, 64, torch.device("cpu"))


@pytest.mark.slow
def test_interpreted_tilings() -> None:
    run_gluon(interpret_tilings)


def interpret_late_partitions() -> None:
    """Whichever partition is late, none of the others takes one phase of a barrier for another.

    Tilings: one of large steps, and that of a decode step of 20b with some 20 rows (two planes, four stages).
    """
    round_as_torch()
    large = hopper.Tiling(32, units=1, stages=3, halves=True, middle=24, dynamic=True)
    for tiling, late in [*((large, late) for late in range(5)), (hopper.Tiling(8, planes=2, dynamic=True), 3)]:
        hopper.plan = lambda *_, tiling=tiling: tiling
        Program.late = late
        tokens, hidden = (40, 768) if tiling.planes else (24, 320)  # more steps than stages
        check_error(tokens, 4, hidden, 64, torch.device("cpu"))


def test_interpreted_partitions_may_be_late() -> None:
    run_gluon(interpret_late_partitions)


def check_error(tokens: int, experts: int, hidden: int, intermediate: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    check_routing(random_routing(tokens, experts, 4, device), experts, hidden, intermediate)


def check_ids(ids_TK: torch.Tensor, hidden: int, intermediate: int) -> None:
    torch.manual_seed(0)
    experts = int(ids_TK.max()) + 1
    check_routing(counted(ids_TK, torch.rand(ids_TK.shape), experts), experts, hidden, intermediate)


def check_routing(routing: Routing, experts: int, hidden: int, intermediate: int) -> None:
    device = routing.weights_TK.device
    published = published_experts(experts, hidden, intermediate, device)
    check(torch.randn(len(routing.weights_TK), hidden, device=device).bfloat16(), routing, published)


def check(x_TH: torch.Tensor, routing: Routing, published: MxExperts) -> None:
    """The error is at most twice that of plain torch in bf16."""
    prepared = hopper.prepare_experts(target_of(x_TH.device), published)
    exact = reference.moe(x_TH.float(), routing, in_float(published), 7.0)
    plain = plain_moe(x_TH, routing, published, 7.0).float()
    if x_TH.device.type == "cuda":
        poison_memory(x_TH.device)
    if len(x_TH) <= 16:  # the router does not count few tokens
        routing = Routing(routing.expert_ids_TK, routing.weights_TK)
    ours = bound(hopper.moe)(x_TH, routing, prepared, 7.0).float().sum(1)
    assert (ours - exact).norm() <= 2 * (plain - exact).norm()


def prepared_experts() -> hopper.HopperExperts:
    torch.manual_seed(0)
    return hopper.prepare_experts(CPU_TARGET, published_experts(8, 64, 64, torch.device("cpu")))


def drawn(tokens: int) -> tuple[torch.Tensor, Routing]:
    torch.manual_seed(tokens)
    return torch.randn(tokens, 64).bfloat16(), random_routing(tokens, 8, 4, torch.device("cpu"))


def check_scales(tokens: int) -> None:
    """Blocks of a row differ much; some are zeros, whose scale says nothing."""
    published = random_experts(8, 64, 64, torch.device("cpu"), torch.bfloat16, scales=(70, 124))
    for blocks, scales in (
        (published.gate_up_blocks, published.gate_up_scales),
        (published.down_blocks, published.down_scales),
    ):
        blocks[:, ::3, 1], scales[:, ::3, 1] = 0x80, 254
    check(*drawn(tokens), published)


def check_small_activations(tokens: int) -> None:
    published = published_experts(8, 64, 64, torch.device("cpu"))
    biases = {"gate_up_bias": published.gate_up_bias * 0.01, "down_bias": published.down_bias * 0.01}
    x_TH, routing = drawn(tokens)
    check(x_TH * 0.01, routing, replace(published, **biases))


def check_nan_stays_in_its_row(tokens: int) -> None:
    x_TH, routing = drawn(tokens)
    before = bound(hopper.moe)(x_TH, routing, prepared_experts(), 7.0)
    x_TH[1] = torch.nan
    after = bound(hopper.moe)(x_TH, routing, prepared_experts(), 7.0)
    others = torch.arange(tokens) != 1
    assert torch.equal(after[others], before[others])
    assert after[1].isnan().all()


def check_given_planes(tokens: int) -> None:
    """They are what is multiplied: x itself is not looked at."""
    x_TH, routing = drawn(tokens)
    want = bound(hopper.moe)(x_TH, routing, prepared_experts(), 7.0)
    given = routing._replace(prepared=bound(planes.split)(x_TH, 2))
    assert torch.equal(bound(hopper.moe)(x_TH * torch.nan, given, prepared_experts(), 7.0), want)


@pytest.mark.parametrize("limit", [0.0, 65.0, torch.inf, torch.nan])
def test_limits_beyond_the_range_are_refused(limit: float) -> None:
    x_TH, routing = drawn(3)
    with pytest.raises(ValueError, match="SwiGLU limit"):
        bound(hopper.moe)(x_TH, routing, prepared_experts(), limit)


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_every_tiling_replays_in_a_graph(tokens: int) -> None:
    """One graph, replayed with other routings; all tokens on the same experts among them."""
    device = torch.device("cuda")
    published = published_experts(16, 256, 256, device)
    prepared = hopper.prepare_experts(target_of(device), published)
    x_TH = torch.randn(tokens, 256, device=device).bfloat16()
    static = random_routing(tokens, 16, 4, device)
    bound(hopper.moe)(x_TH, static, prepared, 7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TJH = bound(hopper.moe)(x_TH, static, prepared, 7.0)
    for seed in range(3):
        torch.manual_seed(seed)
        routing = random_routing(tokens, 16, 4, device)
        if seed == 2:
            routing = counted(routing.expert_ids_TK[:1].expand_as(routing.expert_ids_TK), routing.weights_TK, 16)
        for target, source in zip(static[:4], routing[:4], strict=True):  # not the planes, which there are none of
            target.copy_(source)
        y_TJH.fill_(torch.nan)
        graph.replay()
        exact = reference.moe(x_TH.float(), routing, in_float(published), 7.0)
        plain = plain_moe(x_TH, routing, published, 7.0).float()
        assert (y_TJH.float().sum(1) - exact).norm() <= 2 * (plain - exact).norm()


@pytest.mark.hopper
@pytest.mark.parametrize("intermediate", [64, 128])
@pytest.mark.parametrize("tokens", [80, 300, 8192])
def test_tiles_of_one_stage(tokens: int, intermediate: int) -> None:
    """Tokens of some experts fill more than half of a tile, and weight rows go to all consumers."""
    check_error(tokens, 8, 256, intermediate, torch.device("cuda"))


@pytest.mark.hopper
def test_parts_of_one_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    tiling = hopper.large(64, units=3, stages=4)
    monkeypatch.setattr(hopper, "plan", lambda *_: replace(tiling, splits=15))
    check_error(300, 8, 256, 2880, torch.device("cuda"))


def published_experts(experts: int, hidden: int, intermediate: int, device: torch.device) -> MxExperts:
    return random_experts(experts, hidden, intermediate, device, torch.bfloat16, scales=(118, 123))


def in_float(experts: MxExperts) -> MxExperts:
    return replace(experts, gate_up_bias=experts.gate_up_bias.float(), down_bias=experts.down_bias.float())


def poison_memory(device: torch.device) -> None:
    """What torch.empty hands out next is full of NaN."""
    blocks = [torch.full((size,), torch.nan, device=device) for size in (1 << 12, 1 << 18, 1 << 24) for _ in range(4)]
    del blocks
