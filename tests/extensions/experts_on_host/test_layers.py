"""Experts in host memory: the host function against the native op, streaming against the reference, unpacking."""

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts
from oscine.extensions.experts_on_host.layers import MAX_TOKENS, HostLayers
from oscine.extensions.experts_on_host.packed import HostMatrix, published
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import native, reference
from oscine.ops.native.library import library, unavailable
from oscine.ops.target import Target
from tests.ops.bound import CPU_TARGET
from tests.ops.cases import MOE_CASES, MoeCase, MoeInputs, moe_inputs
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import compile_ahead, run_interpreted

CPU = torch.device("cpu")
ON_CPU = Target(CPU)
MANY = MoeCase("more tokens than the CPU computes", MAX_TOKENS + 1, num_experts=6)

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=unavailable() or "")


@pytest.fixture(autouse=True)
def threads_and_patience() -> Iterator[None]:
    yield
    library().oscine_set_num_threads(torch.get_num_threads())
    library().oscine_set_patience(1000)


def routed(inputs: MoeInputs) -> Routing:
    return reference.route(inputs.x_TH, inputs.router_weight_EH, inputs.router_bias_E, inputs.experts_per_token)


def host_layers(inputs: MoeInputs, target: Target = ON_CPU) -> HostLayers:
    return HostLayers(target, {0}, inputs.x_TH.shape[1], inputs.experts_per_token)


def on_cpu(experts: MxExperts) -> MxExperts:
    return MxExperts(*(getattr(experts, name).cpu() for name in experts.__slots__))


def by_host(inputs: MoeInputs, routing: Routing, target: Target = ON_CPU) -> Tensor:
    """[T, H]"""
    host = host_layers(inputs, target)
    experts = host.prepare_experts(on_cpu(inputs.experts))
    host.loaded()
    parts = host.moe(inputs.x_TH, routing, experts, inputs.swiglu_limit)
    return parts.sum(1) if parts.dim() == 3 else parts


@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.why)
def test_few_tokens_are_computed_by_the_cpu(case: MoeCase) -> None:
    inputs = moe_inputs(case, CPU, torch.float32)
    routing = routed(inputs)
    expected = native.moe(inputs.x_TH, routing, native.prepare_experts(inputs.experts), case.swiglu_limit)
    assert torch.equal(by_host(inputs, routing), expected)


def test_many_tokens_are_computed_by_the_device() -> None:
    inputs = moe_inputs(MANY, CPU, torch.float32)
    expected = reference.moe(inputs.x_TH, routed(inputs), inputs.experts, MANY.swiglu_limit)
    assert torch.equal(by_host(inputs, routed(inputs)), expected)


def test_steps_of_several_sizes_do_not_disturb_each_other() -> None:
    inputs = moe_inputs(MOE_CASES[2], CPU, torch.float32)
    host, routing = host_layers(inputs), routed(inputs)
    experts = [host.prepare_experts(inputs.experts) for _ in range(2)]
    results = [
        host.moe(inputs.x_TH[:count], Routing(routing.expert_ids_TK[:count], routing.weights_TK[:count]), layer, 7.0)
        for count in (37, 5, 37)
        for layer in experts
    ]
    for result in results:
        assert torch.equal(result, results[0][: len(result)])


def test_only_experts_of_the_host_are_computed_there() -> None:
    inputs = moe_inputs(MOE_CASES[0], CPU, torch.float32)
    host, routing = host_layers(inputs), routed(inputs)
    op = host.beside(reference.moe)
    assert torch.equal(
        op(inputs.x_TH, routing, inputs.experts, 7.0), reference.moe(inputs.x_TH, routing, inputs.experts, 7.0)
    )
    kept = host.prepare_experts(inputs.experts)
    assert torch.equal(op(inputs.x_TH, routing, kept, 7.0), host.moe(inputs.x_TH, routing, kept, 7.0))


def test_undefined_expert_ids_only_affect_their_own_rows() -> None:
    inputs = moe_inputs(MOE_CASES[2], CPU, torch.float32)
    routing = routed(inputs)
    wild = routing.expert_ids_TK.clone()
    wild[::2] = 1 << 40
    wild[1::4] = -7
    right = wild == routing.expert_ids_TK
    result = by_host(inputs, Routing(wild, routing.weights_TK))
    rows = right.all(1)
    assert rows.any()
    assert torch.equal(result[rows], by_host(inputs, routing)[rows])


