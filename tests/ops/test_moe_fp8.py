"""The Hopper experts with FP8 activations: what the compiler makes of them, and their numbers against the reference.

The reference rounds x and h to the same values and multiplies them in float32. What may differ is the sum of a product,
and then now and then the value that h is rounded to.
"""

import re
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.inputs import counted, random_routing
from oscine.ops import planes
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import hopper, reference
from oscine.ops.target import Target
from tests.ops.bound import target_of
from tests.ops.compile_ahead import marked
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.test_moe_hopper import MAX_SHARED, OF_RANKS, compile_gemm, poison_memory, published_experts
from tests.ops.test_planes import round_as_torch

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
# Relative errors, by norm. The result is rounded to bfloat16; sums are in float32, or in the fewer bits of a tensor
# core, which is enough that a hundredth of h is rounded otherwise.
EXACT_SUMS = 0.003
TENSOR_CORE_SUMS = 0.015
OF_FP8 = 0.06  # against the exact op
# tokens, experts, intermediate columns
TABLE = [
    *((tokens, 128, 2880) for tokens in (1, 8, 16, 64, 128, 256, 512, 1024, 2048, 8192)),
    *((tokens, 128, 1440) for tokens in (1, 8, 16)),
    *((tokens, 128, columns) for columns in OF_RANKS for tokens in (1, 64, 512)),
]
SIZES = marked(  # with each way to multiply, for one of the two products
    ((gated, *sizes) for gated in (True, False) for sizes in TABLE),
    newest=[(True, 8, 128, 2880), (False, 64, 128, 2880)],
    oldest=[(True, 1, 128, 2880), (False, 512, 128, 2880), (True, 8192, 128, 2880)],
)


def fp8_target(device: torch.device) -> Target:
    return replace(target_of(device), activation_dtype="fp8")


@pytest.mark.compiles
@pytest.mark.parametrize(("gated", "tokens", "experts", "intermediate"), SIZES)
def test_kernel_stays_in_registers(gated: bool, tokens: int, experts: int, intermediate: int) -> None:
    tiling = hopper.plan_fp8(tokens, 4, experts, intermediate)
    kernel = compile_gemm(tiling, gated=gated, tokens=tokens, intermediate=intermediate)
    assert kernel.spills == 0
    assert kernel.registers <= tiling.registers
    assert kernel.shared * tiling.programs <= MAX_SHARED
    # per unit 2 products and one load of scales; no data moves between threads to make the operand
    loops = 3 if tiling.tokens >= 128 else 2 if tiling.halves else 1
    units = loops * tiling.units * tiling.consumers
    assert kernel.sass.count("QGMMA.64x") == 2 * units
    assert kernel.sass.count("LDS.S16") == units
    assert not re.search(r"\b(SHFL|STL|LDL|LDSM|MOVM|HGMMA)\b", kernel.sass)


@pytest.mark.compiles
def test_a_unit_is_expanded_in_few_instructions() -> None:
    """34, of all columns; see the decision on FP8 activations."""
    kernel = compile_gemm(hopper.plan_fp8(8, 4, 128, 2880), gated=True, tokens=8)
    code = [line for line in kernel.sass.splitlines() if re.search(r"/\*[0-9a-f]{4,}\*/ {4}", line)]
    products = [i for i, line in enumerate(code) if "QGMMA" in line]
    between = code[products[1] + 1 : products[3]]  # the second of three units of a stage, with its products
    opcodes = [found[1] for line in between if (found := re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z]\w*)", line))]
    uniform = [opcode for opcode in opcodes if opcode.startswith("U")]
    assert len(opcodes) - len(uniform) <= 34 + 7  # two loads, a product or two, waits


def interpret() -> None:
    round_as_torch()
    check(1, 5, 64, 96, CPU)  # no table; rows of h are padded
    check(3, 5, 64, 64, CPU)  # no sort
    check(9, 5, 128, 32, CPU)  # sorted
    hopper.THIN = 0  # from here on tiles of whole experts, small as these are
    hopper.SPREAD = 0  # fewer programs to interpret
    check(1, 5, 128, 320, CPU)  # the sum in three parts
    check(8, 5, 64, 224, CPU)  # no sort, several tokens of an expert
    check(20, 24, 64, 32, CPU)  # tiles of which some are half full
    check(40, 8, 128, 96, CPU)  # larger tiles
    check(300, 4, 64, 64, CPU)  # the largest
    check_ids(torch.tensor([[3, 0, 4, 1]] * 8))
    check_ids(torch.arange(48).view(3, 16) % 19)  # sorted, though tokens are so few
    for tokens in (3, 40):
        check_nan_stays_in_its_row(tokens)
    check_given_plane()
    check_staged(3, 8)
    check_staged(70, 16)
    check_staged(300, 128)
    for tokens in (28, 70, 110):  # one, three and four quarters of most tiles
        check_tiling(tokens, replace(hopper.large(64, units=2, stages=3, planes=1), middle=48))
    check_tiling(170, replace(hopper.large(128, units=1, stages=4, planes=1), middle=96))
    nothing = run(torch.empty(0, 64).bfloat16(), random_routing(0, 8, 4, CPU), published_experts(8, 64, 64, CPU))
    assert nothing.shape == (0, 64)


def test_interpreted_kernels_compute_the_reference() -> None:
    run_gluon(interpret)


def run(
    x_TH: torch.Tensor, routing: Routing, published: MxExperts, tiling: hopper.Tiling | None = None
) -> torch.Tensor:
    target = fp8_target(x_TH.device)
    prepared = hopper.prepare_experts(target, published)
    if len(x_TH) <= 16:  # the router does not count few tokens
        routing = Routing(routing.expert_ids_TK, routing.weights_TK, prepared=routing.prepared)
    if tiling is None:
        return hopper.moe(target, x_TH, routing, prepared, 7.0).float().sum(1)
    return hopper.run(target, x_TH, routing, prepared, 7.0, tiling).float().sum(1)


