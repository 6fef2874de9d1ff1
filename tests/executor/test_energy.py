"""The energy counter of a real GPU; tests/test_nvml.py has the rest, without one."""

import pytest
import torch

from oscine.executor.start.build import _uuids
from oscine.system.nvml import Energy


@pytest.mark.gpu
def test_a_real_gpu() -> None:
    """It uses energy while it computes; the counter is updated every 100 ms or sooner."""
    energy = Energy(_uuids(["cuda:0"]))
    before = energy.joules()
    x = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(1000):
        x = x @ x * 0
    end.record()
    end.synchronize()
    after = energy.joules()
    assert before is not None
    assert after is not None
    assert 20 < (after - before) / (start.elapsed_time(end) / 1e3) < 2000  # watts
