"""Adapters in the experts' kernels: Hopper's in an interpreter and on a GPU, the portable ones likewise."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts, random_routing
from oscine.extensions.adapters.kernels import Kernels
from oscine.extensions.adapters.products import Backend, Reference
from oscine.extensions.adapters.steps import Experts
from oscine.ops.interface import Routing
from oscine.ops.moe import hopper, reference
from oscine.ops.moe import triton as portable
from oscine.ops.moe.hopper_repack import UNIT, gate_up_order
from tests.ops.bound import bound, target_of
from tests.ops.compile_ahead import run_interpreted
from tests.ops.gluon_interpreter import run_gluon
from tests.ops.test_moe_hopper import compile_gemm, in_float
from tests.ops.test_planes import round_as_torch

CPU = torch.device("cpu")


class Case(NamedTuple):
    tokens: int
    experts: int
    hidden: int
    inner: int
    device: torch.device = CPU
    rank: int = 16
    slots: int = 2
    chooses: bool = False  # the op finds the experts

    def factors(self) -> dict[str, Tensor]:
        """Of adapters, which change the products by as much as they are."""
        shapes = {
            "gate_up_in": (self.experts, self.rank, self.hidden),
            "gate_up_out": (self.experts, 2 * self.inner, self.rank),
            "down_in": (self.experts, self.rank, self.inner),
            "down_out": (self.experts, self.hidden, self.rank),
        }
        return {
            name: (torch.randn(self.slots, *shape, device=self.device) / shape[-1] ** 0.5).bfloat16()
            for name, shape in shapes.items()
        }


def error(
    moe: Callable[..., Tensor], prepare: Callable[..., Any], backend: Backend, case: Case, *, reorders: bool
) -> tuple[float, float]:
    """Relative errors with adapters: of the op, and of the same without adapters."""
    tokens, experts, hidden, inner, device, _, slots, chooses = case
    torch.manual_seed(tokens)
    routing, dtype = random_routing(tokens, experts, 4, device), torch.bfloat16
    published = random_experts(experts, hidden, inner, device, dtype, scales=(118, 123))
    x_TH, factors = torch.randn(tokens, hidden, device=device).bfloat16(), case.factors()
    slot_T = (torch.arange(tokens, device=device) % (slots + 1) - 1).int()  # the first token has no adapter
    if chooses:
        slot_T.fill_(1)

    def added(backend: Backend, routing: Routing, factors: dict[str, Tensor]) -> Experts:
        return Experts(backend, slot_T, routing, factors)

    in_floats = added(Reference(), routing, {name: factor.float() for name, factor in factors.items()})
    exact = reference.moe(x_TH.float(), routing._replace(added=in_floats), in_float(published), 7.0)
    if reorders:
        order = gate_up_order(inner, device)
        order = torch.nn.functional.pad(order, (0, -len(order) % UNIT), value=-1)
        out_of = factors["gate_up_out"]
        factors["gate_up_out"] = torch.where((order >= 0)[:, None], out_of[:, :, order.clamp(min=0)], 0)
    if tokens <= 16:
        routing = Routing(routing.expert_ids_TK, routing.weights_TK)
    if chooses:
        logits_TE = torch.full((1, experts), -9.0, device=device)
        logits_TE[0, routing.expert_ids_TK[0].long()] = routing.weights_TK[0].log()
        unset = torch.full_like(routing.expert_ids_TK, -1), torch.full_like(routing.weights_TK, torch.nan)
        routing = Routing(*unset, logits_TE=logits_TE)
    ours = routing._replace(added=added(backend, routing, factors))
    found = [bound(moe)(x_TH, one, prepare(published), 7.0).double().sum(1) for one in (ours, routing)]
    if not chooses:
        assert torch.equal(found[0][slot_T < 0], found[1][slot_T < 0]), "tokens without adapters"
    return tuple(float((one - exact).norm() / exact.norm()) for one in found)  # type: ignore[return-value]


def check_hopper(backend: Backend, case: Case) -> None:
    def prepare(published: Any) -> Any:
        return hopper.prepare_experts(target_of(case.device), published)

    ours, without = error(hopper.moe, prepare, backend, case, reorders=True)
    assert ours < 0.01
    assert without > 0.1 or (case.tokens == 1 and not case.chooses)


def in_gluon_interpreter() -> None:
    round_as_torch()
    backend = Reference()
    check_hopper(backend, Case(3, 5, 32, 32))  # without adapters not sorted
    check_hopper(backend, Case(1, 32, 32, 32, rank=32, chooses=True))
    hopper.THIN = 0  # from here on tiles of whole experts, small as these are
    check_hopper(backend, Case(1, 5, 96, 224, rank=64))  # few stages under way
    check_hopper(backend, Case(1, 32, 96, 224, rank=64, chooses=True))
    check_hopper(backend, Case(7, 5, 32, 288))  # the sum in parts
    check_hopper(backend, Case(12, 4, 96, 96, rank=64, slots=11))  # more stages of adapters than the ring has
    check_hopper(backend, Case(9, 5, 96, 32))  # sorted
    hopper.SPREAD = 0
    check_hopper(backend, Case(17, 16, 32, 96, rank=64))  # tiles of which some are half full; units that are not
    check_hopper(backend, Case(40, 4, 32, 32))  # large tiles, in fp16


def in_interpreter() -> None:
    for shape in ((3, 6, 64, 32), (30, 6, 64, 96)):
        kernels = Kernels(target_of(CPU))
        float32 = _in_float32(portable.moe)
        sizes = error(float32, portable.prepare_experts, kernels, Case(*shape), reorders=False)
        assert sizes[0] < 0.01
        assert sizes[1] > 0.1


def _in_float32(moe: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The interpreter multiplies bfloat16 wrongly."""

    def run(target: Any, x_TH: Tensor, routing: Routing, experts: Any, limit: float) -> Tensor:
        added = routing.added
        if isinstance(added, Experts):
            factors = {name: factor.float() for name, factor in added._factors.items()}
            routing = routing._replace(added=Experts(added._backend, added._keys_T, added._routing, factors))
        return moe(target, x_TH.float(), routing, in_float(experts), limit)

    return run


