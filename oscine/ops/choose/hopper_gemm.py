"""Logits of the quantized head on Hopper, in Gluon: products with all 8 bits of the weights, or with the high four.

Each weight row and each token has a scale. A token is two int8 planes: x = scale (128 high + low). The planes are
adjacent columns of one operand of wgmma, and sums are int32, so they are exact.

The high and the low four bits of the weights are two matrices. A byte holds four bits of column j and four of column
j + H / 2, which a shift and two masks turn into two int8 operands. A step reads 128 bytes of each weight row, and the
activations of the same columns, which lie in memory in the order of the steps. Each program computes one tile of rows
after the other, and the next tile's weights load while a tile ends.

Shape suffixes: N tokens, V weight rows, J = H / 2 bytes, S steps, T tokens of a tile, B bytes of a step.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.compat import async_load, reinterpret
from oscine.ops.linear.hopper_stream import CHUNK_BYTES, descriptor
from oscine.ops.record import record
from oscine.ops.target import Target


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut."""

    max_tokens: int  # 8, 16, 32, ...
    stages: int  # of TMA loads per program, at most
    whole: bool = True  # all bits of the weights; else the high four
    rows: int = 64  # weight rows of a tile
    warps: int = 4  # per program
    programs: int = 2  # per SM

    def steps(self, columns: int) -> int:
        return -(-columns // (2 * CHUNK_BYTES))

    def constants(self, columns: int) -> dict[str, int]:
        steps = self.steps(columns)
        return {
            "ROWS": self.rows,
            "TOKENS": self.max_tokens,
            "STAGES": min(self.stages, steps),
            "STEPS": steps,
            "WHOLE": self.whole,
        }


# From the fewest tokens up; a token is two columns of the operand.
COARSE_TILES = (
    Tile(max_tokens=8, stages=4, whole=False),
    Tile(max_tokens=16, stages=6, whole=False),
    Tile(max_tokens=32, stages=3, whole=False, rows=128, warps=8),
    Tile(max_tokens=64, stages=3, whole=False, rows=256, warps=8, programs=1),
)
TILES = (
    Tile(max_tokens=8, stages=4),
    Tile(max_tokens=16, stages=4),
    Tile(max_tokens=32, stages=3),
    Tile(max_tokens=64, stages=3, rows=128, warps=8, programs=1),
)

_COARSE_ASM = gl.constexpr("shl.b32 $0, $2, 4; and.b32 $0, $0, 0xF0F0F0F0; and.b32 $1, $2, 0xF0F0F0F0;")
_COARSE_CONSTRAINTS = gl.constexpr("=&r,=r,r")
# 0xE4 takes bits of the first where the third has ones, of the second elsewhere.
_WHOLE_ASM = gl.constexpr(
    "{.reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, $3, 0xF0F0F0F0, 0xE4;"
    " shr.u32 t, $3, 4; lop3.b32 $1, $2, t, 0xF0F0F0F0, 0xE4;}"
)
_WHOLE_CONSTRAINTS = gl.constexpr("=&r,=r,r,r")


@record
class Sources:
    """What TMA reads."""

    high: tma.tensor_descriptor  # [rows, columns / 2]
    low: tma.tensor_descriptor
    planes: tma.tensor_descriptor  # [steps * 2 halves * 2 planes * tokens, 128]


@record
class Ring:
    high: gl.shared_memory_descriptor
    low: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    arrived: gl.shared_memory_descriptor  # one mbarrier per stage
    WHOLE: gl.constexpr


@gluon.jit
def _expect(ring, sources, stage, wanted):
    weights: gl.constexpr = sources.high.block_type.nbytes * (2 if ring.WHOLE else 1)
    mbarrier.expect(ring.arrived.index(stage), weights + sources.planes.block_type.nbytes, pred=wanted)


@gluon.jit
def _load_weights(ring, sources, row, step, stage, wanted):
    at = [row, step * 128]
    arrived = ring.arrived.index(stage)
    async_load(sources.high, at, arrived, ring.high.index(stage), pred=wanted)
    if ring.WHOLE:
        async_load(sources.low, at, arrived, ring.low.index(stage), pred=wanted)


@gluon.jit
def _load_tokens(ring, sources, step, stage, wanted):
    rows: gl.constexpr = sources.planes.block_type.shape[0]
    async_load(sources.planes, [step * rows, 0], ring.arrived.index(stage), ring.tokens.index(stage), pred=wanted)


@gluon.jit
def _operands(ring, stage, operand: gl.constexpr):
    """Weights of columns of the first half and of the second, int8 [ROWS, 128] each; low bits are 0 unless WHOLE."""
    high = ring.high.index(stage).load(operand)
    if ring.WHOLE:
        low = ring.low.index(stage).load(operand)
        first, second = gl.inline_asm_elementwise(
            _WHOLE_ASM, _WHOLE_CONSTRAINTS, [high, low], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    else:
        first, second = gl.inline_asm_elementwise(
            _COARSE_ASM, _COARSE_CONSTRAINTS, [high], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
        )
    return first, second


@gluon.jit(do_not_specialize=["num_tokens"])
def screen_kernel(
    high,
    low,
    planes,
    row_scale_ptr,
    token_scale_ptr,
    shift_ptr,
    out_ptr,
    num_rows,
    num_tokens,
    ROWS: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    WHOLE: gl.constexpr,
):
    """out[token, row], float32. shift: of a token, added to its sums."""
    gdc_launch_dependents()
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * TOKENS, 32])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    high_ring = gl.allocate_shared_memory(gl.int8, [STAGES, ROWS, 128], high.layout)
    low_ring = high_ring
    if WHOLE:
        low_ring = gl.allocate_shared_memory(gl.int8, [STAGES, ROWS, 128], low.layout)
    token_ring = gl.allocate_shared_memory(gl.int8, [STAGES, 4 * TOKENS, 128], planes.layout)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(arrived.index(i), count=1)
    ring = Ring(high_ring, low_ring, token_ring, arrived, WHOLE)
    sources = Sources(high, low, planes)
    columns = reinterpret(token_ring, gl.int8, [2 * STAGES, 2 * TOKENS, 128], planes.layout)
    tile = gl.program_id(0)
    tiles = (num_rows + ROWS - 1) // ROWS
    for first_stage in gl.static_range(STAGES):  # no more than STEPS
        _expect(ring, sources, first_stage, True)
        _load_weights(ring, sources, tile * ROWS, first_stage, first_stage, True)
    gdc_wait()
    for first_stage in gl.static_range(STAGES):
        _load_tokens(ring, sources, first_stage, first_stage, True)
    stage = 0
    phase = 0
    ahead_tile = tile + (gl.num_programs(0) if STAGES == STEPS else 0)  # what the next free stage is for
    ahead_step = STAGES % STEPS
    while tile < tiles:
        sums = gl.zeros([ROWS, 2 * TOKENS], gl.int32, layout)
        for _ in range(STEPS):
            mbarrier.wait(arrived.index(stage), phase)
            first, second = _operands(ring, stage, operand)
            slot = 2 * stage
            sums = warpgroup_mma(first, columns.index(slot).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma(second, columns.index(slot + 1).permute((1, 0)), sums, is_async=True)
            sums = warpgroup_mma_wait(0, deps=[sums])
            wanted = ahead_tile < tiles
            _expect(ring, sources, stage, wanted)
            _load_weights(ring, sources, ahead_tile * ROWS, ahead_step, stage, wanted)
            _load_tokens(ring, sources, ahead_step, stage, wanted)
            ahead_step += 1
            if ahead_step == STEPS:
                ahead_step = 0
                ahead_tile += gl.num_programs(0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        planes_apart = gl.permute(gl.reshape(sums, [ROWS, 2, TOKENS]), [0, 2, 1])
        upper, lower = gl.split(planes_apart)
        values = upper.to(gl.float32) * 128.0 + lower.to(gl.float32)
        row = tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, values.type.layout))
        token = gl.arange(0, TOKENS, gl.SliceLayout(0, values.type.layout))
        row_scale = gl.load(row_scale_ptr + row, row < num_rows, other=0.0)
        token_scale = gl.load(token_scale_ptr + token, token < num_tokens, other=0.0)
        shift = gl.load(shift_ptr + token, token < num_tokens, other=0.0)
        inside = (row < num_rows)[:, None] & (token < num_tokens)[None, :]
        at = token.to(gl.int64)[None, :] * num_rows + row[:, None]
        gl.store(out_ptr + at, (values + shift[None, :]) * row_scale[:, None] * token_scale[None, :], inside)
        tile += gl.num_programs(0)


