"""The mixture of experts on compute capability 10.x with FP8 activations: schedule and launches of the Gluon GEMM.

Exact activations have the portable kernels (triton.py). With --activation-dtype fp8, MXFP4 weights are multiplied with
x and h in e4m3 as fp8.py defines them, which is what Hopper does.

    sort      x rows by expert in e4m3, their scales, their pairs, and a table of entries (expert, first row, rows <= N)
    gemm      h[row] = swiglu(W_gu x + b_gu), in e4m3 with one factor
    gemm      y[pair] = weight * (W_d h + b_d)

Weights are repacked in units of 128 rows by 128 values along k, padded with zeros:

    nibbles   64 bytes a row, as published
    scales    512 bytes, as tensor memory has them: byte 16 (r % 32) + 4 (r / 32) + b is that of block b of row r

The units of an expert follow each other by row tile, then along k. The first product has two units at each place, the
gates and the ups of the same 128 columns of h.

Shape suffixes: T tokens, H hidden, I intermediate, E experts, K experts per token.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import fp8, trial_inputs
from oscine.ops.moe import triton as portable
from oscine.ops.moe.blackwell_gemm import gemm
from oscine.ops.target import Target

moe_use = fp8.moe_use
UNIT = 128
SHARED_BYTES = 225 * 1024  # of a program, for its stages
SPREAD = 256  # pairs, up to which they may come without counts


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of all experts, in units."""

    nibbles: Tensor  # uint8 [units * 128, 64]
    scales: Tensor  # uint8 [units, 2, 256]
    bias: Tensor  # bfloat16 [E, parts, rows of a part]
    row_tiles: int  # of an expert
    steps: int  # units along k


