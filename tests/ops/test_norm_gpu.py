"""RMSNorm and the router in Triton: interpreted on a CPU, compiled ahead, and on a GPU against float32."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from oscine.ops.comm.sums import ALONE
from oscine.ops.interface import Routing
from oscine.ops.launch import arrivals
from oscine.ops.norm import hopper, reference, triton
from oscine.ops.planes import wanted
from oscine.ops.target import ActivationDtype
from tests.ops.bound import bound, target_of
from tests.ops.cases import NORM_CASES
from tests.ops.chips import CHIPS
from tests.ops.compile_ahead import TO_E4M3, Compiled, compile_ahead, marked, run_interpreted
from tests.ops.test_planes import POINTERS, check_planes, round_as_torch

CPU = torch.device("cpu")
EPS = 1e-5
NO_PLANES = {**dict.fromkeys(POINTERS), "PLANES": 0}

# (tokens, partial sums or 0 for [T, H], hidden, experts, experts per token): both launches of norm_route, full and
# ragged tiles, with and without counts, widths that are no power of two
ROUTE_CASES = (
    (0, 0, 96, 5, 4),
    (1, 4, 2880, 128, 4),
    (3, 2, 1, 3, 1),
    (9, 3, 96, 32, 4),
    (16, 0, 96, 5, 5),
    (17, 12, 320, 32, 4),
    (600, 2, 96, 6, 3),
)

Inputs = tuple[Tensor, Tensor, float, Tensor, Tensor, Tensor, int]
NormRoute = Callable[..., tuple[Tensor, Tensor, Routing]]


def inputs(
    tokens: int,
    partials: int,
    hidden: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
) -> Inputs:
    """The arguments of norm_route; partial sums are float32."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x = normal(tokens, partials, hidden).float() if partials else normal(tokens, hidden)
    router = (normal(experts, hidden).float() / hidden**0.5).to(dtype)
    return x, normal(hidden), EPS, normal(tokens, hidden), router, normal(experts), k


def check_routing(routing: Routing, y_TH: Tensor, router_EH: Tensor, bias_E: Tensor) -> None:
    """The K largest logits, in order, each expert once; counts and ranks agree with the ids."""
    logits_TE = y_TH.double() @ router_EH.double().T + bias_E.double()
    ids_TK = routing.expert_ids_TK.long()
    tokens, k = ids_TK.shape
    mine_TK = logits_TE.gather(1, ids_TK)
    torch.testing.assert_close(mine_TK, logits_TE.topk(k).values, atol=1e-4, rtol=0)
    torch.testing.assert_close(routing.weights_TK, mine_TK.softmax(-1).float(), atol=1e-5, rtol=0)
    assert (ids_TK.sort(-1).values.diff(dim=-1) > 0).all()
    if tokens <= triton.UNCOUNTED_TOKENS:
        assert routing.counts_E is None
        assert routing.ranks_TK is None
        return
    assert routing.counts_E is not None
    assert routing.ranks_TK is not None
    assert torch.equal(routing.counts_E.long(), torch.bincount(ids_TK.flatten(), minlength=len(bias_E)))
    assert (routing.ranks_TK >= 0).all()
    assert (routing.ranks_TK < routing.counts_E[ids_TK]).all()
    assert (ids_TK * tokens + routing.ranks_TK).unique().numel() == tokens * k


def check_hoppers(arguments: Inputs, activation_dtype: ActivationDtype = "auto") -> None:
    """What Triton's own backend gives, and where they are wanted the planes of the first result.

    With one plane the compiler may add up a row in another order. A unit in the last place of its root mean square
    rounds some 4 % of rows of 2,880 values otherwise.
    """
    target = replace(target_of(arguments[0].device), activation_dtype=activation_dtype)
    y, total, routing = hopper.norm_route(target, *arguments)
    plain_y, plain_total, plain = triton.norm_route(target, *arguments)
    assert torch.equal(total, plain_total)
    equal_T = (y == plain_y).all(1)
    torch.testing.assert_close(y, plain_y, rtol=2**-7, atol=0)
    assert equal_T.all() or (activation_dtype == "fp8" and equal_T.float().mean() > 0.95)
    assert torch.equal(routing.expert_ids_TK[equal_T], plain.expert_ids_TK[equal_T])
    assert torch.equal(routing.weights_TK[equal_T], plain.weights_TK[equal_T])
    assert (routing.counts_E is None) == (plain.counts_E is None)
    count = wanted(target, len(y), arguments[-1], len(arguments[-2]))
    assert (routing.prepared.number if routing.prepared else 0) == count
    if count:
        check_planes(routing.prepared, y)


