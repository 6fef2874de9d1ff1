"""The MXFP4 GEMM of the Hopper mixture of experts, in Gluon.

Knows tiles, barriers and registers; not routing policy, shapes of models, or how a schedule is chosen (hopper.py).

    out[token, row] = sum over k of weight[row, k] * token[k]   for the tokens of one expert

Weights are the register operand of wgmma, tokens (N of them) the shared one, so that a few tokens fill an instruction.
One producer warp runs ahead through a ring of STAGES buffers, across the borders of tiles; CONSUMERS warpgroups own one
unit row (64 weight rows) each. A stage holds UNITS units of 64 along k:

    producer: wait empty[s]  ->  TMA nibbles, scales, tokens  ->  full[s]
    consumer: wait full[s]   ->  LDS, expand to bf16, wgmma   ->  empty[s]

What a tile is: hopper_tiles.py. Layout of a unit: repack.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.moe.hopper_tiles import CONSUMERS, Config, claim, find_entries, note_order, pairs_of, rows_of, tile_at
from oscine.ops.moe.repack import BLEND, BLEND_SHIFT, FIELDS, VALUE_BITS


def _expand_asm() -> str:
    """PTX that expands the thread's 32 nibbles: $0-$15 out (bf16x2), $16-$19 nibble words, $20 the four scale bytes.

    Turned and masked (repack.py) a nibble is, as bf16, its value times 2^-126, subnormals included. The scale byte
    s + 126 at bits 14..7 is 2^(s - 1); the product takes it from the lower or upper half of a word, for free.
    """
    lines = [".reg .b32 a, y, scales<2>, scale<2>;", ".reg .b16 lower, upper;"]
    for r, shift in enumerate(("shl.b32 scales0, $20, 7;", "shr.u32 scales1, $20, 1;")):
        lines += [shift, f"and.b32 scales{r}, scales{r}, 0x7F807F80;"]
    for p in range(2):
        words = (f"${16 + 2 * p}", f"${17 + 2 * p}", "y")
        side = ("lower", "upper")[p]
        for r in range(2):
            lines += [f"mov.b32 {{lower, upper}}, scales{r};", f"mov.b32 scale{r}, {{{side}, {side}}};"]
        lines += [f"shl.b32 y, {words[1]}, {BLEND_SHIFT};", f"lop3.b32 y, {words[0]}, y, {BLEND}, 0xE4;"]
        for (j, h, r), (source, turn) in FIELDS.items():
            word = words[source]
            if turn:  # a shift where no bit must come round: it need not run where the masks do
                wraps = turn > min(VALUE_BITS)
                lines += [f"shf.l.wrap.b32 a, {word}, {word}, {turn};" if wraps else f"shl.b32 a, {word}, {turn};"]
            lines += [
                f"and.b32 a, {'a' if turn else word}, {VALUE_MASK};",
                f"mul.bf16x2 ${8 * h + 4 * p + 2 * j + r}, a, scale{r};",
            ]
    return "{\n" + "\n".join(lines) + "\n}"


VALUE_MASK = sum(0x10001 << bit for bit in VALUE_BITS)
EXPAND_ASM = gl.constexpr(_expand_asm())
EXPAND_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 16 + ["r"] * 20))

# A unit's nibbles as [8, 256] bytes: thread t of the warpgroup holds bytes 16 t .. 16 t + 15.
NIBBLES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 16], [0, 32], [0, 64], [0, 128], [1, 0]],
        warp_bases=[[2, 0], [4, 0]],
        block_bases=[],
        shape=[8, 256],
    )
)
# The same bytes as [32 (warp, g), 64 (lane % 4, byte)]: a scale word belongs to one row of it.
QUADS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[8, 0], [16, 0]],
        block_bases=[],
        shape=[32, 64],
    )
)
PRODUCER_REGISTERS = gl.constexpr(40)  # a thread
SCALE_ROW = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


@gluon.constexpr_function
def accumulator_layout(n):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, n, 16])


@aggregate
class Ring:
    """The shared buffers and their barriers."""

    nibbles: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor  # which tile a stage is of
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, nibbles, scales, tokens, tiles, full, empty):
        self.nibbles = nibbles
        self.scales = scales
        self.tokens = tokens
        self.tiles = tiles
        self.full = full
        self.empty = empty


@gluon.jit
def _load_weights(cfg, ring, nibbles_desc, scales_desc, tokens_desc, narrow_desc, stage, tile, step):
    """Opens a stage: all its bytes are announced, zeros among them; those of the weights are on their way."""
    _name_tile(cfg, ring, stage, tile.index)
    full = ring.full.index(stage)
    weights: gl.constexpr = CONSUMERS * (cfg.UNITS * nibbles_desc.block_type.nbytes + scales_desc.block_type.nbytes)
    if cfg.HALVES and tile.rows <= cfg.N // 2:
        mbarrier.expect(full, weights + cfg.UNITS * narrow_desc.block_type.nbytes)
    else:
        mbarrier.expect(full, weights + cfg.UNITS * tokens_desc.block_type.nbytes)
    for c in gl.static_range(CONSUMERS):
        slot = stage * CONSUMERS + c
        unit = (tile.expert * cfg.UNIT_ROWS + tile.row_tile * CONSUMERS + c) * cfg.K_UNITS + step * cfg.UNITS
        for u in gl.static_range(cfg.UNITS):
            buffer = ring.nibbles.index(slot * cfg.UNITS + u)
            tma.async_copy_global_to_shared(nibbles_desc, [(unit + u) * 8, 0], full, buffer)
        tma.async_copy_global_to_shared(scales_desc, [unit, 0], full, ring.scales.index(slot))


@gluon.jit
def _load_tokens(cfg, ring, tokens_desc, narrow_desc, stage, tile, step):
    full = ring.full.index(stage)
    for u in gl.static_range(cfg.UNITS):
        buffer = ring.tokens.index(stage * cfg.UNITS + u)
        column = (step * cfg.UNITS + u) * 64
        if cfg.HALVES and tile.rows <= cfg.N // 2:
            half = buffer.slice(0, cfg.N // 2, dim=0)
            tma.async_copy_global_to_shared(narrow_desc, [tile.source, column], full, half)
        elif (cfg.DIRECT or cfg.SINGLE) and tile.rows == 1:
            row = buffer._reinterpret(gl.bfloat16, [1, cfg.N, 64], narrow_desc.layout)
            tma.async_copy_global_to_shared(narrow_desc, [tile.source, 0, column], full, row)
        else:
            tma.async_copy_global_to_shared(tokens_desc, [tile.source, column], full, buffer)


@gluon.jit
def _produce(
    cfg,
    ring,
    nibbles_desc,
    scales_desc,
    tokens_desc,
    narrow_desc,
    table_ptr,
    num_tokens,
    out_ptr,
    bias_ptr,
    order_ptr,
    weights_ptr,
    claims_ptr,
    limit,
):
    stage = 0
    phase = 1
    early = 0  # stages of the first tile that are filled before the loop
    begin_index = gl.program_id(0)
    if cfg.GATED:
        gdc_wait()
    # GEMM 1 let GEMM 2 start only after it had waited for the routing: the table is there, h is not.
    entries = find_entries(cfg, table_ptr, num_tokens, 1)
    tiles = entries.count * (cfg.ROW_TILES * cfg.SPLITS)
    if not cfg.GATED:
        tile = tile_at(cfg, entries, begin_index)
        early = gl.where(begin_index < tiles, gl.minimum(tile.end - tile.begin, cfg.STAGES), 0)
        for s in range(early):
            _load_weights(cfg, ring, nibbles_desc, scales_desc, tokens_desc, narrow_desc, s, tile, tile.begin + s)
        gdc_wait()
        for s in range(early):
            _load_tokens(cfg, ring, tokens_desc, narrow_desc, s, tile, tile.begin + s)
        stage = gl.where(early == cfg.STAGES, 0, early)
        phase = gl.where(early == cfg.STAGES, 0, 1)
    if cfg.CLAIMED and begin_index == 0:
        gl.store(claims_ptr + (1 if cfg.GATED else 0), 0)  # of the other product, which has ended or will wait for this
    index = begin_index
    while index < tiles:
        tile = tile_at(cfg, entries, index)
        for step in range(tile.begin + gl.where(index == begin_index, early, 0), tile.end):
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_weights(cfg, ring, nibbles_desc, scales_desc, tokens_desc, narrow_desc, stage, tile, step)
            _load_tokens(cfg, ring, tokens_desc, narrow_desc, stage, tile, step)
            stage += 1
            if stage == cfg.STAGES:
                stage = 0
                phase ^= 1
        index = claim(claims_ptr + (0 if cfg.GATED else 1)) if cfg.CLAIMED else index + gl.num_programs(0)
    if cfg.CLAIMED:
        mbarrier.wait(ring.empty.index(stage), phase)
        _name_tile(cfg, ring, stage, index)
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _name_tile(cfg, ring, stage, index):
    """Tells the consumers which tile the stage is of."""
    if cfg.CLAIMED:
        ring.tiles.index(stage).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _expand(nibbles, scales):
    """Nibbles [8, 256] and scale words [32] of a unit -> its weights [64, 64] as the register operand."""
    quads = gl.reshape(nibbles.load(NIBBLES), [32, 64])
    words = gl.expand_dims(scales.load(gl.SliceLayout(1, QUADS)), 1)
    quads = gl.convert_layout(quads, QUADS, assert_trivial=True)
    low, high = gl.inline_asm_elementwise(
        EXPAND_ASM, EXPAND_CONSTRAINTS, [quads, words], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=16
    )
    # bits: warp, g, lane % 4, k5, k4, row 3, k0, k3 -> rows (warp, row 3, g), k (k5, k4, k3, lane % 4, k0)
    bits = gl.reshape(gl.join(low, high), [4, 8, 4, 2, 2, 2, 2, 2])
    return gl.reshape(gl.permute(bits, [0, 5, 1, 3, 4, 7, 2, 6]), [64, 64])


@gluon.jit
def _consume(
    cfg,
    c: gl.constexpr,
    ring,
    nibbles_desc,
    scales_desc,
    tokens_desc,
    narrow_desc,
    table_ptr,
    num_tokens,
    out_ptr,
    bias_ptr,
    order_ptr,
    weights_ptr,
    claims_ptr,
    limit,
):
    gdc_wait()
    gdc_launch_dependents()
    scale_rows = ring.scales._reinterpret(
        gl.int32, [cfg.STAGES * CONSUMERS * scales_desc.block_type.shape[0], 32], SCALE_ROW
    )
    stage = 0
    phase = 0
    entries = find_entries(cfg, table_ptr, num_tokens, 4)
    args = (cfg, c, ring, scale_rows, out_ptr, bias_ptr, order_ptr, weights_ptr, limit)
    index = gl.program_id(0)
    while index < entries.count * (cfg.ROW_TILES * cfg.SPLITS):
        tile = tile_at(cfg, entries, index)
        if cfg.DIRECT and cfg.GATED and c == 0 and tile.row_tile == 0:
            note_order(tile, order_ptr, 4)
        if cfg.HALVES and tile.rows <= cfg.N // 2:
            stage, phase = _compute(cfg.N // 2, tile, stage, phase, args)
        else:
            stage, phase = _compute(cfg.N, tile, stage, phase, args)
        if cfg.CLAIMED:
            mbarrier.wait(ring.full.index(stage), phase)
            index = gl.max(ring.tiles.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        else:
            index += gl.num_programs(0)


@gluon.jit
def _compute(n: gl.constexpr, tile, stage, phase, args):
    """A tile of n columns, the ring's N or half as many. Returns the stage that comes next, and its phase."""
    cfg, c, ring, scale_rows, out_ptr, bias_ptr, order_ptr, weights_ptr, limit = args
    layout: gl.constexpr = accumulator_layout(n)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    # What the epilogue needs is on its way while the tile is computed.
    unit_row = tile.row_tile * CONSUMERS + c
    row = (tile.expert * cfg.UNIT_ROWS + unit_row) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    bias = gl.load(bias_ptr + row, (unit_row < cfg.UNIT_ROWS) & (tile.split == 0), other=0)
    if not cfg.GATED and n <= cfg.PART:
        column = gl.arange(0, n, gl.SliceLayout(0, layout))
        pair, weight, wanted = pairs_of(cfg, tile, column, order_ptr, weights_ptr)
    acc = gl.zeros([64, n], gl.float32, layout)
    for _ in range(tile.begin, tile.end):
        mbarrier.wait(ring.full.index(stage), phase)
        for u in gl.static_range(cfg.UNITS):
            nibbles = ring.nibbles.index((stage * CONSUMERS + c) * cfg.UNITS + u)
            scales = scale_rows.index((stage * CONSUMERS + c) * ring.scales.shape[1] + u)
            weights = gl.convert_layout(_expand(nibbles, scales), operand, assert_trivial=True)
            if u > 0:
                acc = warpgroup_mma_wait(0, deps=[acc])
            tokens = ring.tokens.index(stage * cfg.UNITS + u).slice(0, n, dim=0)
            acc = warpgroup_mma(weights, tokens.permute([1, 0]), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage += 1
        if stage == cfg.STAGES:
            stage = 0
            phase ^= 1
    acc += bias.to(gl.float32)[:, None]
    if cfg.GATED:
        _store_gated(cfg, acc, 0, tile, unit_row, out_ptr, limit)
    elif n <= cfg.PART:
        _store_pairs(cfg, acc, pair, weight, wanted, unit_row, tile.split, out_ptr)
    else:
        _store_weighted(cfg, acc, 0, tile, unit_row, out_ptr, order_ptr, weights_ptr)
    return stage, phase


@gluon.jit
def _halves(acc):
    """The left and the right half of the columns."""
    n: gl.constexpr = acc.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(acc, [64, 2, n]), [0, 2, 1]))


