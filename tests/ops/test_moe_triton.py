"""The portable mixture of experts: interpreted on a CPU, compiled ahead, and on a GPU against float32."""

from itertools import product

import pytest
import torch
from torch import Tensor

from oscine.ops.interface import Routing
from oscine.ops.moe import reference, triton
from oscine.ops.moe.mxfp4 import MAGNITUDES
from tests.ops.bound import bound
from tests.ops.cases import MOE_CASES, MoeCase, MoeInputs, moe_inputs
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import compile_ahead, marked, run_interpreted

CPU = torch.device("cpu")
# one of every tiling, with experts that have several tiles and one that has none
TILED_CASES = tuple(MoeCase(f"{tokens} tokens", tokens, num_experts=6) for tokens in (24, 30, 100, 200))


def routed(inputs: MoeInputs) -> Routing:
    return reference.route(inputs.x_TH, inputs.router_weight_EH, inputs.router_bias_E, inputs.experts_per_token)


def counted(routing: Routing, num_experts: int) -> Routing:
    """With counts and ranks, the latter from the last token to the first: any order will do."""
    flat = routing.expert_ids_TK.flatten()
    chosen = torch.nn.functional.one_hot(flat.long(), num_experts)
    ranks = (chosen.flip(0).cumsum(0).flip(0) - 1).gather(1, flat.long()[:, None])
    return Routing(
        routing.expert_ids_TK.int(), routing.weights_TK, chosen.sum(0).int(), ranks.int().view_as(routing.expert_ids_TK)
    )


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def relative_error(inputs: MoeInputs, routing: Routing) -> float:
    parts_TKH = bound(triton.moe)(inputs.x_TH, routing, triton.prepare_experts(inputs.experts), inputs.swiglu_limit)
    assert parts_TKH.dtype == inputs.x_TH.dtype
    expected = reference.moe(inputs.x_TH.float(), routing, inputs.experts, inputs.swiglu_limit)
    return error(parts_TKH.float().sum(1), expected)


def in_interpreter() -> None:
    for case in (*MOE_CASES, *TILED_CASES[:1]):
        inputs = moe_inputs(case, CPU, torch.float32)
        assert relative_error(inputs, routed(inputs)) < 1e-6, case.why
    assert relative_error(inputs, counted(routed(inputs), 6)) < 1e-6
    edges = moe_inputs(MOE_CASES[2], CPU, torch.float32)
    edges.experts.gate_up_scales[:, ::3] = 0  # 2^-127, a subnormal number
    edges.experts.down_scales[:, ::3] = 129  # more than 2
    assert relative_error(edges, routed(edges)) < 1e-6
    edges.experts.down_scales[:, 5, 0] = 255
    out = bound(triton.moe)(edges.x_TH, routed(edges), triton.prepare_experts(edges.experts), 7.0)
    assert out[..., 5].isnan().all()
    assert out[..., 6].isfinite().all()
    assert bound(triton.moe)(
        edges.x_TH[:0], Routing(*(t[:0] for t in routed(edges)[:2])), edges.experts, 7.0
    ).shape == (
        0,
        4,
        96,
    )


def test_kernels_on_a_cpu() -> None:
    run_interpreted(in_interpreter)


def run_assembler(text: str, word: int, count: int = 4) -> list[int]:
    """The `count` registers that the kernel's own instructions make of $4, by a reading of each in plain integers."""
    values = {"$4": word}

    def read(operand: str) -> int:
        return values[operand] if operand in values else int(operand, 0)

    for line in text.splitlines():
        opcode, _, rest = line.strip().rstrip(";").partition(" ")
        if opcode in ("", "{", "}", ".reg"):
            continue
        target, *operands = rest.split(", ")
        a, b, c, d = (read(operand) for operand in (*operands, "0", "0", "0")[:4])
        values[target] = {
            "mov.b32": lambda a=a: a,
            "shl.b32": lambda a=a, b=b: a << b & 0xFFFFFFFF,
            "shr.u32": lambda a=a, b=b: a >> b,
            "and.b32": lambda a=a, b=b: a & b,
            "or.b32": lambda a=a, b=b: a | b,
            "prmt.b32": lambda a=a, b=b, c=c: permute(a | b << 32, c),
            "lop3.b32": lambda a=a, b=b, c=c, d=d: sum(
                (d >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32)
            ),
            "fma.rn.bf16x2": lambda a=a, b=b, c=c: packed_fma(a, b, c),
        }[opcode]()
    return [values[f"${index}"] for index in range(count)]


