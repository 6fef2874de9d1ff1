"""The MXFP4 GEMM of the mixture of experts for compute capability 10.x, in Gluon.

Knows tiles, barriers and memories; not routing policy or shapes of models (blackwell.py).

    out[token, row] = sum over k of weight[row, k] * token[k]   for the tokens of one expert

Weights are the left operand of tcgen05.mma with block scales (kind::mxf8f6f4): 128 rows of E2M1, which TMA spreads to a
byte each in shared memory. Their scales go from shared into tensor memory. Tokens, N of them, are the right operand in
e4m3. A token's own scale is applied to the sums, so its block scales are 1. Sums are float32 in tensor memory.

A program has three partitions, and takes every num_programs-th tile:

    loads:    wait empty[s]  ->  TMA weights, scales, tokens   ->  full[s]
    products: wait full[s]   ->  copy scales, tcgen05.mma      ->  empty[s];  after the last stage of a tile ready[b]
    results:  wait ready[b]  ->  tensor memory to registers    ->  drained[b], epilogue, stores

A stage is one unit of 128 x 128 weights, or with GATED two: the gates and the ups of the same 128 columns of h. So
both are in one thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import (
    TensorMemoryLayout,
    TensorMemoryScalesLayout,
    allocate_tensor_memory,
    tcgen05_commit,
    tcgen05_copy,
    tcgen05_mma_scaled,
    tensor_memory_descriptor,
)
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.barriers import barriers
from oscine.ops.compat import async_load
from oscine.ops.moe import fp8
from oscine.ops.record import record

UNIT = gl.constexpr(128)  # rows of weights, and values along k
BLOCKS = gl.constexpr(4)  # of 32 values that share a scale, along k
ONE = gl.constexpr(127)  # the scale of 2^0
LOAD_REGISTERS = gl.constexpr(48)  # a thread
PRODUCT_REGISTERS = gl.constexpr(48)

h_factor = gluon.constexpr_function(fp8.h_factor)


@record
class Config:
    """What is known when the kernel is compiled."""

    N: gl.constexpr  # tokens of a tile
    PARTS: gl.constexpr  # units of a stage: 2 (gates, ups) or 1
    STAGES: gl.constexpr
    BUFFERS: gl.constexpr  # of sums, so that the next tile is multiplied while one is stored
    STEPS: gl.constexpr  # stages along k
    ROW_TILES: gl.constexpr  # of an expert
    ROWS: gl.constexpr  # valid rows of the output: I (gated) or H
    GATED: gl.constexpr
    LIMIT: gl.constexpr  # of SwiGLU, a float
    H_FACTOR: gl.constexpr
    PART: gl.constexpr  # columns that an epilogue handles at a time, to bound the registers


@record
class Buffers:
    """Shared and tensor memory, and their barriers."""

    weights: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    sums: tensor_memory_descriptor  # [BUFFERS * PARTS, 128, N]
    weight_scales: tensor_memory_descriptor
    up_scales: tensor_memory_descriptor  # GATED; else the same as weight_scales
    token_scales: tensor_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    ready: gl.shared_memory_descriptor
    drained: gl.shared_memory_descriptor


@record
class Sources:
    """What TMA reads."""

    weights: tma.tensor_descriptor  # [units * 128, 64] bytes
    scales: tma.tensor_descriptor  # [units, 2, 256]
    tokens: tma.tensor_descriptor


@record
class Pointers:
    table: gl.tensor
    out: gl.tensor
    bias: gl.tensor  # bfloat16 [E, PARTS, ROWS]
    token_scales: gl.tensor  # GATED: of the rows of the tokens
    order: gl.tensor
    weights: gl.tensor


@gluon.jit
def _entry(cfg, pointers, index):
    """(expert, first row of its tokens, how many, row tile of its weights) of a tile."""
    at = pointers.table + 4 + (index // cfg.ROW_TILES) * 4
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), index % cfg.ROW_TILES


@gluon.jit
def _next(count: gl.constexpr, index, phase):
    last = index == count - 1
    return gl.where(last, 0, index + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _load(cfg, buffers, sources, pointers):
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(1)
    size: gl.constexpr = (
        cfg.PARTS * (sources.weights.block_type.nbytes + sources.scales.block_type.nbytes)
        + sources.tokens.block_type.nbytes
    )
    gdc_wait()
    tiles = gl.load(pointers.table) * cfg.ROW_TILES
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        expert, first, _, row_tile = _entry(cfg, pointers, index)
        for step in range(cfg.STEPS):
            mbarrier.wait(buffers.empty.index(stage), phase)
            full = buffers.full.index(stage)
            mbarrier.expect(full, size)
            unit = ((expert * cfg.ROW_TILES + row_tile) * cfg.STEPS + step) * cfg.PARTS
            for part in gl.static_range(cfg.PARTS):
                slot = stage * cfg.PARTS + part
                async_load(sources.weights, [(unit + part) * UNIT, 0], full, buffers.weights.index(slot))
                async_load(sources.scales, [unit + part, 0, 0], full, buffers.scales.index(slot))
            async_load(sources.tokens, [first, step * UNIT], full, buffers.tokens.index(stage))
            stage, phase = _next(cfg.STAGES, stage, phase)


@gluon.jit
def _scales_of(buffers, slot):
    """The scales of a unit, [128, 4], as they lie in tensor memory: 32 lanes of 16 bytes, four rows in each."""
    lanes = buffers.scales.index(slot).reshape((32, 4, BLOCKS))
    return lanes.permute((1, 0, 2)).reshape((UNIT, BLOCKS))


@gluon.jit
def _multiply(cfg, buffers, pointers):
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    buffer = gl.to_tensor(0)
    buffer_phase = gl.to_tensor(1)
    gdc_wait()
    tiles = gl.load(pointers.table) * cfg.ROW_TILES
    for _ in range(gl.program_id(0), tiles, gl.num_programs(0)):
        mbarrier.wait(buffers.drained.index(buffer), buffer_phase)
        for step in range(cfg.STEPS):
            mbarrier.wait(buffers.full.index(stage), phase)
            tokens = buffers.tokens.index(stage).permute((1, 0))
            for part in gl.static_range(cfg.PARTS):
                slot = stage * cfg.PARTS + part
                scales = buffers.up_scales if part else buffers.weight_scales
                tcgen05_copy(_scales_of(buffers, slot), scales)
                tcgen05_mma_scaled(
                    buffers.weights.index(slot),
                    tokens,
                    buffers.sums.index(buffer * cfg.PARTS + part),
                    scales,
                    buffers.token_scales,
                    "e2m1",
                    "e4m3",
                    use_acc=step > 0,
                )
            tcgen05_commit(buffers.empty.index(stage))
            stage, phase = _next(cfg.STAGES, stage, phase)
        tcgen05_commit(buffers.ready.index(buffer))
        buffer, buffer_phase = _next(cfg.BUFFERS, buffer, buffer_phase)


@gluon.jit
def _store(cfg, buffers, pointers):
    gdc_wait()
    gdc_launch_dependents()
    buffer = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    tiles = gl.load(pointers.table) * cfg.ROW_TILES
    for index in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = _entry(cfg, pointers, index)
        mbarrier.wait(buffers.ready.index(buffer), phase)
        for begin in gl.static_range(0, cfg.N, cfg.PART):
            if begin < tile[2]:
                if cfg.GATED:
                    _store_gated(cfg, buffers, pointers, buffer, tile, begin)
                else:
                    _store_weighted(cfg, buffers, pointers, buffer, tile, begin)
        mbarrier.arrive(buffers.drained.index(buffer), count=1)
        buffer, phase = _next(cfg.BUFFERS, buffer, phase)


@gluon.jit
def _sums(cfg, buffers, buffer, begin: gl.constexpr, part: gl.constexpr):
    """[128 rows, PART columns]; a thread holds a row."""
    return buffers.sums.index(buffer * cfg.PARTS + part).slice(begin, cfg.PART).load()


@gluon.jit
def _place(cfg, tile, sums, begin: gl.constexpr):
    """Of the sums: rows of the weights and whether they exist, rows of the tokens and whether they are wanted."""
    row = tile[3] * UNIT + gl.arange(0, UNIT, gl.SliceLayout(1, sums.type.layout))
    column = begin + gl.arange(0, cfg.PART, gl.SliceLayout(0, sums.type.layout))
    return row, row < cfg.ROWS, tile[1] + column, column < tile[2]


@gluon.jit
def _bias(cfg, pointers, expert, part: gl.constexpr, row, live):
    at = (expert * cfg.PARTS + part) * cfg.ROWS + row
    return gl.load(pointers.bias + at, live, other=0).to(gl.float32)[:, None]


@gluon.jit
def _store_gated(cfg, buffers, pointers, buffer, tile, begin: gl.constexpr):
    """h[row of a pair, i] = (up + 1) * gate * sigmoid(1.702 * gate), clamped, in e4m3 with the factor of fp8.py."""
    gates = _sums(cfg, buffers, buffer, begin, 0)
    ups = _sums(cfg, buffers, buffer, begin, 1)
    row, live, token, wanted = _place(cfg, tile, gates, begin)
    scale = gl.load(pointers.token_scales + token, wanted, other=0)[None, :]
    gate = gl.minimum(gates * scale + _bias(cfg, pointers, tile[0], 0, row, live), cfg.LIMIT)
    up = ups * scale + _bias(cfg, pointers, tile[0], 1, row, live)
    up = gl.minimum(gl.maximum(up, -cfg.LIMIT), cfg.LIMIT)
    h = (up + 1) * gate / (1 + gl.exp2(gate * (-1.702 * 1.4426950408889634)))
    at = token.to(gl.int64)[None, :] * cfg.ROWS + row[:, None]
    gl.store(pointers.out + at, (h * cfg.H_FACTOR).to(gl.float8e4nv), live[:, None] & wanted[None, :])


@gluon.jit
def _store_weighted(cfg, buffers, pointers, buffer, tile, begin: gl.constexpr):
    """y[pair, row] = weight of the pair * (sum + bias)."""
    sums = _sums(cfg, buffers, buffer, begin, 0)
    row, live, token, wanted = _place(cfg, tile, sums, begin)
    pair = gl.load(pointers.order + token, wanted, other=0)
    weight = gl.load(pointers.weights + pair, wanted, other=0)[None, :]
    y = (sums * (1 / cfg.H_FACTOR) + _bias(cfg, pointers, tile[0], 0, row, live)) * weight
    at = pair.to(gl.int64)[None, :] * cfg.ROWS + row[:, None]
    gl.store(pointers.out + at, y.to(pointers.out.dtype.element_ty), live[:, None] & wanted[None, :])


@gluon.jit
def gemm(
    weights_desc,
    scales_desc,
    tokens_desc,
    table_ptr,
    out_ptr,
    bias_ptr,
    token_scales_ptr,
    order_ptr,
    weights_ptr,
    N: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    STEPS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    LIMIT: gl.constexpr,
):
    PARTS: gl.constexpr = 2 if GATED else 1
    cfg = Config(N, PARTS, STAGES, BUFFERS, STEPS, ROW_TILES, ROWS, GATED, LIMIT, h_factor(LIMIT), 16 if N < 32 else 32)
    slots: gl.constexpr = STAGES * PARTS
    scale_layout: gl.constexpr = TensorMemoryScalesLayout()
    sum_layout: gl.constexpr = TensorMemoryLayout([UNIT, N], col_stride=1)
    token_scales = allocate_tensor_memory(gl.uint8, [N, BLOCKS], scale_layout)
    token_scales.store(gl.full([N, BLOCKS], ONE, gl.uint8, token_scales.get_reg_layout()))
    weight_scales = allocate_tensor_memory(gl.uint8, [UNIT, BLOCKS], scale_layout)
    up_scales = weight_scales
    if GATED:
        up_scales = allocate_tensor_memory(gl.uint8, [UNIT, BLOCKS], scale_layout)
    buffers = Buffers(
        gl.allocate_shared_memory(gl.uint8, [slots, UNIT, UNIT // 2], weights_desc.layout),
        gl.allocate_shared_memory(gl.uint8, [slots, 1, 2, 256], scales_desc.layout),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, N, UNIT], tokens_desc.layout),
        allocate_tensor_memory(gl.float32, [BUFFERS * PARTS, UNIT, N], sum_layout),
        weight_scales,
        up_scales,
        token_scales,
        barriers(STAGES),
        barriers(STAGES),
        barriers(BUFFERS),
        barriers(BUFFERS),
    )
    sources = Sources(weights_desc, scales_desc, tokens_desc)
    pointers = Pointers(table_ptr, out_ptr, bias_ptr, token_scales_ptr, order_ptr, weights_ptr)
    gl.warp_specialize(
        [
            (_store, (cfg, buffers, pointers)),
            (_load, (cfg, buffers, sources, pointers)),
            (_multiply, (cfg, buffers, pointers)),
        ],
        [1, 1],
        [LOAD_REGISTERS, PRODUCT_REGISTERS],
    )
