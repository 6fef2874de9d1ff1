"""Weights in the layouts of the C kernels: dense weights of three kinds, and packed experts. Layouts: products.c."""

from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from oscine.ops.native.library import check, library

DenseKind = Literal["float32", "int8", "bf16"]
_KINDS = ("float32", "int8", "bf16")  # in the order of oscine.h
BLOCK = 32
LAYOUT = 1  # version of the packed layout: increase it when the bytes change


@dataclass(frozen=True, slots=True)
class PackedDense:
    """An int8 matrix with a scale per 32 columns of a row. Raises ValueError for a wrong number of bytes."""

    packed: Tensor  # uint8
    shape: tuple[int, int]  # [N, K]

    def __post_init__(self) -> None:
        num_rows, width = self.shape
        _check_bytes(self.packed, library().oscine_dense_bytes(num_rows, -(-width // BLOCK)))

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def numel(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Raises ValueError for a wrong number of bytes."""

    gate_up: Tensor  # uint8 [E, bytes]
    gate_up_bias: Tensor  # float32 [E, 2I]
    down: Tensor
    down_bias: Tensor  # float32 [E, H]
    gate_up_blocks: int  # of 32 columns, per row
    down_blocks: int

    def __post_init__(self) -> None:
        for packed, bias, num_blocks in (
            (self.gate_up, self.gate_up_bias, self.gate_up_blocks),
            (self.down, self.down_bias, self.down_blocks),
        ):
            num_experts, num_rows = bias.shape
            _check_bytes(packed, num_experts * library().oscine_packed_bytes(num_rows, num_blocks))


def _check_bytes(packed: Tensor, expected: int) -> None:
    if packed.nbytes != expected:
        raise ValueError(f"packed weights have {packed.nbytes} bytes, not {expected}")


class Matrix(NamedTuple):
    """The arguments of C functions that describe dense weights [N, K]."""

    address: int
    kind: int
    num_rows: int
    width: int


def matrix(weight: Tensor | PackedDense) -> Matrix:
    if isinstance(weight, PackedDense):
        return Matrix(weight.packed.data_ptr(), _KINDS.index("int8"), *weight.shape)
    kind: DenseKind = "bf16" if weight.dtype == torch.bfloat16 else "float32"
    return Matrix(weight.data_ptr(), _KINDS.index(kind), *weight.shape)


def pack_dense(weight: Tensor, kind: DenseKind) -> Tensor | PackedDense:
    """weight: published, bfloat16 [N, K]."""
    if kind == "float32":
        return weight.float().contiguous()
    weight = weight.bfloat16().contiguous()
    if kind == "bf16":
        return weight
    num_rows, width = weight.shape
    packed = torch.empty(library().oscine_dense_bytes(num_rows, -(-width // BLOCK)), dtype=torch.uint8)
    library().oscine_pack_dense(weight.data_ptr(), packed.data_ptr(), num_rows, width)
    return PackedDense(packed, (num_rows, width))


def few_logits(x_KH: Tensor, weight: PackedDense, few_KA: Tensor) -> Tensor:
    """float32 [K, A]: x . weight[few]; bitwise equal to the logits of all rows."""
    x_KH, few_KA = x_KH.contiguous(), few_KA.contiguous()
    logits_KA = torch.empty(few_KA.shape)
    inputs = x_KH.data_ptr(), weight.packed.data_ptr(), few_KA.data_ptr()
    check(library().oscine_int8_few(*inputs, logits_KA.data_ptr(), *few_KA.shape, weight.shape[1]))
    return logits_KA


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Published blocks [E, N, B, 16] and scales [E, N, B] -> uint8 [E, bytes]."""
    num_experts, num_rows, num_blocks = scales.shape
    blocks, scales = blocks.contiguous(), scales.contiguous()
    out = torch.empty(num_experts, library().oscine_packed_bytes(num_rows, num_blocks), dtype=torch.uint8)
    addresses = blocks.data_ptr(), scales.data_ptr(), out.data_ptr()
    library().oscine_pack(*addresses, num_experts, num_rows, num_blocks)
    return out
