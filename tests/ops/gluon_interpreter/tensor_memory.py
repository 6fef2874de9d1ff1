"""Tensor memory and the products of compute capability 10.x: plain and scaled products, copies of scales, commits.

All of these happen in the order in which they are issued, and as late as possible: when somebody waits for a barrier
that a later commit named. Until then sums and scales are what they were, and shared memory is not read.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from oscine.ops.moe.mxfp4 import MAGNITUDES
from tests.ops.gluon_interpreter import program
from tests.ops.gluon_interpreter.memory import Shared, Value, poison, value
from tests.ops.gluon_interpreter.program import Program

COLUMNS = 512  # of 32 bits, of an SM
LANES = 128


@dataclass(frozen=True)
class TensorMemory:
    data: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype

    def index(self, i: Any) -> "TensorMemory":
        i = int(i)
        assert 0 <= i < len(self.data), f"buffer {i} of {len(self.data)}"
        return TensorMemory(self.data[i])

    def slice(self, start: Any, length: int, dim: int = 1) -> "TensorMemory":
        return TensorMemory(self.data.narrow(dim, int(start), length))

    def load(self, layout: Any = None) -> Value:
        return value(self.data.clone())

    def store(self, x: Tensor) -> None:
        assert x.shape == self.data.shape
        assert x.dtype == self.data.dtype
        self.data.copy_(x)

    def get_reg_layout(self, **_: Any) -> None:
        return None


def allocate(dtype: torch.dtype, shape: Any, layout: Any) -> TensorMemory:
    """A layout is "scales" or else one of rows, a row in a lane."""
    shape = tuple(shape)
    columns = shape[-2] * shape[-1] // LANES if layout == "scales" else shape[0] * shape[-1] * dtype.itemsize // 4
    Program.current.tensor_columns += max(columns, 1)
    assert Program.current.tensor_columns <= COLUMNS, "more tensor memory than an SM has"
    return TensorMemory(poison(shape, dtype))


def commit(barrier: Shared) -> None:
    """An arrival, at which everything issued before is complete."""
    Program.current.barrier(barrier).until = len(Program.current.products)
    program.arrive(barrier, 1)


def copy_scales(source: Shared, target: TensorMemory) -> None:
    assert source.shape == tuple(target.data.shape)
    Program.current.products.append(lambda: target.data.copy_(source.data))


def mma(a: Shared | TensorMemory, b: Shared, acc: TensorMemory, *, use_acc: Any = True) -> None:
    """acc [128, N] = a [128, K] b [K, N] + acc."""
    keep = bool(use_acc)

    def multiply() -> None:
        product = a.data.float() @ b.data.float()
        assert product.shape == acc.data.shape
        assert len(product) == LANES, "rows of an instruction"
        acc.data.copy_(product + acc.data if keep else product)

    Program.current.products.append(multiply)


def mma_scaled(
    a: Shared,
    b: Shared,
    acc: TensorMemory,
    a_scale: TensorMemory,
    b_scale: TensorMemory,
    a_type: str,
    b_type: str,
    *,
    use_acc: Any = True,
) -> None:
    """acc [128, N] = (a [128, K] with scales [128, K / 32]) (b [K, N] with scales [N, K / 32]) + acc."""
    keep = bool(use_acc)

    def multiply() -> None:
        left = scaled(values(a.data, a_type), a_scale.data)
        right = scaled(values(b.data.T, b_type), b_scale.data)
        product = (left.double() @ right.double().T).float()
        assert product.shape == acc.data.shape
        assert len(product) == LANES, "rows of an instruction"
        acc.data.copy_(product + acc.data if keep else product)

    Program.current.products.append(multiply)


def values(data: Tensor, kind: str) -> Tensor:
    """float32 of e4m3, or of bytes of two E2M1 each, the first in the low nibble."""
    if kind == "e4m3":
        assert data.dtype is torch.float8_e4m3fn
        return data.float()
    assert kind == "e2m1"
    assert data.dtype is torch.uint8
    table = torch.tensor([*MAGNITUDES, *(-size for size in MAGNITUDES)])
    return table[torch.stack((data & 15, data >> 4), -1).flatten(-2).long()]


def scaled(x: Tensor, scales: Tensor) -> Tensor:
    """[rows, K] times the power of two of each block of 32; 255 is NaN."""
    assert scales.dtype is torch.uint8
    assert x.shape == (scales.shape[0], 32 * scales.shape[1])
    powers = torch.exp2(scales.float() - 127)
    powers[scales == 255] = torch.nan
    return x * powers.repeat_interleave(32, 1)


def blackwell() -> ModuleType:
    """In place of Gluon's module of this part of the language."""
    module = ModuleType("triton.experimental.gluon.language.nvidia.blackwell")
    contents = {
        "TensorMemoryLayout": lambda block, **_: "rows",
        "TensorMemoryScalesLayout": lambda: "scales",
        "allocate_tensor_memory": allocate,
        "tensor_memory_descriptor": TensorMemory,
        "tcgen05_commit": commit,
        "tcgen05_copy": copy_scales,
        "tcgen05_mma": mma,
        "tcgen05_mma_scaled": mma_scaled,
    }
    for name, what in contents.items():
        setattr(module, name, what)
    return module
