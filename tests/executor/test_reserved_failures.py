"""Reserved addresses whose memory is mapped later, over a driver that fails. Needs no GPU."""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from oscine.executor.kv import reserved
from oscine.executor.kv.reserved import ReservedMemory

UNIT, BASE = 1 << 21, 1 << 40
OUT_OF_MEMORY, NOT_PERMITTED = 2, 800


class Driver:
    """Counts what is allocated and mapped, as the driver API says."""

    def __init__(self) -> None:
        self.fails: dict[str, int] = {}
        self.handles: set[int] = set()
        self.mapped: dict[int, int] = {}  # bytes by address

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *arguments: self.fails.get(name) or self._done(name, *arguments)

    def _done(self, name: str, *given: Any) -> int:
        match name:
            case "cuMemGetAllocationGranularity":
                given[0]._obj.value = UNIT
            case "cuMemAddressReserve":
                given[0]._obj.value = BASE
            case "cuMemCreate":
                given[0]._obj.value = len(self.handles) + 1
                self.handles.add(len(self.handles) + 1)
            case "cuMemRelease":
                self.handles.remove(given[0].value)
            case "cuMemMap":
                self.mapped[given[0].value] = given[1].value
            case "cuMemUnmap":
                assert self.mapped.pop(given[0].value) == given[1].value
            case "cuGetErrorName":
                given[1]._obj.value = b"CUDA_ERROR_NOT_PERMITTED"
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(reserved, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    buffer = (ctypes.c_uint8 * (4 * UNIT))()
    monkeypatch.setattr(ReservedMemory, "bytes", torch.frombuffer(buffer, dtype=torch.uint8))
    return made


@pytest.mark.parametrize(("status", "error"), [(OUT_OF_MEMORY, MemoryError), (NOT_PERMITTED, RuntimeError)])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
def test_a_call_that_fails_leaves_nothing_mapped(
    driver: Driver, call: str, status: int, error: type[Exception]
) -> None:
    memory = ReservedMemory(4 * UNIT, torch.device("cuda", 0))
    memory.map(0, 1)
    driver.fails[call] = status
    with pytest.raises(error):
        memory.map(0, 2 * UNIT)
    assert driver.mapped == {BASE: UNIT}
    assert driver.handles == set()
    assert memory.num_mapped == UNIT
    del driver.fails[call]
    memory.map(0, 2 * UNIT)
    assert driver.mapped == {BASE: UNIT, BASE + UNIT: UNIT}
    del memory
    assert driver.mapped == {}


def test_memory_is_released_and_restored_at_the_same_addresses(driver: Driver) -> None:
    memory = ReservedMemory(4 * UNIT, torch.device("cuda", 0))
    memory.map(0, 1)
    memory.map(2 * UNIT, 4 * UNIT)
    mapped = dict(driver.mapped)
    memory.bytes.fill_(7)
    memory.release()
    assert driver.mapped == {}
    assert memory.num_mapped == 0
    memory.release()  # once more changes nothing
    memory.restore(zero=False)
    assert driver.mapped == mapped
    assert memory.bytes.all(), "what is not wanted zero was written"
    memory.release()
    memory.restore()
    assert driver.mapped == mapped
    written = memory.bytes.view(4, UNIT).any(dim=1).tolist()
    assert written == [False, True, False, False], "zero is what is mapped, and no more"


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemSetAccess"])
def test_memory_that_cannot_be_restored_stays_released(driver: Driver, call: str) -> None:
    memory = ReservedMemory(4 * UNIT, torch.device("cuda", 0))
    memory.map(0, 1)
    memory.map(2 * UNIT, 3 * UNIT)
    mapped = dict(driver.mapped)
    memory.release()
    driver.fails[call] = OUT_OF_MEMORY
    for _ in range(2):
        with pytest.raises(MemoryError):
            memory.restore()
        assert driver.mapped == {}
        assert driver.handles == set()
    del driver.fails[call]
    memory.restore()
    assert driver.mapped == mapped
