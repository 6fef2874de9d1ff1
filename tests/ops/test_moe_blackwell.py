"""The mixture of experts for compute capability 10.x: interpreted on a CPU, its layouts, and compiled ahead.

No such GPU has run it. The interpreter knows tensor memory, scaled products and their order, not the hardware.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import triton
from torch import Tensor
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import TensorMemoryScalesLayout

from benchmarks.kernels.inputs import counted, random_experts, random_routing
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import blackwell, reference
from oscine.ops.moe import triton as portable
from oscine.ops.moe.blackwell_gemm import gemm
from oscine.ops.moe.mxfp4 import dequantize
from oscine.ops.target import Target
from tests.ops.compile_ahead import Compiled, compile_ahead
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.moe_accuracy import check_beside_portable
from tests.ops.test_planes import round_as_torch

CPU = torch.device("cpu")
TARGET = Target(CPU, (10, 0), sm_count=3, activation_dtype="fp8")
needs_newest = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9), reason="Gluon of Triton 3.9; `make test-newest-triton`"
)


def experts_of(count: int, hidden: int, intermediate: int) -> MxExperts:
    generator = torch.Generator().manual_seed(hidden + intermediate)
    return random_experts(count, hidden, intermediate, CPU, torch.bfloat16, scales=(116, 124), generator=generator)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check(tokens: int, experts: MxExperts, routing: Routing, tile: int | None = None) -> None:
    """The result is that of the definition but for the order of sums, which now and then rounds h another way."""
    generator = torch.Generator().manual_seed(tokens)
    x_TH = torch.randn(tokens, experts.gate_up_scales.shape[2] * 32, generator=generator).bfloat16()
    prepared = blackwell.prepare_experts(TARGET, experts)
    assert isinstance(prepared, blackwell.BlackwellExperts)
    if tile is None:
        parts_TKH = blackwell.moe(TARGET, x_TH, routing, prepared, 7.0)
    else:
        parts_TKH = blackwell.run(TARGET, x_TH, routing, prepared, 7.0, blackwell.Tiling(tile))
    assert parts_TKH.dtype == torch.bfloat16
    exact = reference.WithFp8Activations(experts)
    expected_TH = reference.moe(x_TH.float(), Routing(*routing[:2]), exact, 7.0)
    assert error(parts_TKH.float().sum(1), expected_TH) < 0.006, (tokens, tile)


def interpret_shapes() -> None:
    """Odd sizes that no unit divides; experts without tokens, with one and with several tiles; every tile."""
    round_as_torch()
    small = experts_of(6, 160, 96)
    check(1, small, random_routing(1, 6, 2, CPU)._replace(counts_E=None, ranks_TK=None))
    check(5, small, random_routing(5, 6, 2, CPU)._replace(counts_E=None, ranks_TK=None))
    few = counted(torch.tensor([[0, 1], [0, 2]] * 20), torch.rand(40, 2).softmax(-1), 6)
    for tile in (16, 32, 64, 128):
        check(40, small, few, tile)
    check(150, small, random_routing(150, 6, 4, CPU))
    wide = experts_of(2, 320, 288)
    check(9, wide, random_routing(9, 2, 1, CPU), 16)


def interpret_ranks() -> None:
    """Intermediate widths of one of 1, 2, 4 and 8 ranks, filled up to blocks of 32; a hidden size of 2,880."""
    round_as_torch()
    for hidden, intermediate in (*((32, width) for width in (2880, 1440, 736, 384)), (2880, 64)):
        check_beside_portable_kernels(hidden, intermediate)


def check_beside_portable_kernels(hidden: int, intermediate: int) -> None:
    """Two experts, three tokens."""
    experts, routing = experts_of(2, hidden, intermediate), random_routing(3, 2, 2, CPU)
    x_TH = torch.randn(3, hidden, generator=torch.Generator().manual_seed(0)).bfloat16()
    parts_TKH = blackwell.moe(TARGET, x_TH, routing, blackwell.prepare_experts(TARGET, experts), 7.0)
    check_beside_portable(parts_TKH, x_TH, routing, experts)


def interpret_published() -> None:
    """One layer at the published width, with two experts."""
    round_as_torch()
    check_beside_portable_kernels(2880, 2880)


def interpret_edges() -> None:
    """Zero rows of x, the least scale, a NaN scale; values beyond the limit of SwiGLU; no token at all."""
    round_as_torch()
    experts, routing = experts_of(2, 128, 64), random_routing(4, 2, 1, CPU)
    x_TH = 40 * torch.randn(4, 128).bfloat16()
    x_TH[2] = 0
    experts.gate_up_scales[:, ::5] = 0
    exact = reference.WithFp8Activations(experts)
    run = blackwell.moe(TARGET, x_TH, routing, blackwell.prepare_experts(TARGET, experts), 7.0).float().sum(1)
    assert error(run, reference.moe(x_TH.float(), Routing(*routing[:2]), exact, 7.0)) < 0.006
    experts.down_scales[:, 5, 0] = 255
    run = blackwell.moe(TARGET, x_TH, routing, blackwell.prepare_experts(TARGET, experts), 7.0)
    assert run[..., 5].isnan().all()
    assert run[..., 6].isfinite().all()
    nothing = Routing(*(tensor[:0] for tensor in routing[:2]))
    assert blackwell.moe(TARGET, x_TH[:0], nothing, blackwell.prepare_experts(TARGET, experts), 7.0).shape == (
        0,
        1,
        128,
    )


def interpret_trial() -> None:
    """The trial at start is passed by these kernels, and not by others."""
    round_as_torch()
    assert blackwell.trial(TARGET) is None
    right = blackwell._matrix
    blackwell._matrix = lambda blocks, scales, bias: right(blocks, scales.roll(1, 2), bias)
    wrong = blackwell.trial(TARGET)
    blackwell._matrix = right
    assert wrong is not None
    assert "off by" in wrong


def test_the_exact_experts_are_the_portable_ones() -> None:
    experts = experts_of(2, 64, 32)
    found = blackwell.prepare_experts(replace(TARGET, activation_dtype="auto"), experts)
    expected = portable.prepare_experts(experts)
    assert isinstance(found, MxExperts)
    assert torch.equal(found.gate_up_blocks, expected.gate_up_blocks)
    assert torch.equal(found.down_blocks, expected.down_blocks)


def interpret_all() -> None:
    """In one process, most of whose time are imports."""
    torch.manual_seed(0)
    interpret_edges()
    interpret_shapes()
    interpret_ranks()
    interpret_trial()


@pytest.mark.parametrize("what", [interpret_all, pytest.param(interpret_published, marks=pytest.mark.slow)])
def test_experts_in_the_interpreter(what: Callable[[], None]) -> None:
    run_gluon(what)


def test_sizes_that_no_block_divides_are_refused() -> None:
    experts = experts_of(2, 64, 48)
    with pytest.raises(ValueError, match="multiples of 32, not 48"):
        blackwell.prepare_experts(TARGET, experts)


def test_units_hold_the_published_weights() -> None:
    """Every weight is found where its unit has it, by the places that blackwell.py names; the rest is zeros."""
    experts = experts_of(2, 160, 96)
    prepared = blackwell.prepare_experts(TARGET, experts)
    assert isinstance(prepared, blackwell.BlackwellExperts)
    gate_up = dequantize(experts.gate_up_blocks, experts.gate_up_scales)
    down = dequantize(experts.down_blocks, experts.down_scales)
    published = torch.stack((gate_up[:, 0::2], gate_up[:, 1::2]), 1), down[:, None]
    for matrix, weights in zip((prepared.gate_up, prepared.down), published, strict=True):
        num_experts, parts, rows, columns = weights.shape
        lane, group, block = torch.meshgrid(torch.arange(32), torch.arange(4), torch.arange(4), indexing="ij")
        scales = torch.empty((len(matrix.scales), 128, 4), dtype=torch.uint8)
        scales[:, (32 * group + lane).flatten(), block.flatten()] = matrix.scales.flatten(1)
        units = dequantize(matrix.nibbles.view(-1, 128, 4, 16), scales)
        shape = num_experts, matrix.row_tiles, matrix.steps, parts, 128, 128
        tiled = units.view(shape).permute(0, 3, 1, 4, 2, 5).reshape(num_experts, parts, 128 * matrix.row_tiles, -1)
        assert torch.equal(tiled[:, :, :rows, :columns], weights)
        assert tiled.abs().sum() == weights.abs().sum()


@pytest.mark.compiles
@needs_newest
def test_scales_lie_as_triton_places_them_in_tensor_memory() -> None:
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 100, 32)).load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    found = builder.to_linear_layout(TensorMemoryScalesLayout()._to_ir(builder), [128, 4])
    for row in range(128):
        for block in range(4):
            byte = 16 * (row % 32) + 4 * (row // 32) + block
            lane, column = divmod(byte, 16)
            bits = [*zip(found.rows[:5], f"{lane:05b}"[::-1], strict=True)]
            bits += zip(found.cols, f"{column:04b}"[::-1], strict=True)
            place = [sum(basis[axis] for basis, bit in bits if bit == "1") for axis in (0, 1)]
            assert place == [row, block]
    assert found.rows[5:] == [[0, 0], [0, 0]], "each warp has a copy"


def compile_gemm(arch: int, tokens: int, *, gated: bool, intermediate: int = 2880) -> tuple[Compiled, int]:
    """With the tiling for so many tokens of 120b, and its N."""
    tiling = blackwell.plan(tokens, 4, 128)
    rows, columns = (intermediate, 2880) if gated else (2880, intermediate)
    bias = torch.empty((128, 2 if gated else 1, rows), device="meta")
    tiles, steps = -(-rows // 128), -(-columns // 128)
    matrix = blackwell.Matrix(bias, bias, bias, tiles, steps)

    def descriptor(dtype: str, shape: list[int], layout: gl.NVMMASharedLayout) -> str:
        return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{layout!r}>"

    signature = {
        "weights_desc": descriptor("u8", [128, 64], gl.NVMMASharedLayout(128, 8, 2, False, True)),
        "scales_desc": descriptor("u8", [1, 2, 256], gl.NVMMASharedLayout(0, 8, 3)),
        "tokens_desc": descriptor("fp8e4nv", [tiling.tokens, 128], gl.NVMMASharedLayout(128, 8, 2)),
        "table_ptr": "*i32",
        "out_ptr": "*fp8e4nv" if gated else "*bf16",
        "bias_ptr": "*bf16",
        "token_scales_ptr": "*fp32",
        "order_ptr": "*i32",
        "weights_ptr": "*fp32",
    }
    constants = blackwell.constants(tiling, matrix, 7.0)
    registers = blackwell.registers(matrix)
    kernel = compile_ahead(gemm, signature, constants, arch=arch, num_warps=4, maxnreg=registers, launch_pdl=True)
    assert kernel.registers <= registers
    return kernel, tiling.tokens


SIZES = [  # architecture, whether it is the first product, tokens, intermediate columns
    *((100, gated, tokens, 2880) for gated, tokens in ((True, 1), (True, 4096), (False, 4096))),
    *(
        pytest.param(arch, gated, tokens, width, marks=pytest.mark.slow)
        for arch in (100, 103)
        for gated in (True, False)
        for tokens in (1, 512, 1024, 8192)
        for width in (2880, 1440, 736, 384)
    ),
]


@pytest.mark.compiles
@needs_newest
@pytest.mark.parametrize(("arch", "gated", "tokens", "intermediate"), SIZES)
def test_kernels_multiply_with_block_scales(arch: int, gated: bool, tokens: int, intermediate: int) -> None:
    kernel, columns = compile_gemm(arch, tokens, gated=gated, intermediate=intermediate)
    parts = 2 if gated else 1
    copies = kernel.ptx.count("tcgen05.cp.cta_group::1.warpx4.32x128b")
    stages = copies // parts  # more than one if a short loop is unrolled
    assert copies == stages * parts > 0
    # an instruction has 32 values along k
    assert kernel.ptx.count("tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale") == 4 * copies
    assert kernel.ptx.count("tcgen05.commit") == stages + 1, "nothing waits for a single product"
    loads = kernel.ptx.count("cp.async.bulk.tensor.3d")
    assert loads % parts == 0 < loads, "the scales of units"
    assert kernel.ptx.count("cp.async.bulk.tensor.2d") * parts == loads * (parts + 1), "units, and tokens"
    assert re.search(r"tcgen05\.ld\.sync\.aligned\.32x32b\.x(16|32)\.", kernel.ptx)
    allocated = re.search(r"tcgen05\.alloc\S* \[[^]]*\], (\d+);", kernel.ptx)
    assert allocated is not None
    assert 2 * parts * columns <= 512 or columns == 128
    assert int(allocated[1]) <= 512


@pytest.mark.compiles
@pytest.mark.parametrize("counted", [True, False])
def test_sort_compiles(counted: bool) -> None:
    signature = {"x": "*bf16", "rows": "*fp8e4nv", "scales": "*fp32", "pairs": "i32"}
    signature |= dict.fromkeys(("ids", "given_counts", "ranks", "order", "table"), "*i32")
    constants = {"K": 4, "H": 2880, "E": 128, "TILE": 16, "BLOCK_E": 128, "BLOCK_H": 4096, "PDL": True}
    constants["BLOCK_P"] = 1 if counted else 256
    compile_ahead(blackwell._sort_kernel, signature, constants, arch=100, num_warps=4, launch_pdl=True)