def difference(ours_TH: torch.Tensor, want_TH: torch.Tensor) -> float:
    return float((ours_TH - want_TH).norm() / want_TH.norm())


def expected(x_TH: torch.Tensor, routing: Routing, published: MxExperts) -> torch.Tensor:
    return reference.moe(x_TH.float(), routing, reference.WithFp8Activations(published), 7.0)


def check(tokens: int, experts: int, hidden: int, intermediate: int, device: torch.device) -> None:
    torch.manual_seed(tokens)
    published = published_experts(experts, hidden, intermediate, device)
    x_TH = torch.randn(tokens, hidden, device=device).bfloat16()
    check_inputs(x_TH, random_routing(tokens, experts, 4, device), published)


def check_inputs(x_TH: torch.Tensor, routing: Routing, published: MxExperts) -> None:
    want_TH = expected(x_TH, routing, published)
    if x_TH.device.type == "cuda":
        poison_memory(x_TH.device)
    ours_TH = run(x_TH, routing, published)
    assert difference(ours_TH, want_TH) <= (EXACT_SUMS if x_TH.device.type == "cpu" else TENSOR_CORE_SUMS)
    assert difference(ours_TH, reference.moe(x_TH.float(), routing, published, 7.0)) <= OF_FP8


def check_ids(ids_TK: torch.Tensor) -> None:
    torch.manual_seed(0)
    published = published_experts(int(ids_TK.max()) + 1, 64, 32, CPU)
    routing = counted(ids_TK, torch.rand(ids_TK.shape), len(published.down_bias))
    check_inputs(torch.randn(len(ids_TK), 64).bfloat16(), routing, published)


def drawn(tokens: int) -> tuple[torch.Tensor, Routing, MxExperts]:
    torch.manual_seed(tokens)
    routing = random_routing(tokens, 8, 4, CPU)
    return torch.randn(tokens, 64).bfloat16(), routing, published_experts(8, 64, 96, CPU)


def check_nan_stays_in_its_row(tokens: int) -> None:
    x_TH, routing, published = drawn(tokens)
    before = run(x_TH, routing, published)
    x_TH[1] = torch.nan
    after = run(x_TH, routing, published)
    others = torch.arange(tokens) != 1
    assert torch.equal(after[others], before[others])
    assert after[1].isnan().all()


def check_given_plane() -> None:
    """It is what is multiplied: x itself is not looked at."""
    x_TH, routing, published = drawn(12)
    given = routing._replace(prepared=planes.split(fp8_target(CPU), x_TH, 1))
    assert torch.equal(run(x_TH * torch.nan, given, published), run(x_TH, routing, published))


def check_staged(tokens: int, tile: int) -> None:
    splits = 2 if tile == 8 else 1
    check_tiling(tokens, hopper.Tiling(tile, planes=1, units=1, halves=tile > 8, staged=True, splits=splits))


def check_tiling(tokens: int, tiling: hopper.Tiling) -> None:
    x_TH, routing, published = drawn(tokens)
    assert difference(run(x_TH, routing, published, tiling), expected(x_TH, routing, published)) <= EXACT_SUMS


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 37, 300, 1000, 8192])
@pytest.mark.parametrize(("experts", "hidden", "intermediate"), [(8, 256, 256), (32, 320, 288), (5, 2880, 2880)])
def test_kernels_compute_the_reference(tokens: int, experts: int, hidden: int, intermediate: int) -> None:
    check(tokens, experts, hidden, intermediate, CUDA)


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 7, 64, 700])
def test_sums_within_the_bits_of_a_tensor_core_are_exact(tokens: int) -> None:
    """x is -1, 0 or 1 and all scales are alike, so that sums before SwiGLU are exact and h is rounded alike."""
    torch.manual_seed(tokens)
    published = published_experts(8, 2880, 2880, CUDA)
    published.gate_up_scales.fill_(122)
    published.down_scales.fill_(120)
    x_TH = torch.randn(tokens, 2880, device=CUDA).sign() * (torch.rand(tokens, 2880, device=CUDA) < 0.1)
    x_TH, routing = x_TH.bfloat16(), random_routing(tokens, 8, 4, CUDA)
    assert difference(run(x_TH, routing, published), expected(x_TH, routing, published)) <= 0.004


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 8, 64, 1000])
def test_every_tiling_replays_in_a_graph(tokens: int) -> None:
    """One graph, replayed with other routings; all tokens on the same experts among them."""
    target, published = fp8_target(CUDA), published_experts(16, 256, 256, CUDA)
    prepared = hopper.prepare_experts(target, published)
    x_TH = torch.randn(tokens, 256, device=CUDA).bfloat16()
    static = random_routing(tokens, 16, 4, CUDA)
    hopper.moe(target, x_TH, static, prepared, 7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y_TJH = hopper.moe(target, x_TH, static, prepared, 7.0)
    for seed in range(3):
        torch.manual_seed(seed)
        routing = random_routing(tokens, 16, 4, CUDA)
        if seed == 2:
            routing = counted(routing.expert_ids_TK[:1].expand_as(routing.expert_ids_TK), routing.weights_TK, 16)
        for part, source in zip(static[:4], routing[:4], strict=True):
            part.copy_(source)
        y_TJH.fill_(torch.nan)
        graph.replay()
        assert difference(y_TJH.float().sum(1), expected(x_TH, routing, published)) <= TENSOR_CORE_SUMS


def test_odd_hidden_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 64 for FP8, not 96"):
        hopper.prepare_experts(fp8_target(CPU), published_experts(2, 96, 64, CPU))