def permute(pair: int, selector: int) -> int:
    return sum((pair >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))


def packed_fma(a: int, b: int, c: int) -> int:
    """Two bfloat16 values in each; the sums here are exact in float64."""
    halves = [torch.tensor([x & 0xFFFF, x >> 16]).to(torch.uint16).view(torch.bfloat16).double() for x in (a, b, c)]
    low, high = (halves[0] * halves[1] + halves[2]).bfloat16().view(torch.int16).tolist()
    return (low & 0xFFFF) | (high & 0xFFFF) << 16


def test_the_assembler_knows_every_byte() -> None:
    values = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)]).bfloat16().view(torch.int16).tolist()
    bits = [value & 0xFFFF for value in values]
    for first in range(0, 256, 4):
        low, high = [[bits[byte >> shift & 15] for byte in range(first, first + 4)] for shift in (0, 4)]
        word = sum((first + i) << 8 * i for i in range(4))
        expected = [x[i] | x[i + 1] << 16 for x in (low, high) for i in (0, 2)]
        assert run_assembler(triton._TO_BFLOAT16.value, word) == expected, first


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("gated", "pairs"), marked(product((True, False), (4, 65536)), newest=[(False, 4)], oldest=[(True, 65536)])
)
def test_kernels_of_many_tokens_multiply_by_warp_groups(gated: bool, pairs: int) -> None:
    tiling = triton._tiling(CHIPS[90], pairs, 128)
    options = {name: tiling.pop(name) for name in ("num_warps", "num_stages")}
    if not gated:
        tiling["BLOCK_N"] *= 2
    pointers = {"x": "*bf16", "blocks": "*u8", "scales": "*u8", "bias": "*bf16", "out": "*bf16"}
    pointers |= {"counts": "*i32", "slots": "*i32"} | ({} if gated else {"weights": "*fp32"})
    kernel = compile_ahead(
        triton._experts_kernel,
        pointers | {"num_tokens": "i32", "tiles": "i32", "limit": "fp32"},
        {"E": 128, "K": 4, "R": 2880, "F": 2880, "BLOCK_E": 128, "PTX": True, "PDL": True, "added": None}
        | ({"weights": None} if gated else {})
        | tiling,
        launch_pdl=True,
        **options,
    )
    assert ("HGMMA" in kernel.sass) == (pairs == 65536)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The GPU, where torch.empty gives NaN or -7."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        tensor: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    return torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*MOE_CASES, *TILED_CASES], ids=lambda case: case.why)
def test_errors_are_those_of_the_dtype(device: torch.device, case: MoeCase) -> None:
    for dtype, allowed in ((torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        inputs = moe_inputs(case, device, dtype)
        assert relative_error(inputs, routed(inputs)) < allowed
        assert relative_error(inputs, counted(routed(inputs), case.num_experts)) < allowed


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 17, 300])
def test_published_width(device: torch.device, tokens: int) -> None:
    inputs = moe_inputs(MoeCase("published", tokens, 2880, 2880, 8), device, torch.bfloat16)
    assert relative_error(inputs, counted(routed(inputs), 8)) < 1e-2


@pytest.mark.gpu
def test_a_graph_replays_on_new_inputs(device: torch.device) -> None:
    inputs = moe_inputs(MOE_CASES[2], device, torch.bfloat16)
    fixed, experts = routed(inputs), triton.prepare_experts(inputs.experts)
    bound(triton.moe)(inputs.x_TH, fixed, experts, 7.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = bound(triton.moe)(inputs.x_TH, fixed, experts, 7.0)
    for seed in (1, 2):
        fresh = moe_inputs(MOE_CASES[2], device, torch.bfloat16, seed)
        inputs.x_TH.copy_(fresh.x_TH)
        fixed.expert_ids_TK.copy_(routed(fresh).expert_ids_TK)
        graph.replay()
        expected = reference.moe(inputs.x_TH.float(), fixed, inputs.experts, 7.0)
        assert error(out.float().sum(1), expected) < 1e-2
