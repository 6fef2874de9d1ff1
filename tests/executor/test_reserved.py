"""Memory that comes after its addresses. Needs a GPU."""

import pytest
import torch

from oscine.executor.kv.reserved import ReservedMemory

pytestmark = pytest.mark.gpu
MIB = 1 << 20


def free_bytes() -> int:
    torch.zeros(1, device="cuda")  # the kernel that fills with zeros takes memory at its first use
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def test_addresses_take_no_memory_until_it_is_mapped() -> None:
    device, before = torch.device("cuda"), free_bytes()
    memory = ReservedMemory(1 << 40, device)
    assert abs(before - free_bytes()) < 64 * MIB
    memory.map(0, 1)
    assert memory.num_mapped == memory.granularity
    memory.map(0, 1024 * MIB)
    memory.map(512 * MIB, 1025 * MIB)
    assert 1025 * MIB <= memory.num_mapped < 1025 * MIB + 2 * memory.granularity
    assert before - free_bytes() == pytest.approx(memory.num_mapped, abs=64 * MIB)
    assert not memory.bytes[: 1025 * MIB].any(), "it is not zero"
    del memory
    assert abs(before - free_bytes()) < 64 * MIB


def test_a_graph_captured_before_uses_what_is_mapped_after() -> None:
    device = torch.device("cuda")
    memory = ReservedMemory(1 << 36, device)
    memory.map(0, 1)
    data, index = memory.bytes.view(torch.int64), torch.zeros(1, dtype=torch.int64, device=device)
    out = torch.zeros(1, dtype=torch.int64, device=device)
    graph = torch.cuda.CUDAGraph()
    out.copy_(data.index_select(0, index))
    with torch.cuda.graph(graph):
        out.copy_(data.index_select(0, index))
    memory.map(0, 2048 * MIB)
    place = 2000 * MIB // 8
    data[place] = 42
    index.fill_(place)
    graph.replay()
    assert out.item() == 42


def test_more_than_there_is_is_an_error() -> None:
    memory = ReservedMemory(1 << 41, torch.device("cuda"))
    with pytest.raises(MemoryError, match="not enough memory"):
        memory.map(0, 1 << 40)
    memory.map(0, 1)
    assert not memory.bytes[0].item()