def packed_matrix(experts: MxExperts) -> list[tuple[HostMatrix, Tensor, Tensor]]:
    """Both packed matrices, each with its published blocks and scales."""
    packed = native.prepare_experts(experts)
    return [
        (
            HostMatrix(packed.gate_up, experts.gate_up_bias, packed.gate_up_blocks),
            experts.gate_up_blocks,
            experts.gate_up_scales,
        ),
        (HostMatrix(packed.down, experts.down_bias, packed.down_blocks), experts.down_blocks, experts.down_scales),
    ]


SIZES = ((96, 160), (32, 32), (2880 // 5, 96))  # hidden, intermediate


def unpacked_in_interpreter() -> None:
    from oscine.extensions.experts_on_host.unpack import unpack
    from oscine.ops.moe import triton

    for hidden, intermediate in SIZES:
        experts = random_experts(3, hidden, intermediate, CPU, torch.float32, scales=(0, 255))
        halved = triton.prepare_experts(experts)
        both = halved.gate_up_blocks, halved.down_blocks
        for (matrix, _, scales), wanted in zip(packed_matrix(experts), both, strict=True):
            blocks, found = torch.full_like(wanted, 255), torch.full_like(scales, 255)
            unpack(matrix.packed, blocks, found)
            assert torch.equal(blocks, wanted)
            assert torch.equal(found, scales)


def streamed_in_interpreter() -> None:
    """Without a GPU, CUDA streams and events are replaced, and all work is done in the order of the calls."""
    from oscine.extensions.experts_on_host import stream

    queue = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda other: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "Stream", lambda *args, **options: queue)
        patch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream=None: None))
        patch.setattr(torch.cuda, "current_stream", lambda: queue)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        case = MoeCase("experts that are no multiple of a piece", 5, hidden=32, intermediate=64)
        every = [moe_inputs(case, CPU, torch.float32, seed) for seed in range(2)]
        layers = [tuple(matrix for matrix, _, _ in packed_matrix(inputs.experts)) for inputs in every]
        x_TH, routing = every[0].x_TH, routed(every[0])
        expert_bytes = layers[0][0].packed.shape[1]
        for piece_bytes in (2 * expert_bytes + 1, expert_bytes - 1):  # a single expert may be larger than a piece
            patch.setattr(stream, "PIECE_BYTES", piece_bytes)
            of_layers = stream.ExpertStream(CPU_TARGET, layers)
            for index in (0, 1, 0):
                parts = of_layers.moe(x_TH, routing, *layers[index], 7.0)
                expected = reference.moe(x_TH, routing, every[index].experts, 7.0)
                assert float((parts.sum(1) - expected).norm() / expected.norm()) < 1e-6


def sent_in_interpreter() -> None:
    from oscine.extensions.experts_on_host.transfer import receive, send

    inputs = moe_inputs(MOE_CASES[2], CPU, torch.float32)
    (ids_TK, weights_TK), tokens = routed(inputs)[:2], len(inputs.x_TH)
    x_TH, sent_ids_TK, sent_weights_TK = (
        torch.empty_like(inputs.x_TH),
        torch.empty_like(ids_TK),
        torch.empty_like(weights_TK),
    )
    send(inputs.x_TH, Routing(ids_TK.int(), weights_TK), x_TH, sent_ids_TK, sent_weights_TK)
    assert torch.equal(x_TH, inputs.x_TH)
    assert torch.equal(sent_ids_TK, ids_TK)
    assert torch.equal(sent_weights_TK, weights_TK)
    assert torch.equal(receive(x_TH[:tokens], CPU), x_TH)


def in_interpreter() -> None:
    unpacked_in_interpreter()
    streamed_in_interpreter()
    sent_in_interpreter()


@pytest.mark.slow
def test_kernels_on_a_cpu() -> None:
    """Unpacked blocks have the layout of the portable kernels; layers are copied in pieces; tokens are sent and
    received."""
    run_interpreted(in_interpreter)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_published_weights_are_restored(sizes: tuple[int, int]) -> None:
    for matrix, blocks, scales in packed_matrix(random_experts(3, *sizes, CPU, torch.float32, scales=(0, 255))):
        found = published(matrix)
        assert torch.equal(found[0], blocks)
        assert torch.equal(found[1], scales)


