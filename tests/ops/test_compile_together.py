"""On a driver that says it has a GPU and can do nothing else: so a launch would fail."""

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from oscine.ops.compile_together import compile_together


class NoGpu:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "_active", NoGpu())


@triton.jit
def add_one(x, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i, mask=i < count) + 1, mask=i < count)


def compiled(kernel: object) -> int:
    return len(kernel.device_caches[0][0])  # type: ignore[attr-defined]


@pytest.mark.usefixtures("no_gpu")
def test_what_is_launched_within_is_compiled_at_the_end() -> None:
    x = torch.zeros(8)
    with compile_together():
        for block in (8, 16, 8):
            add_one[(1,)](x, 7, BLOCK=block)
            add_one[(1,)](x, 5, BLOCK=block)  # the same kernel: the count is no constant
        assert compiled(add_one) == 0
    assert compiled(add_one) == 2
    assert x.tolist() == [0] * 8
    with pytest.raises(AttributeError):  # a launch, which this driver cannot do
        add_one[(1,)](x, 7, BLOCK=8)
