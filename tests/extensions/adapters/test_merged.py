"""A model with an adapter against the model into which it is merged, in float32."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts, random_routing
from oscine.extensions.adapters.device import DeviceAdapters
from oscine.extensions.adapters.host import HostAdapters
from oscine.extensions.adapters.layout import Layout, Packing
from oscine.extensions.adapters.products import Reference
from oscine.extensions.adapters.steps import Experts
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import WHOLE, tensor_specs
from oscine.ops.interface import Batch
from oscine.ops.moe import native, reference
from oscine.ops.native.library import unavailable
from oscine.settings.adapters import TARGETS
from oscine.types import AdapterPlace, NewSequence, SamplingParams
from tests.model.tiny import CPU, Stepper, model, random_tokens, tensors, to_device
from tests.model.tiny import Sequence as Tokens
from tests.tiny import SMALL, TINY, WIDE_GROUP

from .adapters import (
    ATTENTION,
    EXPERTS,
    RandomAdapter,
    merged,
    random_adapter,
    write_peft,
    write_per_expert,
    write_split,
)

LARGEST_DIFFERENCE = 1e-4
NOTHING = SamplingParams(max_tokens=1)


def adapters_of(base: GptOss, folders: Sequence[Path], slots: int, max_rank: int = 8) -> DeviceAdapters:
    layout = Layout.of(base.config, TARGETS, max_rank)
    packing = Packing(layout, base.config, WHOLE)
    host = HostAdapters(packing, tensor_specs(base.config), TARGETS, max_rank, torch.float32, CPU)
    for number, folder in enumerate(folders):
        host.begin(number, str(folder)).result()
    memory = torch.zeros(slots, layout.size)
    return DeviceAdapters(host, layout, memory, 16, Reference(), base.ops)


def place(adapters: DeviceAdapters, sequence: int, adapter: AdapterPlace | None) -> None:
    adapters.assign(NewSequence(sequence, [1], 1, 0, [], NOTHING, adapter=adapter))


class AdaptedStepper(Stepper):
    """The sequences of a step are those of the slots 0, 1, ..."""

    def __init__(self, model: GptOss, adapters: DeviceAdapters) -> None:
        super().__init__(model)
        self._adapters = adapters

    def step(self, *work: tuple[Tokens, int]) -> list[Tensor]:
        for sequence, count in work:
            while len(sequence.pages) * 64 < sequence.computed + count:
                sequence.pages.append(self.free.pop())
        batch: Batch = to_device(self.batch(work), self.device)
        slots = [i for i, (_, count) in enumerate(work) for _ in range(count)]
        logits = self.model.head(
            self.model.hidden(
                batch, self.kv, self._adapters.of_step(torch.tensor(slots, dtype=torch.int32, device=self.device))
            )
        )
        for sequence, count in work:
            sequence.computed += count
        return list(logits.split([count for _, count in work]))


@pytest.mark.parametrize("names", [ATTENTION, ("router",), EXPERTS, (*ATTENTION, "router", *EXPERTS), ("v_proj",)])
@pytest.mark.parametrize("config", [TINY, SMALL, WIDE_GROUP], ids=["tiny", "small", "wide"])
def test_an_adapter_gives_the_logits_of_the_merged_model(config, names, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    base, adapter = (
        model(config, tensors(config)),
        random_adapter(config, names, layers=(0, config.num_hidden_layers - 1)),
    )
    adapters = adapters_of(base, [write_peft(tmp_path, adapter)], slots=2)
    place(adapters, 0, AdapterPlace(1, 0))
    tokens = random_tokens(config, 90)
    expected = Stepper(merged(base, adapter)).step((Tokens(tokens, 0), 80))[0]
    plain = Stepper(base).step((Tokens(tokens, 0), 80))[0]
    stepper, sequence = AdaptedStepper(base, adapters), Tokens(tokens, 0)
    got = torch.cat([stepper.step((sequence, 50))[0], *(stepper.step((sequence, 1))[0] for _ in range(30))])
    assert (got - expected).abs().max() <= LARGEST_DIFFERENCE
    assert (plain - expected).abs().max() > 100 * LARGEST_DIFFERENCE


def test_each_sequence_of_a_batch_has_its_own_adapter(tmp_path: Path) -> None:
    base = model(SMALL, tensors(SMALL))
    several = [random_adapter(SMALL, rank=rank, seed=rank) for rank in (1, 3, 8)]
    folders = [write_peft(tmp_path / str(i), adapter) for i, adapter in enumerate(several)]
    adapters = adapters_of(base, folders, slots=3)
    of_sequence = [2, None, 0, 1, 2]  # numbers of adapters
    for sequence, number in enumerate(of_sequence):
        place(adapters, sequence, None if number is None else AdapterPlace((number + 1) % 3, number))
    tokens = [random_tokens(SMALL, 40, seed) for seed in range(5)]
    counts = [1, 1, 30, 7, 12]
    got = AdaptedStepper(base, adapters).step(*((Tokens(own, 0), n) for own, n in zip(tokens, counts, strict=True)))
    for number, own, count, logits in zip(of_sequence, tokens, counts, got, strict=True):
        alone = base if number is None else merged(base, several[number])
        expected = Stepper(alone).step((Tokens(own, 0), count))[0]
        assert (logits - expected).abs().max() <= LARGEST_DIFFERENCE


def test_a_slot_has_the_adapter_that_came_last(tmp_path: Path) -> None:
    base = model(TINY, tensors(TINY))
    several = [random_adapter(TINY, names, seed=seed) for seed, names in enumerate((EXPERTS, ATTENTION))]
    folders = [write_peft(tmp_path / str(i), adapter) for i, adapter in enumerate(several)]
    adapters = adapters_of(base, folders, slots=1)
    tokens = random_tokens(TINY, 20)
    for number in (0, 1, 0):  # what the other adapter changed is not changed any more
        place(adapters, 0, AdapterPlace(0, number))
        got = AdaptedStepper(base, adapters).step((Tokens(tokens, 0), 20))[0]
        expected = Stepper(merged(base, several[number])).step((Tokens(tokens, 0), 20))[0]
        assert (got - expected).abs().max() <= LARGEST_DIFFERENCE


def _written(layout: str, folder: Path, adapter: RandomAdapter) -> tuple[Path, RandomAdapter]:
    if layout == "split":
        return write_split(folder, adapter)
    return (write_per_expert if layout == "listed" else write_peft)(folder, adapter), adapter


@pytest.mark.parametrize("layout", ["listed", "split"])
def test_layouts_of_other_tools_are_read(layout: str, tmp_path: Path) -> None:
    base = model(TINY, tensors(TINY))
    names = EXPERTS if layout == "split" else (*ATTENTION, "router", *EXPERTS)
    folder, adapter = _written(layout, tmp_path, random_adapter(TINY, names))
    adapters = adapters_of(base, [folder], slots=1)
    place(adapters, 0, AdapterPlace(0, 0))
    tokens = random_tokens(TINY, 30)
    got = AdaptedStepper(base, adapters).step((Tokens(tokens, 0), 30))[0]
    expected = Stepper(merged(base, adapter)).step((Tokens(tokens, 0), 30))[0]
    assert (got - expected).abs().max() <= LARGEST_DIFFERENCE


@pytest.mark.skipif(unavailable() is not None, reason="no C compiler")
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_the_c_kernels_add_to_both_products_of_experts(tokens: int) -> None:
    """Their activations are int8, so the result differs from the definition's by about 1 %."""
    torch.manual_seed(tokens)
    experts, hidden, inner, rank = 5, 96, 160, 4
    published = random_experts(experts, hidden, inner, CPU, torch.float32, scales=(118, 123))
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    factors = {}
    for name, (out, into) in shapes.items():
        factors[f"{name}_in"] = torch.randn(2, experts, rank, into) / into**0.5
        factors[f"{name}_out"] = torch.randn(2, experts, out, rank) / rank**0.5
    routing = random_routing(tokens, experts, 3, CPU)
    routing = routing._replace(expert_ids_TK=routing.expert_ids_TK.long())
    added = Experts(Reference(), (torch.arange(tokens) % 3 - 1).int(), routing, factors)
    x_TH = torch.randn(tokens, hidden)
    expected = reference.moe(x_TH, routing._replace(added=added), published, 7.0)
    got = native.moe(x_TH, routing._replace(added=added), native.prepare_experts(published), 7.0)
    plain = native.moe(x_TH, routing, native.prepare_experts(published), 7.0)
    assert (got - expected).norm() < 0.02 * expected.norm()
    assert torch.equal(got[::3], plain[::3])
    assert tokens == 1 or (got - plain).norm() > 0.1 * expected.norm()