@pytest.mark.compiles
@pytest.mark.parametrize("arch", [86, 90, 120])
def test_the_unpack_kernel_fits(arch: int) -> None:
    from oscine.extensions.experts_on_host.unpack import unpack_kernel

    assert arch in CHIPS
    integers = dict.fromkeys(("groups", "num_rows", "num_blocks"), "i32")
    pointers = {"words": "*i32", "packed_bytes": "*u8", "blocks": "*i32", "scales": "*u8"}
    compile_ahead(unpack_kernel, pointers | integers, {"BLOCK_B": 128}, arch=arch, num_warps=8)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 5, MAX_TOKENS, MAX_TOKENS + 1, 700])
def test_experts_on_host_match_the_reference_on_a_gpu(num_tokens: int) -> None:
    cuda = torch.device("cuda")
    inputs = moe_inputs(MoeCase("", num_tokens, 2880, 2880, num_experts=32), cuda, torch.bfloat16)
    routing = routed(inputs)
    expected = reference.moe(inputs.x_TH.float(), routing, inputs.experts, 7.0)
    found = by_host(inputs, routing, Target.of(cuda)).float()
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.gpu
def test_released_layers_wait_for_queued_host_functions() -> None:
    """Otherwise a host function would read freed memory."""
    cuda = torch.device("cuda")
    inputs = moe_inputs(MoeCase("", 5, 2880, 2880, num_experts=32), cuda, torch.bfloat16)
    routing = routed(inputs)
    expected = reference.moe(inputs.x_TH.float(), routing, inputs.experts, 7.0)
    by_host(inputs, routing, Target.of(cuda))  # compiles the kernels
    host = host_layers(inputs, Target.of(cuda))
    experts = host.prepare_experts(on_cpu(inputs.experts))
    host.loaded()
    torch.cuda._sleep(1_000_000_000)  # cycles: half a second in which the host function is queued
    found = host.moe(inputs.x_TH, routing, experts, inputs.swiglu_limit).sum(1)
    del host, experts
    for dtype, width in ((torch.float32, 2880), (torch.float32, 2880), (torch.int64, 4), (torch.float32, 4)):
        torch.full((MAX_TOKENS, width), 1000, dtype=dtype, pin_memory=True)  # reuses the freed memory
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.gpu
def test_the_host_function_is_captured_in_a_cuda_graph() -> None:
    cuda = torch.device("cuda")
    inputs = moe_inputs(MoeCase("", 4, 2880, 2880, num_experts=32), cuda, torch.bfloat16)
    routing, host = routed(inputs), host_layers(inputs, Target.of(cuda))
    layers = [host.prepare_experts(on_cpu(inputs.experts)) for _ in range(3)]
    host.loaded()
    x_TH = inputs.x_TH.clone()

    def steps() -> Tensor:
        out_TH = x_TH
        for experts in layers:
            out_TH = host.moe(out_TH, routing, experts, 7.0).sum(1).to(x_TH.dtype)
        return out_TH

    steps()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TH = steps()
    for seed in range(3):
        x_TH.copy_(torch.randn(x_TH.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        found = out_TH.clone()
        assert torch.equal(found, steps())


@pytest.mark.gpu
def test_prompts_stream_the_experts_of_several_layers() -> None:
    """Each layer has its own weights, and all layers use the same places on the GPU."""
    cuda = torch.device("cuda")
    every = [moe_inputs(MoeCase("", 300, 1440, 1440, num_experts=32), cuda, torch.bfloat16, seed) for seed in range(4)]
    host, routings = host_layers(every[0], Target.of(cuda)), [routed(inputs) for inputs in every]
    layers = [host.prepare_experts(on_cpu(inputs.experts)) for inputs in every]
    host.loaded()
    found = [host.moe(every[0].x_TH, routings[i % 4], layers[i % 4], 7.0).float().sum(1) for i in range(12)]
    for i in range(12):
        expected = reference.moe(every[0].x_TH.float(), routings[i % 4], every[i % 4].experts, 7.0)
        assert float((found[i] - expected).norm() / expected.norm()) < 0.01