def logits(
    target: Target,
    planes: Tensor,
    token_scale_N: Tensor,
    shift_N: Tensor,
    codes_2VJ: Tensor,
    row_scale_V: Tensor,
    tile: Tile,
) -> Tensor:
    """[N, V] float32, N <= tile.max_tokens.

    planes: int8 [S, half of the columns, plane, T, B]; bytes beyond J, and tokens beyond N, may be anything. codes_2VJ:
    the high and the low four bits; J is a multiple of 16. shift_N: float32, in units of both scales.
    """
    num_tokens, (_, num_rows, half) = len(token_scale_N), codes_2VJ.shape
    out_NV = torch.empty(num_tokens, num_rows, dtype=torch.float32, device=codes_2VJ.device)
    tiles = -(-num_rows // tile.rows)
    high, low = (descriptor(codes_VJ, [tile.rows, CHUNK_BYTES]) for codes_VJ in codes_2VJ)
    screen_kernel[(min(tiles, tile.programs * target.sm_count),)](
        high,
        low,
        descriptor(planes.view(-1, CHUNK_BYTES), [4 * tile.max_tokens, CHUNK_BYTES]),
        row_scale_V,
        token_scale_N,
        shift_N,
        out_NV,
        num_rows,
        num_tokens,
        **tile.constants(2 * half),
        num_warps=tile.warps,
        launch_pdl=True,
        enable_fp_fusion=True,
    )
    return out_NV