@pytest.mark.slow
def test_hopper_experts_with_adapters_in_the_interpreter() -> None:
    run_gluon(in_gluon_interpreter)


@pytest.mark.slow
def test_portable_experts_with_adapters_in_the_interpreter() -> None:
    run_interpreted(in_interpreter)


@pytest.mark.compiles
@pytest.mark.parametrize("tokens", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 64, 256, 1024))])
def test_kernels_with_adapters_stay_in_registers(tokens: int) -> None:
    tiling = hopper.plan(tokens, 4, 32, 2880)
    for gated in (True, False):
        kernel = compile_gemm(tiling, gated=gated, tokens=tokens, choice=32 if tokens == 1 else 0, rank=16)
        assert kernel.registers <= tiling.registers
        assert kernel.spills_in_loops == 0


@pytest.mark.hopper
@pytest.mark.parametrize("tokens", [1, 2, 3, 8, 16, 37, 300, 1000])
@pytest.mark.parametrize(("experts", "size"), [(8, 256), (32, 288), (5, 2880)], ids=["nano", "odd", "wide"])
def test_hopper_experts_with_adapters(tokens: int, experts: int, size: int) -> None:
    device = torch.device("cuda")
    check_hopper(Kernels(target_of(device)), Case(tokens, experts, size, size, device))


@pytest.mark.hopper
@pytest.mark.parametrize("rank", [16, 32, 64])
@pytest.mark.parametrize(("experts", "tokens"), [(32, 1), (128, 1), (32, 2), (32, 8), (32, 40), (8, 300)])
def test_hopper_experts_with_adapters_of_any_rank(experts: int, tokens: int, rank: int) -> None:
    """A single token's experts are chosen by the kernels."""
    device = torch.device("cuda")
    case = Case(tokens, experts, 288, 288, device, rank, chooses=tokens == 1)
    check_hopper(Kernels(target_of(device)), case)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 37, 300])
def test_portable_experts_with_adapters(tokens: int) -> None:
    device = torch.device("cuda")
    kernels, case = Kernels(target_of(device)), Case(tokens, 8, 256, 256, device)
    ours, without = error(portable.moe, portable.prepare_experts, kernels, case, reorders=False)
    assert ours < 0.01
    assert without > 0.1 or tokens == 1
