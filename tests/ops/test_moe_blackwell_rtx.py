"""The mixture of experts for compute capability 12.x: interpreted on a CPU, its weights, and compiled ahead.

No such GPU has run it. The interpreter has no hardware: what the compiler makes of a product is seen in the PTX.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor

from benchmarks.kernels.inputs import counted, random_experts, random_routing
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import blackwell_rtx, reference
from oscine.ops.moe import triton as portable
from oscine.ops.moe.mxfp4 import MAGNITUDES, dequantize
from oscine.ops.target import Target
from tests.ops.compile_ahead import Compiled, assemble_for, compile_ahead, run_interpreted
from tests.ops.moe_accuracy import check_beside_portable
from tests.ops.test_moe_triton import run_assembler

CPU = torch.device("cpu")
TARGET = Target(CPU, sm_count=3, activation_dtype="fp8")
MEANS = (16, 48, 96)  # rows of an expert: one of every tiling
needs_newest = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9),
    reason="block scales of Triton 3.9",
)


def experts_of(count: int, hidden: int, intermediate: int) -> MxExperts:
    generator = torch.Generator().manual_seed(hidden + intermediate)
    return random_experts(count, hidden, intermediate, CPU, torch.bfloat16, scales=(116, 124), generator=generator)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(tokens: int, experts: MxExperts, routing: Routing, mean: int | None = None) -> None:
    """The result is that of the definition but for the order of sums, which now and then rounds h another way.

    Memory that nothing has written is NaN.
    """
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, experts.gate_up_scales.shape[2] * 32, generator=generator).bfloat16()
    prepared = blackwell_rtx.prepare_experts(TARGET, experts)
    assert isinstance(prepared, blackwell_rtx.RtxExperts)
    if mean is None:
        parts_TKH = blackwell_rtx.moe(TARGET, x_TH, routing, prepared, 7.0)
    else:
        parts_TKH = blackwell_rtx.run(TARGET, x_TH, routing, prepared, 7.0, blackwell_rtx.tiling_for(mean))
    assert parts_TKH.dtype == torch.bfloat16
    definition = reference.WithFp8Activations(experts)
    expected_TH = reference.moe(x_TH.float(), Routing(*routing[:2]), definition, 7.0)
    assert error(parts_TKH.float().sum(1), expected_TH) < 0.006, (tokens, mean)


def nan_in_new_tensors() -> None:
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()


def interpret_shapes() -> None:
    """Odd sizes that no tile divides; experts without tokens, with one and with several tiles; every tiling."""
    small = experts_of(6, 160, 96)
    check(1, small, random_routing(1, 6, 2, CPU)._replace(counts_E=None, ranks_TK=None))
    check(5, small, random_routing(5, 6, 2, CPU))
    few = counted(torch.tensor([[0, 1], [0, 2]] * 20), torch.rand(40, 2).softmax(-1), 6)
    for mean in MEANS:
        check(40, small, few, mean)
    check(70, experts_of(1, 64, 32), random_routing(70, 1, 1, CPU))  # of one expert, with counts


def interpret_ranks() -> None:
    """Intermediate widths of one of 1, 2, 4 and 8 ranks, filled up to blocks of 32; a hidden size of 2,880."""
    for hidden, intermediate in (*((32, width) for width in (2880, 1440, 736, 384)), (2880, 64)):
        check_beside_portable_kernels(hidden, intermediate)


def check_beside_portable_kernels(hidden: int, intermediate: int) -> None:
    """Two experts, three tokens."""
    experts, routing = experts_of(2, hidden, intermediate), random_routing(3, 2, 2, CPU)
    x_TH = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts_TKH = blackwell_rtx.moe(TARGET, x_TH, routing, blackwell_rtx.prepare_experts(TARGET, experts), 7.0)
    check_beside_portable(parts_TKH, x_TH, routing, experts)


def interpret_published() -> None:
    """One layer at the published width, with two experts."""
    nan_in_new_tensors()
    check_beside_portable_kernels(2880, 2880)


def interpret_edges() -> None:
    """Zero rows of x, the least scale, a NaN scale; values beyond the limit of SwiGLU; no token at all."""
    experts, routing = experts_of(2, 128, 64), random_routing(4, 2, 1, CPU)
    x_TH = 40 * torch.randn(4, 128).bfloat16()
    x_TH[2] = 0
    experts.gate_up_scales[:, ::5] = 0
    definition = reference.WithFp8Activations(experts)
    found = blackwell_rtx.moe(TARGET, x_TH, routing, blackwell_rtx.prepare_experts(TARGET, experts), 7.0)
    assert error(found.float().sum(1), reference.moe(x_TH.float(), Routing(*routing[:2]), definition, 7.0)) < 0.006
    experts.down_scales[:, 5, 0] = 255
    prepared = blackwell_rtx.prepare_experts(TARGET, experts)
    found = blackwell_rtx.moe(TARGET, x_TH, routing, prepared, 7.0)
    assert found[..., 5].isnan().all()
    assert found[..., 6].isfinite().all()
    nothing = Routing(*(tensor[:0] for tensor in routing[:2]))
    assert blackwell_rtx.moe(TARGET, x_TH[:0], nothing, prepared, 7.0).shape == (0, 1, 128)


def interpret_trial() -> None:
    """The trial at start is passed by these kernels, and not by others."""
    assert blackwell_rtx.trial(TARGET) is None
    right = blackwell_rtx._matrix
    blackwell_rtx._matrix = lambda blocks, scales, bias: right(blocks, scales.roll(1, 2), bias)
    wrong = blackwell_rtx.trial(TARGET)
    blackwell_rtx._matrix = right
    assert wrong is not None
    assert "off by" in wrong


def interpret_all() -> None:
    """In one process, most of whose time are imports."""
    nan_in_new_tensors()
    torch.manual_seed(0)
    interpret_edges()
    interpret_shapes()
    interpret_ranks()
    interpret_trial()


@pytest.mark.parametrize("what", [interpret_all, pytest.param(interpret_published, marks=pytest.mark.slow)])
def test_experts_in_the_interpreter(what: Callable[[], None]) -> None:
    run_interpreted(what)


def test_the_exact_experts_are_the_portable_ones() -> None:
    experts = experts_of(2, 64, 32)
    found = blackwell_rtx.prepare_experts(replace(TARGET, activation_dtype="auto"), experts)
    expected = portable.prepare_experts(experts)
    assert isinstance(found, MxExperts)
    assert torch.equal(found.gate_up_blocks, expected.gate_up_blocks)
    assert torch.equal(found.down_blocks, expected.down_blocks)


def test_sizes_that_no_block_divides_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 32, not 48"):
        blackwell_rtx.prepare_experts(TARGET, experts_of(2, 64, 48))


def test_the_assembler_makes_e4m3_of_every_byte() -> None:
    values = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)])
    for first in range(0, 256, 4):
        places = [first, first + 1, first + 2, first + 3]
        word = sum(byte << 8 * i for i, byte in enumerate(places))
        text = blackwell_rtx._TO_E4M3.value.replace("$2", "$4")
        found = torch.tensor(run_assembler(text, word, 2)).to(torch.uint32).view(torch.uint8).view(torch.float8_e4m3fn)
        expected = torch.stack([values[[byte >> shift & 15 for byte in places]] for shift in (0, 4)])
        assert torch.equal(found.float().view(2, 4) * 64, expected), first


@pytest.mark.parametrize("blocks", [4, 5])
def test_pairs_of_blocks_hold_the_published_weights(blocks: int) -> None:
    experts = experts_of(3, 32 * blocks, 64)
    matrix = blackwell_rtx._matrix(experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias)
    nibbles = torch.stack((matrix.blocks & 15, matrix.blocks >> 4), -2)  # [E, rows, pairs, 2, 32]
    published = nibbles[..., 0::2] | nibbles[..., 1::2] << 4
    found = dequantize(published.flatten(2, 3), matrix.scales.flatten(2))
    expected = dequantize(experts.gate_up_blocks, experts.gate_up_scales)
    assert torch.equal(found[..., : 32 * blocks], expected)
    assert not found[..., 32 * blocks :].any()


def compile_gemm(mean: int, *, gated: bool, intermediate: int = 2880) -> Compiled:
    tiling = dict(blackwell_rtx.tiling_for(mean))
    options = {name: tiling.pop(name) for name in ("num_warps", "num_stages")}
    if not gated:
        tiling["BLOCK_N"] *= 2
    signature = {"rows": "*u8", "blocks": "*u8", "scales": "*u8", "bias": "*bf16"}
    signature |= {"out": "*fp8e4nv" if gated else "*bf16", "counts": "*i32", "slots": "*i32"}
    signature |= {"token_scales": "*fp32", "weights": "*fp32", "num_tokens": "i32", "tiles": "i32"}
    signature |= {"limit": "fp32", "factor": "fp32"}
    reduced, features = (2880, intermediate) if gated else (intermediate, 2880)
    constants = {"E": 128, "K": 4, "R": reduced, "F": features, "GATED": gated, "BLOCK_E": 128, "PTX": True}
    return compile_ahead(
        blackwell_rtx._gemm_kernel, signature, constants | tiling | {"PDL": True}, arch=120, launch_pdl=True, **options
    )


SIZES = [
    *((mean, gated, 2880) for mean, gated in ((96, True), (96, False))),
    *(
        pytest.param(mean, gated, width, marks=pytest.mark.slow)
        for mean in MEANS
        for gated in (True, False)
        for width in (2880, 1440, 736, 384)
    ),
]


@pytest.mark.compiles
@needs_newest
@pytest.mark.parametrize(("mean", "gated", "intermediate"), SIZES)
def test_kernels_multiply_with_block_scales(mean: int, gated: bool, intermediate: int) -> None:
    """They fit both chips (compile_ahead.py says what fitting means), and all their products are of e4m3."""
    kernel = compile_gemm(mean, gated=gated, intermediate=intermediate)
    products = re.findall(r"mma\.sync\S+", kernel.ptx)
    assert products
    assert all(".m16n8k32." in one and ".kind::mxf8f6f4.block_scale." in one for one in products), set(products)
    assert all(".f32.e4m3.e4m3.f32.ue8m0" in one for one in products), set(products)
    assert "cp.async.cg.shared.global" in kernel.ptx, "loads of later steps run beside products"
    for chip in (kernel, assemble_for(121, kernel)):
        assert "QMMA" in chip.sass
        assert "HMMA" not in chip.sass


@pytest.mark.compiles
@needs_newest
def test_rounding_compiles() -> None:
    signature = {"x": "*bf16", "rows": "*fp8e4nv", "scales": "*fp32"}
    constants = {"H": 2880, "BLOCK_H": 4096, "PDL": True}
    kernel = compile_ahead(blackwell_rtx._round_kernel, signature, constants, arch=120, num_warps=4, launch_pdl=True)
    assemble_for(121, kernel)