def check_leaving(arguments: Inputs, leaves: bool) -> None:
    """The choice of a single token is left to the experts, if they can choose; else it is made."""
    y, total, routing = hopper.norm_route(target_of(arguments[0].device), *arguments, leave_choice=True)
    plain_y, plain_total, plain = hopper.norm_route(target_of(arguments[0].device), *arguments)
    assert torch.equal(y, plain_y)
    assert torch.equal(total, plain_total)
    assert plain.logits_TE is None
    if not leaves:
        assert routing.logits_TE is None
        assert torch.equal(routing.expert_ids_TK, plain.expert_ids_TK)
        return
    assert routing.logits_TE is not None
    top = routing.logits_TE.topk(arguments[-1])
    assert torch.equal(top.indices.int(), plain.expert_ids_TK)
    torch.testing.assert_close(top.values.softmax(-1), plain.weights_TK)
    assert not arrivals(y.device).any()


def in_interpreter() -> None:
    round_as_torch()
    for tokens, hidden, _ in NORM_CASES:
        x, weight_H, _, residual_TH, *_ = inputs(tokens, 0, hidden, 1, 1, torch.float32, CPU)
        for residual in (residual_TH, None):
            y, total = bound(triton.rms_norm)(x, weight_H, EPS, residual)
            expected_y, expected_total = reference.rms_norm(x, weight_H, EPS, residual)
            torch.testing.assert_close(y, expected_y)
            assert torch.equal(total, expected_total)
            y, total, squares_TS, _ = bound(triton.undivided_norm)(x, weight_H, residual)
            mean_T1 = squares_TS.sum(1, keepdim=True) / hidden
            torch.testing.assert_close(y * torch.rsqrt(mean_T1 + EPS), expected_y)
            assert torch.equal(total, expected_total)
    for case in ROUTE_CASES:
        arguments = inputs(*case, torch.float32, CPU)
        y, total, routing = bound(triton.norm_route)(*arguments)
        expected_y, expected_total = reference.rms_norm(*arguments[:4])
        torch.testing.assert_close(y, expected_y, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(total, expected_total)
        check_routing(routing, y, arguments[4], arguments[5])
        assert not arrivals(CPU).any()
    for case in ((0, 2, 96, 5, 4), (1, 3, 2880, 5, 4), (4, 0, 288, 4, 4), (7, 2, 96, 16, 4), (20, 2, 96, 32, 4)):
        check_hoppers(inputs(*case, torch.bfloat16, CPU))
    check_hoppers(inputs(9, 2, 96, 8, 4, torch.bfloat16, CPU))
    for tokens in (0, 4, 33):
        check_hoppers(inputs(tokens, 2, 192, 5, 4, torch.bfloat16, CPU), "fp8")
    for tokens, experts, leaves in ((1, 32, True), (2, 32, False), (1, 5, False)):
        check_leaving(inputs(tokens, 2, 96, experts, 4, torch.bfloat16, CPU), leaves)
    equal = inputs(2, 0, 96, 32, 4, torch.float32, CPU)
    equal[4].zero_()
    equal[5].zero_()
    assert bound(triton.norm_route)(*equal)[2].expert_ids_TK.tolist() == [[0, 1, 2, 3]] * 2


def test_kernels_on_a_cpu() -> None:
    run_interpreted(in_interpreter)


@cache
def compiled_norm(planes: int = 0) -> Compiled:
    return compile_ahead(
        triton._norm_kernel,
        {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "y": "*bf16", "total": "*bf16", "counts": "*i32"}
        | {"eps": "fp32"}
        | (POINTERS if planes else {}),
        {"H": 2880, "J": 12, "E": 128, "BLOCK_H": 4096, "BLOCK_E": 128, "PDL": True}
        | ALONE
        | ({"PLANES": planes} if planes else NO_PLANES),
        launch_pdl=True,
        **triton.ALL_LOADS_FIRST,
    )


@cache
def compiled_undivided(rank: int = 0) -> Compiled:
    adapters = {"keys": "*i32", "first": "*bf16", "low": "*fp32"}
    return compile_ahead(
        triton._undivided_norm_kernel,
        {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "y": "*bf16", "total": "*bf16", "squares": "*fp32"}
        | {"slot_stride": "i32"}
        | (adapters if rank else {}),
        {"H": 2880, "J": 12, "BLOCK_H": triton.PART_H, "PDL": True, "RANK": rank}
        | ALONE
        | ({} if rank else dict.fromkeys(adapters)),
        launch_pdl=True,
        **triton.BESIDE_EXPERTS,
    )


@cache
def compiled_fused(planes: int = 0) -> Compiled:
    inputs = {"x": "*fp32", "residual": "*bf16", "weight": "*bf16", "router_weight": "*bf16", "router_bias": "*bf16"}
    outputs = {"y": "*bf16", "total": "*bf16", "logits": "*fp32", "arrivals": "*i32", "expert_ids": "*i32"}
    return compile_ahead(
        triton._norm_route_kernel,
        inputs | outputs | {"weights": "*fp32", "eps": "fp32"} | (POINTERS if planes else {}),
        {
            "H": 2880,
            "J": 4,
            "E": 128,
            "K": 4,
            "CHOOSES": True,
            "BLOCK_H": 4096,
            "BLOCK_R": triton.FUSED_ROWS,
            "BLOCK_E": 128,
        }
        | {"PDL": True}
        | ALONE
        | ({"PLANES": planes} if planes else NO_PLANES),
        launch_pdl=True,
        **triton.ALL_LOADS_FIRST,
    )


@cache
def compiled_route(tokens: int) -> Compiled:
    tiling = triton._tiling(CHIPS[90], tokens, 2880)
    options = {name: tiling.pop(name) for name in ("num_warps", "maxnreg") if name in tiling}
    pointers = {"y": "*bf16", "router_weight": "*bf16", "router_bias": "*bf16", "partial": "*fp32", "arrivals": "*i32"}
    outputs = {"expert_ids": "*i32", "weights": "*fp32", "counts": "*i32", "ranks": "*i32"}
    return compile_ahead(
        triton._route_kernel,
        pointers | outputs | {"num_tokens": "i32"},
        {"H": 2880, "E": 128, "K": 4, "BLOCK_E": 128, "BLOCK_K": 4, "PDL": True} | tiling,
        launch_pdl=True,
        **options,
    )


@pytest.mark.compiles
@pytest.mark.parametrize(
    "make",
    [
        compiled_norm,
        compiled_undivided,
        lambda: compiled_undivided(16),
        compiled_fused,
        lambda: compiled_route(64),
        pytest.param(lambda: compiled_route(16384), marks=pytest.mark.variant),
    ],
    ids=["norm", "undivided", "undivided and shrunk", "fused", "route few", "route many"],
)
def test_kernels_compile_for_hopper(make: Callable[[], Compiled]) -> None:
    make()


@pytest.mark.compiles
@pytest.mark.parametrize("count", marked((1, 2), newest=[2], oldest=[1]))
def test_planes_are_stored_in_words_without_spills(count: int) -> None:
    for make in (compiled_norm, compiled_fused):
        kernel, plain = make(planes=count), make()
        assert kernel.spills == 0
        assert "E4M3" in kernel.sass
        assert "STG.E.U8" not in kernel.sass
        assert kernel.unpacked_after == (TO_E4M3 if count == 2 else set())
        assert "E4M3" not in plain.sass


@pytest.mark.compiles
def test_weights_load_before_the_wait_and_partial_sums_together() -> None:
    for kernel in (compiled_fused(), compiled_fused(planes=2), compiled_route(64)):
        before, after = kernel.sass.split("ACQBULK")
        assert "LDG.E.128" in before
        assert "STG" not in before
        assert "LDG.E.128" in after
        assert "LDG.E.U16" not in after
    for kernel in (compiled_norm(), compiled_norm(planes=2)):
        loads = kernel.sass.split("ACQBULK")[1].split("FADD")[0]
        assert loads.count("LDG.E.64") == 13  # 12 partial sums and the residual


@pytest.mark.compiles
def test_the_undivided_norm_finds_room_beside_the_experts() -> None:
    kernel = compiled_undivided()
    assert kernel.sass.split("ACQBULK")[1].split("FADD")[0].count("LDG.E.64") == 13
    assert kernel.registers * 128 <= 65536 - 2 * 416 * 64  # what two of their programs leave of a processor's
    assert kernel.shared <= 1024


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """The GPU, where torch.empty gives NaN or -7."""
    empty = torch.empty

    def poisoned(*size: object, **options: object) -> Tensor:
        tensor: Tensor = empty(*size, **options)  # type: ignore[call-overload]
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield torch.device("cuda")
    assert not arrivals(torch.device("cuda")).any()


def error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 5, 16, 17, 129, 513, 3001, 9000])
@pytest.mark.parametrize("partials", [0, 4, 12])
def test_errors_are_those_of_bfloat16(device: torch.device, tokens: int, partials: int) -> None:
    arguments = inputs(tokens, partials, 2880, 128, 4, torch.bfloat16, device)
    x, weight_H, eps, residual_TH, router_EH, bias_E, _ = arguments
    y, total, routing = bound(triton.norm_route)(*arguments)
    x_TH = x.sum(1) if partials else x.float()
    exact_y, exact_total = reference.rms_norm(x_TH, weight_H.float(), eps, residual_TH.float())
    torch_y, torch_total = reference.rms_norm(x, weight_H, eps, residual_TH)
    assert error(total, exact_total) <= 2 * error(torch_total, exact_total)
    assert error(y, exact_y) <= 2 * error(torch_y, exact_y)
    assert y.dtype == total.dtype == torch.bfloat16
    check_routing(routing, y, router_EH, bias_E)
    alone_y, alone_total = bound(triton.rms_norm)(*arguments[:4])
    assert torch.equal(alone_y, y)
    assert torch.equal(alone_total, total)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ROUTE_CASES, ids=str)
def test_small_widths(device: torch.device, case: tuple[int, int, int, int, int]) -> None:
    arguments = inputs(*case, torch.bfloat16, device)
    y, _, routing = bound(triton.norm_route)(*arguments)
    check_routing(routing, y, arguments[4], arguments[5])


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [0, 1, 2, 4, 5, 16, 17, 64, 128, 129])
@pytest.mark.parametrize("hidden", [288, 2880])
def test_the_norm_of_hopper_adds_planes(device: torch.device, tokens: int, hidden: int) -> None:
    check_hoppers(inputs(tokens, 4, hidden, 128, 4, torch.bfloat16, device))


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 129, 3000])
@pytest.mark.parametrize("hidden", [320, 2880])
def test_the_norm_of_hopper_adds_a_plane(device: torch.device, tokens: int, hidden: int) -> None:
    check_hoppers(inputs(tokens, 4, hidden, 128, 4, torch.bfloat16, device), "fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 16, 40, 1100])
def test_nan_stays_in_its_token_and_in_range(device: torch.device, tokens: int) -> None:
    arguments = inputs(tokens, 0, 2880, 128, 4, torch.bfloat16, device)
    clean = bound(triton.norm_route)(*arguments)
    arguments[0][1] = torch.nan
    y, _, routing = bound(triton.norm_route)(*arguments)
    assert routing.expert_ids_TK.ge(0).all()
    assert routing.expert_ids_TK.lt(128).all()
    assert (routing.expert_ids_TK.sort(-1).values.diff(dim=-1) > 0).all()
    assert routing.weights_TK[1].isnan().all()
    assert torch.equal(y[2:], clean[0][2:])
    assert torch.equal(routing.weights_TK[2:], clean[2].weights_TK[2:])


@pytest.mark.hopper
def test_the_choice_of_one_token_is_left_on_gpu() -> None:
    device = torch.device("cuda")
    check_leaving(inputs(1, 8, 2880, 128, 4, torch.bfloat16, device), leaves=True)
    check_leaving(inputs(1, 4, 2880, 32, 4, torch.bfloat16, device), leaves=True)


@pytest.mark.parametrize(
    "norm_route",
    [
        pytest.param(bound(triton.norm_route), marks=pytest.mark.gpu, id="triton"),
        pytest.param(bound(hopper.norm_route), marks=pytest.mark.hopper, id="hopper"),
    ],
)
@pytest.mark.parametrize("tokens", [1, 16, 70])
def test_a_graph_replays_on_new_inputs(device: torch.device, norm_route: NormRoute, tokens: int) -> None:
    arguments = inputs(tokens, 4, 2880, 128, 4, torch.bfloat16, device)
    norm_route(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # back to back, as dependent launches
            y, total, routing = norm_route(*arguments)
    for seed in (1, 2):
        fresh = inputs(tokens, 4, 2880, 128, 4, torch.bfloat16, device, seed)
        arguments[0].copy_(fresh[0])
        graph.replay()
        expected_y, expected_total, _ = bound(triton.norm_route)(fresh[0], *arguments[1:])
        assert torch.equal(y, expected_y)
        assert torch.equal(total, expected_total)
        check_routing(routing, y, arguments[4], arguments[5])
        if routing.prepared is not None:
            check_planes(routing.prepared, y)