@dataclass(frozen=True, slots=True)
class BlackwellExperts:
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Tiling:
    tokens: int  # N: of a tile

    def stages(self, parts: int) -> int:
        weights = UNIT * UNIT + 4 * UNIT  # bytes in shared memory; a nibble has a byte
        return min(12, SHARED_BYTES // (parts * weights + self.tokens * UNIT))

    def buffers(self, parts: int) -> int:
        """Of sums: two, if tensor memory has room for them beside the scales."""
        return 2 if parts * self.tokens <= 128 else 1


class Sorted(NamedTuple):
    rows: Tensor  # float8_e4m3fn [T * K, H]
    scales: Tensor  # float32 [T * K]
    order: Tensor  # int32 [T * K]: the pair t * K + k of each row
    table: Tensor  # int32: the number of entries; from word 4 on, four words for each
    entries: int  # at most


def prepare_experts(target: Target, experts: MxExperts) -> MxExperts | BlackwellExperts:
    """For the target's type of activations. Raises ValueError for sizes that are not multiples of 32."""
    if target.activation_dtype != "fp8":
        return portable.prepare_experts(experts)
    num_experts, rows, _ = experts.gate_up_scales.shape
    intermediate = rows // 2
    if intermediate % 32:
        raise ValueError(f"the Blackwell experts need an intermediate size in multiples of 32, not {intermediate}")

    def halves(x: Tensor) -> Tensor:
        """Gates, then ups."""
        return x.view(num_experts, intermediate, 2, *x.shape[2:]).transpose(1, 2)

    return BlackwellExperts(
        _matrix(*map(halves, (experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias))),
        _matrix(*(x[:, None] for x in (experts.down_blocks, experts.down_scales, experts.down_bias))),
    )


def _matrix(blocks: Tensor, scales: Tensor, bias: Tensor) -> Matrix:
    """blocks [E, parts, rows, k / 32, 16], scales [E, parts, rows, k / 32], bias [E, parts, rows]. Expert by expert."""
    num_experts, parts, rows, k_blocks = scales.shape
    row_tiles, steps = triton.cdiv(rows, UNIT), triton.cdiv(k_blocks, 4)
    units = row_tiles * steps * parts
    nibbles = blocks.new_empty(num_experts, units * UNIT, UNIT // 2)
    lanes = scales.new_empty(num_experts, units, 2, 256)
    missing_rows, missing_blocks = row_tiles * UNIT - rows, steps * 4 - k_blocks
    for expert in range(num_experts):
        padded = functional.pad(blocks[expert], (0, 0, 0, missing_blocks, 0, missing_rows))
        tiled = padded.view(parts, row_tiles, UNIT, steps, 64).permute(1, 3, 0, 2, 4)
        nibbles[expert].view(tiled.shape).copy_(tiled)
        padded = functional.pad(scales[expert], (0, missing_blocks, 0, missing_rows))
        tiled = padded.view(parts, row_tiles, 4, 32, steps, 4).permute(1, 4, 0, 3, 2, 5)
        lanes[expert].view(tiled.shape).copy_(tiled)
    return Matrix(nibbles.flatten(0, 1), lanes.flatten(0, 1), bias.bfloat16().contiguous(), row_tiles, steps)


def moe(
    target: Target, x_TH: Tensor, routing: Routing, experts: MxExperts | BlackwellExperts, swiglu_limit: float
) -> Tensor:
    """bf16 [T, H] -> bf16 partial sums [T, K, H]."""
    if isinstance(experts, MxExperts):
        return portable.moe(target, x_TH, routing, experts, swiglu_limit)
    per_token = routing.expert_ids_TK.shape[1]
    return run(target, x_TH, routing, experts, swiglu_limit, plan(len(x_TH), per_token, len(experts.down.bias)))


def plan(tokens: int, per_token: int, experts: int) -> Tiling:
    """By static sizes only, so that a CUDA graph can replay any routing: N is what most experts' rows fit in."""
    mean = tokens * per_token / experts
    return Tiling(16 if mean <= 8 else 32 if mean <= 16 else 64 if mean <= 48 else 128)


def run(
    target: Target, x_TH: Tensor, routing: Routing, experts: BlackwellExperts, limit: float, tiling: Tiling
) -> Tensor:
    """The op with a tiling given."""
    per_token, hidden = routing.expert_ids_TK.shape[1], x_TH.shape[1]
    y = x_TH.new_empty(len(x_TH) * per_token, hidden)
    if len(x_TH):
        by_expert = sort(target, x_TH, routing, len(experts.down.bias), tiling)
        intermediate = experts.gate_up.bias.shape[2]
        h = torch.empty((len(y), intermediate), dtype=torch.float8_e4m3fn, device=x_TH.device)
        _launch(target, tiling, experts.gate_up, by_expert.rows, h, by_expert, routing, limit)
        _launch(target, tiling, experts.down, h, y, by_expert, routing, limit)
    return y.view(len(x_TH), per_token, hidden)


def _launch(
    target: Target,
    tiling: Tiling,
    matrix: Matrix,
    rows: Tensor,
    out: Tensor,
    by_expert: Sorted,
    routing: Routing,
    limit: float,
) -> None:
    gemm[(min(by_expert.entries * matrix.row_tiles, target.sm_count),)](
        *descriptors(matrix, rows, tiling),
        by_expert.table,
        out,
        matrix.bias,
        by_expert.scales,
        by_expert.order,
        routing.weights_TK,
        **constants(tiling, matrix, limit),
        num_warps=4,
        launch_pdl=True,
        enable_fp_fusion=True,
        maxnreg=registers(matrix),
    )


def registers(matrix: Matrix) -> int:
    """A thread: a part of the sums, and with gates and ups two of them."""
    return 168 if matrix.bias.shape[1] == 2 else 128


def descriptors(matrix: Matrix, rows: Tensor, tiling: Tiling) -> tuple[TensorDescriptor, ...]:
    return (
        TensorDescriptor.from_tensor(matrix.nibbles, [UNIT, UNIT // 2], gl.NVMMASharedLayout(128, 8, 2, False, True)),
        TensorDescriptor.from_tensor(matrix.scales, [1, 2, 256], gl.NVMMASharedLayout(0, 8, 3)),
        TensorDescriptor.from_tensor(rows, [tiling.tokens, UNIT], gl.NVMMASharedLayout(128, 8, 2)),
    )


def constants(tiling: Tiling, matrix: Matrix, limit: float) -> dict[str, float]:
    _, parts, rows = matrix.bias.shape
    return {
        "N": tiling.tokens,
        "STAGES": tiling.stages(parts),
        "BUFFERS": tiling.buffers(parts),
        "STEPS": matrix.steps,
        "ROW_TILES": matrix.row_tiles,
        "ROWS": rows,
        "GATED": parts == 2,
        "LIMIT": limit,
    }


def sort(target: Target, x_TH: Tensor, routing: Routing, experts: int, tiling: Tiling) -> Sorted:
    """Routing may leave out counts and ranks of up to SPREAD pairs."""
    ids, pairs, hidden = routing.expert_ids_TK, routing.expert_ids_TK.numel(), x_TH.shape[1]
    counted = routing.counts_E is not None
    assert counted or pairs <= SPREAD, "many tokens are counted by the router"
    entries = min(experts, pairs) + pairs // tiling.tokens
    by_expert = Sorted(
        torch.empty((pairs, hidden), dtype=torch.float8_e4m3fn, device=x_TH.device),
        torch.empty(pairs, dtype=torch.float32, device=x_TH.device),
        torch.empty(pairs, dtype=torch.int32, device=x_TH.device),
        torch.empty(4 + 4 * entries, dtype=torch.int32, device=x_TH.device),
        entries,
    )
    _sort_kernel[(pairs,)](
        x_TH,
        ids,
        routing.counts_E if counted else ids,
        routing.ranks_TK if counted else ids,
        *by_expert[:4],
        pairs,
        K=ids.shape[1],
        H=hidden,
        E=experts,
        TILE=tiling.tokens,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_H=triton.next_power_of_2(hidden),
        BLOCK_P=1 if counted else triton.next_power_of_2(pairs),
        num_warps=4,
        **target.launch_options,
    )
    return by_expert


@triton.jit(do_not_specialize=["pairs"])
def _sort_kernel(
    x,
    ids,
    given_counts,
    ranks,
    rows,
    scales,
    order,
    table,
    pairs,
    K: tl.constexpr,
    H: tl.constexpr,
    E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    PDL: tl.constexpr,
):
    """A program for each pair. BLOCK_P 1: counts and ranks are given; else they are found here, from all ids."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair = tl.program_id(0)
    expert_E = tl.arange(0, BLOCK_E)
    mine = tl.load(ids + pair).to(tl.int32)
    if BLOCK_P == 1:
        counts_E = tl.load(given_counts + expert_E, mask=expert_E < E, other=0)
        rank = tl.load(ranks + pair)
    else:
        other_P = tl.arange(0, BLOCK_P)
        ids_P = tl.load(ids + other_P, mask=other_P < pairs, other=-1).to(tl.int32)
        counts_E = tl.sum((ids_P[:, None] == expert_E[None, :]).to(tl.int32), 0)
        rank = tl.sum(((ids_P == mine) & (other_P < pair)).to(tl.int32), 0)
    starts_E = tl.cumsum(counts_E, 0) - counts_E
    row = (tl.sum(tl.where(expert_E == mine, starts_E, 0), 0) + rank).to(tl.int64)
    column_H = tl.arange(0, BLOCK_H)
    x_H = tl.load(x + (pair // K).to(tl.int64) * H + column_H, mask=column_H < H, other=0).to(tl.float32)
    # The exponent of the largest magnitude is in its upper bits; see planes.py.
    largest = tl.max(x_H.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    exponent = tl.maximum((largest >> 23) - 7, 1)
    scaled_H = x_H * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(rows + row * H + column_H, scaled_H.to(tl.float8e4nv), mask=column_H < H)
    tl.store(scales + row, (exponent << 23).to(tl.float32, bitcast=True))
    tl.store(order + row, pair)
    if pair == 0:
        tiles_E = (counts_E + TILE - 1) // TILE
        first_E = tl.cumsum(tiles_E, 0) - tiles_E
        tl.store(table, tl.sum(tiles_E, 0))
        for i in range(tl.max(tiles_E, 0)):
            entry_E = table + 4 + 4 * (first_E + i)
            tl.store(entry_E, expert_E, mask=i < tiles_E)
            tl.store(entry_E + 1, starts_E + i * TILE, mask=i < tiles_E)
            tl.store(entry_E + 2, tl.minimum(counts_E - i * TILE, TILE), mask=i < tiles_E)


def trial(target: Target) -> str | None:
    """What is wrong with the kernels on this GPU, in words: they run on small experts, beside the reference."""

    return trial_inputs.wrong(target, prepare_experts, run, [Tiling(tile) for tile in (16, 32, 64, 128)])
