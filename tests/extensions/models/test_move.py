"""Tensors of nested records at other addresses, and memory that is given back while nothing uses it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from oscine.checkpoint.opened import open_model
from oscine.extensions.models.sleep import gpu
from oscine.extensions.models.sleep.cpu import drop
from oscine.extensions.models.sleep.gpu import Arena
from oscine.extensions.models.sleep.move import moved, tensors_of
from oscine.model.weights import Weights
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target
from oscine.settings.config import NANO, ModelOptions


class Pair(NamedTuple):
    left: Tensor
    right: int


@dataclass(frozen=True, slots=True)
class Inner:
    values: Tensor
    name: str
    known: dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Outer:
    inner: Inner
    pair: Pair
    plain: tuple[Tensor, None]
    layers: list[Inner]
    made: int = field(default=3, init=False)


def inner(number: float) -> Inner:
    return Inner(torch.full((2, 3), number), f"n{number}", {"k": torch.full((4,), number + 0.5)})


def outer() -> Outer:
    return Outer(inner(1), Pair(torch.ones(2), 7), (torch.zeros(1), None), [inner(2), inner(3)])


def test_every_tensor_is_moved_and_nothing_else_changes() -> None:
    value = outer()
    before = list(tensors_of(value))
    assert len(before) == 8
    made = moved(value, lambda tensor: tensor + 100)
    after = list(tensors_of(made))
    assert all(torch.equal(old + 100, new) for old, new in zip(before, after, strict=True))
    assert (made.inner.name, made.pair.right, made.plain[1], made.made) == ("n1", 7, None, 3)
    assert type(made.pair) is Pair
    assert made.layers is value.layers, "a list is changed in place"


class PlainMemory:
    """In the place of reserved memory of a GPU."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.bytes = num_bytes, torch.zeros(num_bytes, dtype=torch.uint8)
        self.mapped = 0
        self.fails = 0

    def map(self, start: int, end: int) -> None:
        if self.fails:
            self.fails -= 1
            raise MemoryError("the GPU has not enough memory left")
        self.mapped = max(self.mapped, end)


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[Any, PlainMemory]]:
    """An arena that takes tensors of the CPU for those of a GPU."""

    def make(num_bytes: int) -> tuple[Any, PlainMemory]:
        memory = PlainMemory(num_bytes)
        return Arena(memory, kind="cpu"), memory  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return make


def test_an_arena_keeps_shape_stride_type_and_what_is_shared(arena: Any) -> None:
    area, memory = arena(1 << 20)
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    views = [base, base.t(), base[1:3, 2:], torch.tensor(3.5), torch.arange(5, dtype=torch.uint8), torch.empty(0, 3)]
    half = torch.arange(7, dtype=torch.bfloat16)
    made = [area.move(one) for one in (*views, half)]
    for old, new in zip((*views, half), made, strict=True):
        assert torch.equal(old, new)
        assert (old.dtype, old.stride(), old.shape) == (new.dtype, new.stride(), new.shape)
        if old.numel():
            assert memory.bytes.data_ptr() <= new.data_ptr() < memory.bytes.data_ptr() + area.num_bytes
    made[0][1, 2] = -1.0
    assert made[1][2, 1] == made[2][0, 0] == -1.0
    assert base[1, 2] == 8.0
    starts = [one.data_ptr() - memory.bytes.data_ptr() for one in (made[0], made[3], made[4], made[6])]
    assert starts == [0, 512, 1024, 1536]
    assert memory.mapped >= area.num_bytes


def test_an_arena_makes_room_in_the_allocators_cache_before_it_gives_up(arena: Any) -> None:
    area, memory = arena(1 << 20)
    memory.fails = 1
    assert torch.equal(area.move(torch.ones(3)), torch.ones(3))
    memory.fails = 2
    with pytest.raises(MemoryError):
        area.move(torch.ones(3))


def test_the_weights_of_a_model_are_moved_whole(arena: Any) -> None:
    opened = open_model(ModelOptions(NANO, device="cpu"))
    target = Target.of(opened.device)
    ops = resolve(target, choose("cpu"))
    weights, same = opened.load(ops=ops), opened.load(ops=ops)
    size = sum(tensor.untyped_storage().nbytes() + 512 for tensor in tensors_of(weights))
    area, memory = arena(size)
    kept: Weights = moved(weights, area.move)
    begin, end = memory.bytes.data_ptr(), memory.bytes.data_ptr() + size
    compared = 0
    for old, new in zip(tensors_of(same), tensors_of(kept), strict=True):
        assert torch.equal(old, new)
        assert begin <= new.data_ptr() < end
        compared += 1
    assert compared > 30
    memory.bytes.zero_()
    assert not any(tensor.float().abs().max() for tensor in tensors_of(kept)), "a tensor is elsewhere"


def test_memory_that_is_dropped_is_zero_and_takes_none() -> None:
    memory = np.ones(8 << 20, np.uint8)
    address = memory.ctypes.data
    before = resident()
    drop(address + 1, memory.nbytes - 1)
    assert before - resident() > 6 << 20
    page = -(-(address + 1) // 4096) * 4096 - address
    assert memory[0] == 1, "what is not asked for stays"
    assert not memory[page : page + 4096].any()
    memory[page] = 5
    assert memory[page] == 5


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_too_little_host_memory_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "available_bytes", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"^--enable-sleep-mode: a copy of the weights takes 3\.0 GiB of host memory"):
        gpu._pinned(3 << 30)
