"""Products of a big weight matrix with few tokens on Hopper: weights flow from memory through the tensor cores.

A program computes W[rows, k range] x[tokens, k range]^T. Rows are the 64-row operand of wgmma and tokens its columns,
so few tokens waste nothing but arithmetic. Chunks of 128 bytes of both arrive by TMA in a ring of stages:

    start       issue the weights of every stage             nothing before this kernel in the stream writes them
    depend()    gdc_wait, issue the tokens of every stage     the kernel before this one writes them
    multiply()  for each step: wait for its stage, multiply, refill the stage

Between depend and multiply a kernel issues the loads that its epilogue wants.

Knows tiles, rings and barriers. Must not know heads, caches or what becomes of the products.

Shape suffixes: M weight rows of a program, N tokens of a program, C chunks of a stage.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.compat import async_load, reinterpret
from oscine.ops.interface import unmet
from oscine.ops.record import record

CHUNK_BYTES = 128  # of a row; one row of the widest swizzle
CHUNK = CHUNK_BYTES // 2  # columns of bf16


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut."""

    max_tokens: int  # 8, 16, 32, ...
    stages: int  # at most; under way in each program
    chunks: int = 2  # of a stage
    rows: int = 64  # weight rows of a program
    parts: int = 1  # of the sum, each of a program of its own
    warps: int = 4  # for each 64 or 128 rows
    early: int = 0  # stages of weights in 12 bits that become operands before the wait for tokens

    def constants(self, columns: int) -> dict[str, int]:
        """The constants of every kernel, for the columns of a part."""
        steps = -(-columns // (CHUNK * self.chunks))
        stages = min(self.stages, steps)
        return {"TOKENS": self.max_tokens, "CHUNKS": self.chunks, "STAGES": stages, "STEPS": steps}

    def part_columns(self, columns: int) -> int:
        """Columns of a part of a sum over so many, in whole stages."""
        return self.constants(-(-columns // self.parts))["STEPS"] * self.chunks * CHUNK

    def projection_constants(self, columns: int) -> dict[str, int]:
        """The same of kernels that take weights in 12 bits, too."""
        constants = self.constants(columns)
        return constants | {"EARLY": min(self.early, constants["STAGES"])}


class HasRoom(Protocol):
    @property
    def max_tokens(self) -> int: ...


AnyTile = TypeVar("AnyTile", bound=HasRoom)


def tile_for(num_tokens: int, tiles: Iterable[AnyTile]) -> AnyTile | None:
    """The first with room, of tiles in the order of theirs."""
    return next((tile for tile in tiles if num_tokens <= tile.max_tokens), None)


@record
class Ring:
    """The stages of one program, and where in the two matrices it reads."""

    weight: tma.tensor_descriptor  # [halves, outer, rows, columns / halves]
    tokens: tma.tensor_descriptor  # [halves, tokens, columns / halves]
    weight_ring: gl.shared_memory_descriptor
    token_ring: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor  # an mbarrier a stage
    outer: gl.tensor
    row: gl.tensor
    token: gl.tensor
    column: gl.tensor
    M: gl.constexpr
    N: gl.constexpr
    CHUNKS: gl.constexpr
    STAGES: gl.constexpr
    STEPS: gl.constexpr

    @gluon.jit
    def load_weights(self, step, stage, wanted):
        for chunk in gl.static_range(self.CHUNKS):
            column = self.column + (step * self.CHUNKS + chunk) * 64
            target = self.weight_ring.index(stage * self.CHUNKS + chunk)
            at = [0, self.outer, self.row, column]
            async_load(self.weight, at, self.arrived.index(stage), target, pred=wanted)

    @gluon.jit
    def load_tokens(self, step, stage, wanted):
        for chunk in gl.static_range(self.CHUNKS):
            column = self.column + (step * self.CHUNKS + chunk) * 64
            target = self.token_ring.index(stage * self.CHUNKS + chunk)
            at = [0, self.token, column]
            async_load(self.tokens, at, self.arrived.index(stage), target, pred=wanted)

    @gluon.jit
    def expect(self, stage, wanted):
        size: gl.constexpr = self.CHUNKS * (self.weight.block_type.nbytes + self.tokens.block_type.nbytes)
        mbarrier.expect(self.arrived.index(stage), size, pred=wanted)

    @gluon.jit
    def depend(self):
        """Waits for the kernel before this one; from here on its results may be read and memory written."""
        gdc_wait()
        for stage in gl.static_range(self.STAGES):
            self.load_tokens(stage, stage, True)

    @gluon.jit
    def multiply(self, layout: gl.constexpr):
        """float32 [M, N]."""
        shape: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        sums = gl.zeros([self.M, self.N], gl.float32, layout)
        for step in range(self.STEPS):
            stage = step % self.STAGES
            mbarrier.wait(self.arrived.index(stage), (step // self.STAGES) & 1)
            for chunk in gl.static_range(self.CHUNKS):
                slot = stage * self.CHUNKS + chunk
                a = reinterpret(self.weight_ring.index(slot), self.weight.dtype, [self.M, 64], shape)
                b = reinterpret(self.token_ring.index(slot), self.tokens.dtype, [self.N, 64], shape)
                sums = warpgroup_mma(a, b.permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            wanted = step + self.STAGES < self.STEPS
            self.expect(stage, wanted)
            self.load_weights(step + self.STAGES, stage, wanted)
            self.load_tokens(step + self.STAGES, stage, wanted)
        return sums


@gluon.jit
def start_ring(
    weight,
    tokens,
    outer,
    row,
    token,
    column,
    M: gl.constexpr,
    N: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
):
    """Lets the next kernel begin, and issues the weights of the first STAGES steps; STAGES <= STEPS."""
    gdc_launch_dependents()
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * CHUNKS] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    token_ring = gl.allocate_shared_memory(tokens.dtype, [STAGES * CHUNKS] + tokens.block_type.shape, tokens.layout)  # noqa: RUF005
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    rings = weight_ring, token_ring, arrived
    ring = Ring(weight, tokens, *rings, outer, row, token, column, M, N, CHUNKS, STAGES, STEPS)
    for stage in gl.static_range(STAGES):
        ring.expect(stage, True)
        ring.load_weights(stage, stage, True)
    return ring


def descriptor(matrix: Tensor, box: list[int], *, swizzled: bool = True) -> TensorDescriptor:
    """Boxes of this shape are zero where they leave the matrix."""
    size = matrix.element_size()
    layout = _swizzled(box[-1] * size if swizzled else 0, 8 * size, len(box))
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@functools.cache
def _swizzled(num_bytes: int, bits: int, rank: int) -> gl.NVMMASharedLayout:
    """For rows of so many bytes, at most 128, and elements of so many bits; 0: as they come."""
    return gl.NVMMASharedLayout(num_bytes, bits, rank)


def unstreamable(columns: int, dtype: torch.dtype) -> str | None:
    """What matrices of so many columns lack to be `streamable`."""
    return unmet(("dtype", torch.bfloat16, dtype), ("bytes of a row modulo 16", 0, columns * dtype.itemsize % 16))


def streamable(*matrices: Tensor) -> bool:
    """Whether TMA can read them: bfloat16, and rows that are contiguous and multiples of 16 bytes."""
    return all(
        matrix.dtype == torch.bfloat16
        and matrix.is_contiguous()
        and matrix.shape[1] % 8 == 0
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )
