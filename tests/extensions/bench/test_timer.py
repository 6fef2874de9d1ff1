"""Timing of calls: on a GPU in a CUDA graph if possible, else outside of one, and marked."""

import pytest
import torch

from oscine.extensions.bench import timer
from oscine.extensions.bench.timer import measure_ceiling, time_call

CPU = torch.device("cpu")


def test_a_cpu_call_takes_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The median; a first call, which may compile, does not count."""
    took, now = iter([9.0, 0.25, 0.5, 4.0]), [100.0]

    def call(i: int) -> None:
        now[0] += next(took)

    monkeypatch.setattr(timer.time, "perf_counter", lambda: now[0])
    assert time_call(call, CPU, calls=3) == timer.Time(0.5, "cpu")


@pytest.mark.gpu
def test_a_call_is_captured_in_a_graph() -> None:
    device = torch.device("cuda")
    source, target = torch.empty((2, 1 << 30), dtype=torch.uint8, device=device)
    taken = time_call(lambda i: target.copy_(source), device, calls=4)
    assert taken.how == "graph"
    assert 0.2e12 < 2 * source.numel() / taken.seconds < 10e12, "a copy at the speed of some GPU"
    small = time_call(lambda i: target[:4096].copy_(source[:4096]), device)
    assert small.seconds < 10e-6, "without the cost of a launch from Python"


@pytest.mark.gpu
def test_a_call_that_waits_for_the_device_is_timed_all_the_same() -> None:
    device = torch.device("cuda")
    x = torch.ones(1000, device=device)
    taken = time_call(lambda i: x.sum().item(), device)
    assert taken.how == "eager"
    assert 1e-6 < taken.seconds < 1e-2
    assert time_call(lambda i: x.add(1), device).how == "graph", "a failed capture leaves nothing behind"


@pytest.mark.gpu
def test_ceilings_are_plausible() -> None:
    ceiling = measure_ceiling(torch.device("cuda"))
    assert 0.2e12 < ceiling.bytes_per_s < 10e12
    assert 10e12 < ceiling.flops_per_s < 3000e12