@gluon.jit
def _store_gated(cfg, acc, begin: gl.constexpr, tile, unit_row, out_ptr, limit):
    """h[row, i] = (up + 1) * gate * sigmoid(1.702 * gate), clamped; gate and up lie in one thread."""
    n: gl.constexpr = acc.shape[1]
    if n > cfg.PART:
        left, right = _halves(acc)
        _store_gated(cfg, left, begin, tile, unit_row, out_ptr, limit)
        _store_gated(cfg, right, begin + n // 2, tile, unit_row, out_ptr, limit)
    else:
        pairs = gl.permute(gl.reshape(acc, [4, 2, 8, n]), [0, 2, 3, 1])
        gate, up = gl.split(gl.reshape(pairs, [32, n, 2]))
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        value = (up + 1) * gate / (1 + gl.exp2(gate * (-1.702 * 1.4426950408889634)))
        i = unit_row * 32 + gl.arange(0, 32, gl.SliceLayout(1, gate.type.layout))
        column = begin + gl.arange(0, n, gl.SliceLayout(0, gate.type.layout))
        row, wanted = rows_of(cfg, tile, column)
        out_ptrs = out_ptr + row.to(gl.int64)[None, :] * cfg.ROWS + i[:, None]
        gl.store(out_ptrs, value.to(gl.bfloat16), (i < cfg.ROWS)[:, None] & wanted[None, :])


@gluon.jit
def _store_weighted(cfg, acc, begin: gl.constexpr, tile, unit_row, out_ptr, order_ptr, weights_ptr):
    n: gl.constexpr = acc.shape[1]
    if n > cfg.PART:
        left, right = _halves(acc)
        _store_weighted(cfg, left, begin, tile, unit_row, out_ptr, order_ptr, weights_ptr)
        _store_weighted(cfg, right, begin + n // 2, tile, unit_row, out_ptr, order_ptr, weights_ptr)
    else:
        column = begin + gl.arange(0, n, gl.SliceLayout(0, acc.type.layout))
        pair, weight, wanted = pairs_of(cfg, tile, column, order_ptr, weights_ptr)
        _store_pairs(cfg, acc, pair, weight, wanted, unit_row, tile.split, out_ptr)


@gluon.jit
def _store_pairs(cfg, acc, pair, weight, wanted, unit_row, split, out_ptr):
    """y[pair, split, row] = weight of the pair * acc."""
    row = unit_row * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    out_ptrs = out_ptr + (pair * cfg.SPLITS + split).to(gl.int64)[None, :] * cfg.ROWS + row[:, None]
    value = acc * weight[None, :]
    gl.store(out_ptrs, value.to(out_ptr.dtype.element_ty), (row < cfg.ROWS)[:, None] & wanted[None, :])


@gluon.jit
def _consume_0(cfg, ring, a, b, c, d, e, f, g, h, i, j, k, m):
    _consume(cfg, 0, ring, a, b, c, d, e, f, g, h, i, j, k, m)


@gluon.jit
def _consume_1(cfg, ring, a, b, c, d, e, f, g, h, i, j, k, m):
    _consume(cfg, 1, ring, a, b, c, d, e, f, g, h, i, j, k, m)


@gluon.jit
def _consume_2(cfg, ring, a, b, c, d, e, f, g, h, i, j, k, m):
    _consume(cfg, 2, ring, a, b, c, d, e, f, g, h, i, j, k, m)


@gluon.jit(do_not_specialize=["num_tokens"])
def gemm(
    nibbles_desc,
    scales_desc,
    tokens_desc,
    narrow_desc,
    table_ptr,
    num_tokens,
    out_ptr,
    bias_ptr,
    order_ptr,
    weights_ptr,
    claims_ptr,
    limit,
    N: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    HALVES: gl.constexpr,
    CLAIMED: gl.constexpr,
    SPLITS: gl.constexpr,
    K_UNITS: gl.constexpr,
    UNIT_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    SINGLE: gl.constexpr,
    DIRECT: gl.constexpr,
    EXPERTS_PER_TOKEN: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
):
    cfg = Config(
        N, UNITS, STAGES, HALVES, CLAIMED, SPLITS, K_UNITS, UNIT_ROWS, ROWS, GATED, SINGLE, DIRECT, EXPERTS_PER_TOKEN
    )
    BOX: gl.constexpr = scales_desc.block_type.shape[0]  # UNITS, up to a power of two
    ring = Ring(
        gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS * UNITS, 8, 256], nibbles_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, BOX, 32], scales_desc.layout),
        gl.allocate_shared_memory(gl.bfloat16, [STAGES * UNITS, N, 64], tokens_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], SCALE_ROW),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(s), count=1)
        mbarrier.init(ring.empty.index(s), count=CONSUMERS)
    args = (
        cfg, ring, nibbles_desc, scales_desc, tokens_desc, narrow_desc, table_ptr, num_tokens, out_ptr, bias_ptr,
        order_ptr, weights_ptr, claims_ptr, limit,
    )  # fmt: skip
    gl.warp_specialize(
        [(_consume_0, args), (_consume_1, args), (_consume_2, args), (_produce, args)],
        [4, 4, 1],
        [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGISTERS],
    )
