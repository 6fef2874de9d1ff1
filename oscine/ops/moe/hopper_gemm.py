"""The MXFP4 GEMM of the Hopper mixture of experts, in Gluon.

Knows tiles, barriers and registers; not routing policy, shapes of models, or how a schedule is chosen (hopper.py).

    out[token, row] = sum over k of weight[row, k] * token[k]   for the tokens of one expert

Weights are the register operand of wgmma, tokens (N of them) the shared one, so that a few tokens fill an instruction.
Two producer warps run ahead through a ring of STAGES buffers, across the borders of tiles: one takes the tiles and
loads weights, the other one loads tokens. CONSUMERS warpgroups own one unit row (64 weight rows) each. A stage holds
UNITS units of 64 along k:

    producers: wait empty[s]  ->  TMA nibbles, scales; TMA tokens  ->  full[s]
    consumer:  wait full[s]   ->  LDS, expand, wgmma   ->  empty[s]

With RANK, low-rank adapters add to the products of the rows that have them: after the last stage along k, a tile has
stages of second factors and values (LowRankRows), 16 ranks each, for each adapter of its entry.

What a tile is: hopper_tiles.py. Expansion: hopper_expand.py. Layout of a unit: hopper_repack.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.compat import async_load, reinterpret
from oscine.ops.moe.hopper_choice import store_choice
from oscine.ops.moe.hopper_expand import block_scales, blocks, scaled_weights, table_weights
from oscine.ops.moe.hopper_tiles import (
    Added,
    Config,
    adapters_ahead,
    adapters_of,
    find_entries,
    h_factor,
    is_narrow,
    list_of,
    note_order,
    pairs_of,
    quarters,
    rows_of,
    tile_at,
)
from oscine.ops.record import record
from oscine.ops.tile_scheduler import next_tile

PLANES_FACTOR = gl.constexpr(2.0**112)  # weights as FP8 are 2^-14 too small, their scales 2^-98
TABLE_FACTOR = gl.constexpr(2.0**-12)  # weights of tables are 2^13 too large, the scales of rows 2^-1 too small
PRODUCER_REGISTERS = gl.constexpr(40)  # a thread
PRODUCERS = gl.constexpr(2)  # warps that load
# Threads that store different columns at a time meet different banks.
STAGED_H = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=4, max_phase=4, order=[1, 0]))
STAGED_HALF_H = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=2, max_phase=4, order=[1, 0]))
STAGED_Y = gl.constexpr(gl.SwizzledSharedLayout(vec=8, per_phase=1, max_phase=8, order=[1, 0]))
SCALE_ROW = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[0]))


@gluon.constexpr_function
def accumulator_layout(columns, k):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, k])


@record
class Ring:
    """The shared buffers and their barriers."""

    nibbles: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor
    tokens: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor  # which tile a stage is of
    results: gl.shared_memory_descriptor  # STAGED: of a part of the columns; of a consumer each, as the next two
    factors: gl.shared_memory_descriptor  # of the columns
    targets: gl.shared_memory_descriptor  # rows of the output of the columns, or -1
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    named: gl.shared_memory_descriptor  # DYNAMIC: tiles has the index of the stage's tile


@record
class Sources:
    """What TMA reads."""

    nibbles: tma.tensor_descriptor
    scales: tma.tensor_descriptor
    tokens: tma.tensor_descriptor  # boxes of N tokens
    narrow: tma.tensor_descriptor  # of fewer: a half or a quarter, or a lone one


@record
class Pointers:
    """What programs read and write themselves."""

    table: gl.tensor
    out: gl.tensor
    rows: gl.tensor
    token_scales: gl.tensor  # GEMM 1 with PLANES: of the rows of the tokens
    order: gl.tensor
    ids: gl.tensor  # CHOICE: written by GEMM 1, as the weights are
    weights: gl.tensor
    tile_counters: gl.tensor


@gluon.jit
def _load_weights(cfg, ring, sources, stage, tile, step):
    full = ring.full.index(stage)
    unit_bytes: gl.constexpr = cfg.UNITS * sources.nibbles.block_type.nbytes + sources.scales.block_type.nbytes
    mbarrier.expect(full, cfg.CONSUMERS * unit_bytes)
    for c in gl.static_range(cfg.CONSUMERS):
        slot = stage * cfg.CONSUMERS + c
        unit = (tile.expert * cfg.UNIT_ROWS + tile.row_tile * cfg.CONSUMERS + c) * cfg.K_UNITS + step * cfg.UNITS
        for u in gl.static_range(cfg.UNITS):
            buffer = ring.nibbles.index(slot * cfg.UNITS + u)
            async_load(sources.nibbles, [(unit + u) * 8, 0], full, buffer)
        async_load(sources.scales, [unit, 0], full, ring.scales.index(slot))


@gluon.jit
def _expect_tokens(cfg, ring, sources, stage, tile):
    """Announces all bytes of the tokens to come."""
    full = ring.full.index(stage)
    tokens: gl.constexpr = cfg.UNITS * sources.tokens.block_type.nbytes
    narrow: gl.constexpr = cfg.UNITS * sources.narrow.block_type.nbytes
    if cfg.MIDDLE > 0:
        boxes = quarters(cfg, tile)
        if boxes == 4:
            mbarrier.expect(full, tokens)
        elif boxes == 3:
            mbarrier.expect(full, 3 * narrow)
        elif boxes == 2:
            mbarrier.expect(full, 2 * narrow)
        else:
            mbarrier.expect(full, narrow)
    elif is_narrow(cfg, tile):
        mbarrier.expect(full, narrow)
    else:
        mbarrier.expect(full, tokens)


@gluon.jit
def _load_tokens(cfg, ring, sources, stage, tile, step):
    _expect_tokens(cfg, ring, sources, stage, tile)
    full = ring.full.index(stage)
    box: gl.constexpr = sources.narrow.block_type.shape
    if cfg.MIDDLE > 0 and quarters(cfg, tile) < 4:
        _load_quarters(cfg, ring, sources, stage, tile, step)
    else:
        for u in gl.static_range(cfg.UNITS):
            buffer = ring.tokens.index(stage * cfg.UNITS + u)
            column = (step * cfg.UNITS + u) * 64
            row = tile.source * (2 if cfg.PLANES == 2 else 1)
            if cfg.MIDDLE > 0 or not is_narrow(cfg, tile):
                async_load(sources.tokens, [row, column], full, buffer)
            elif cfg.DIRECT or cfg.SINGLE:
                boxes: gl.constexpr = ring.tokens.shape[1] // box[1]  # per unit
                shape: gl.constexpr = [cfg.STAGES * cfg.UNITS * boxes, 1, box[1], 64]
                lones = reinterpret(ring.tokens, sources.narrow.dtype, shape, sources.narrow.layout)
                lone = lones.index((stage * cfg.UNITS + u) * boxes)
                async_load(sources.narrow, [tile.source, 0, column], full, lone)
            else:
                async_load(sources.narrow, [row, column], full, buffer.slice(0, box[0], dim=0))


@gluon.jit
def _load_quarters(cfg, ring, sources, stage, tile, step):
    """As many boxes of N / 4 tokens as the tile needs."""
    full = ring.full.index(stage)
    box: gl.constexpr = sources.narrow.block_type.shape
    boxes = reinterpret(
        ring.tokens, sources.narrow.dtype, [cfg.STAGES * cfg.UNITS * 4, box[0], 64], sources.narrow.layout
    )
    for i in range(quarters(cfg, tile)):
        for u in gl.static_range(cfg.UNITS):
            buffer = boxes.index((stage * cfg.UNITS + u) * 4 + i)
            at = [tile.source + i * box[0], (step * cfg.UNITS + u) * 64]
            async_load(sources.narrow, at, full, buffer)


@gluon.jit
def _load_factors(cfg, ring, added, stage, tile, slot, chunk: gl.constexpr):
    full = ring.full.index(stage)
    mbarrier.expect(full, cfg.CONSUMERS * added.factors.block_type.nbytes)
    shape: gl.constexpr = [cfg.STAGES * cfg.CONSUMERS * cfg.UNITS, 1, 1, 64, 16]
    buffers = reinterpret(ring.nibbles, added.factors.dtype, shape, added.factors.layout)
    for c in gl.static_range(cfg.CONSUMERS):
        row = (tile.row_tile * cfg.CONSUMERS + c) * 64
        buffer = buffers.index((stage * cfg.CONSUMERS + c) * cfg.UNITS)
        async_load(added.factors, [slot, tile.expert, row, chunk * 16], full, buffer)


@gluon.jit
def _load_values(cfg, ring, added, stage, tile, j, chunk: gl.constexpr):
    full = ring.full.index(stage)
    mbarrier.expect(full, added.values.block_type.nbytes)
    row = j * added.rows + tile.first * (2 if cfg.PLANES == 2 else 1)
    async_load(added.values, [row, chunk * 16], full, _values(cfg, ring, added, stage))


@gluon.jit
def _factors(cfg, ring, added):
    """The buffers of weights, the first one of a stage and consumer for factors [64, 16]."""
    shape: gl.constexpr = [cfg.STAGES * cfg.CONSUMERS * cfg.UNITS, 64, 16]
    return reinterpret(ring.nibbles, added.factors.dtype, shape, added.values.layout)


@gluon.jit
def _values(cfg, ring, added, stage):
    """The stage's buffer of tokens, for values [columns, 16]."""
    columns: gl.constexpr = ring.tokens.shape[1]
    boxes: gl.constexpr = cfg.UNITS * (2 if cfg.PLANES else 4)  # of a stage
    return reinterpret(ring.tokens, added.values.dtype, [cfg.STAGES * boxes, columns, 16], added.values.layout).index(
        stage * boxes
    )


@gluon.jit
def _hold_back(cfg, ring, under_way, oldest, oldest_phase):
    """Waits until less than WINDOW stages are under way."""
    if cfg.WINDOW > 0:
        if under_way == cfg.WINDOW:
            mbarrier.wait(ring.full.index(oldest), oldest_phase)
            oldest, oldest_phase = _next(cfg, oldest, oldest_phase)
        else:
            under_way += 1
    return under_way, oldest, oldest_phase


@gluon.jit
def _produce_weights(cfg, ring, sources, pointers, added, num_tokens):
    """Loads weights; DYNAMIC: also takes tiles from the scheduler, and names them to the other warps."""
    stage = 0
    phase = 1
    under_way = 0
    oldest = 0
    oldest_phase = 0
    # GEMM 1 let GEMM 2 start only after it had waited for the routing: the table is there, h is not. With RANK the
    # kernel before both of them did.
    if cfg.GATED and cfg.RANK == 0:
        gdc_wait()
    entries = find_entries(cfg, pointers.table, num_tokens, 1)
    tiles = entries.count * (cfg.ROW_TILES * cfg.SPLITS)
    index = gl.program_id(0)
    while index < tiles:
        tile = tile_at(cfg, entries, index)
        count, slot = adapters_ahead(cfg, added, tile, index)
        for step in range(tile.begin, tile.end):
            mbarrier.wait(ring.empty.index(stage), phase)
            under_way, oldest, oldest_phase = _hold_back(cfg, ring, under_way, oldest, oldest_phase)
            _name_tile(cfg, ring, stage, index)
            _load_weights(cfg, ring, sources, stage, tile, step)
            stage, phase = _next(cfg, stage, phase)
        if cfg.RANK > 0:
            count, slot = adapters_of(cfg, added, tile, index, count, slot)
            for j in range(count):
                following = gl.load(list_of(cfg, added, tile) + j + 2, j + 1 < count, other=0)
                for chunk in gl.static_range(cfg.RANK // 16):
                    mbarrier.wait(ring.empty.index(stage), phase)
                    under_way, oldest, oldest_phase = _hold_back(cfg, ring, under_way, oldest, oldest_phase)
                    _name_tile(cfg, ring, stage, index)
                    _load_factors(cfg, ring, added, stage, tile, slot, chunk)
                    stage, phase = _next(cfg, stage, phase)
                slot = following
        if cfg.DYNAMIC:
            gdc_wait()  # for the other product, which has ended or will wait for this one
            if index == 0:
                gl.store(pointers.tile_counters + (1 if cfg.GATED else 0), 0)
            index = next_tile(pointers.tile_counters + (0 if cfg.GATED else 1))
        else:
            index += gl.num_programs(0)
    if cfg.DYNAMIC:
        mbarrier.wait(ring.empty.index(stage), phase)
        _name_tile(cfg, ring, stage, index)
        mbarrier.arrive(ring.full.index(stage), count=PRODUCERS)


@gluon.jit
def _produce_tokens(cfg, ring, sources, pointers, added, num_tokens):
    stage = 0
    phase = 1
    if not (cfg.GATED and cfg.RANK > 0):
        gdc_wait()
    entries = find_entries(cfg, pointers.table, num_tokens, 1)
    tiles = entries.count * (cfg.ROW_TILES * cfg.SPLITS)
    index = gl.program_id(0)
    while index < tiles:
        tile = tile_at(cfg, entries, index)
        count, slot = adapters_ahead(cfg, added, tile, index)
        for step in range(tile.begin, tile.end):
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_tokens(cfg, ring, sources, stage, tile, step)
            stage, phase = _next(cfg, stage, phase)
        if cfg.RANK > 0:
            count, slot = adapters_of(cfg, added, tile, index, count, slot)
            for j in range(count):
                for chunk in gl.static_range(cfg.RANK // 16):
                    mbarrier.wait(ring.empty.index(stage), phase)
                    _load_values(cfg, ring, added, stage, tile, j, chunk)
                    stage, phase = _next(cfg, stage, phase)
        if cfg.DYNAMIC:
            # This warp can be a whole ring ahead of that of the weights. Once the stage is empty, its last use was
            # named, so the parity can only be that of this use.
            mbarrier.wait(ring.empty.index(stage), phase)
            mbarrier.wait(ring.named.index(stage), phase ^ 1)
            index = _tile_of(ring, stage, 1)
        else:
            index += gl.num_programs(0)


@gluon.jit
def _next(cfg, stage, phase):
    stage += 1
    if stage == cfg.STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _name_tile(cfg, ring, stage, index):
    """Tells the others which tile the stage is of."""
    if cfg.DYNAMIC:
        ring.tiles.index(stage).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
        mbarrier.arrive(ring.named.index(stage), count=1)


@gluon.jit
def _tile_of(ring, stage, WARPS: gl.constexpr):
    """The tile that the stage is of, for callers of so many warps."""
    return gl.max(ring.tiles.index(stage).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _consume(cfg, c: gl.constexpr, ring, sources, pointers, added, num_tokens):
    if not (cfg.GATED and cfg.RANK > 0):
        gdc_wait()
    gdc_launch_dependents()
    scale_units: gl.constexpr = cfg.STAGES * cfg.CONSUMERS * sources.scales.block_type.shape[0]
    if cfg.PLANES == 1:
        scale_rows = reinterpret(ring.scales, gl.int16, [scale_units, 64], SCALE_ROW)
    else:
        scale_rows = reinterpret(ring.scales, gl.int32, [scale_units, 32], SCALE_ROW)
    stage = 0
    phase = 0
    entries = find_entries(cfg, pointers.table, num_tokens, 4)
    if cfg.CHOICE > 0 and cfg.GATED and c == 0 and gl.program_id(0) == 0:
        store_choice(entries.chosen, pointers.table, pointers.ids, pointers.weights, cfg.EXPERTS_PER_TOKEN, 4)
    source = (cfg, c, ring, scale_rows, added)
    index = gl.program_id(0)
    while index < entries.count * (cfg.ROW_TILES * cfg.SPLITS):
        tile = tile_at(cfg, entries, index)
        if cfg.DIRECT and cfg.GATED and c == 0 and tile.row_tile == 0:
            note_order(tile, pointers.order, 4)
        if cfg.HALVES and cfg.N >= 128 and tile.rows <= cfg.N // 4:
            stage, phase = _compute(cfg.N // 4, tile, index, stage, phase, source, pointers)
        elif cfg.HALVES and is_narrow(cfg, tile):
            stage, phase = _compute(cfg.N // 2, tile, index, stage, phase, source, pointers)
        elif cfg.MIDDLE > 0 and tile.rows <= cfg.MIDDLE:
            stage, phase = _compute(cfg.MIDDLE, tile, index, stage, phase, source, pointers)
        else:
            stage, phase = _compute(cfg.N, tile, index, stage, phase, source, pointers)
        if cfg.DYNAMIC:
            mbarrier.wait(ring.full.index(stage), phase)
            index = _tile_of(ring, stage, 4)
        else:
            index += gl.num_programs(0)
    if cfg.GATED and cfg.RANK > 0:
        gdc_wait()  # also without a tile, so that what comes after this kernel comes after the one before


@gluon.constexpr_function
def widths(columns):
    """Columns of each product of a tile. Tensors need powers of two, so other numbers are two products."""
    most = 1 << (columns.bit_length() - 1)
    return (columns,) if columns == most else (most, columns - most)


@gluon.jit
def _compute(n: gl.constexpr, tile, index, stage, phase, source, pointers):
    """A tile of n tokens, the ring's N or a part of it. Returns the stage that comes next, and its phase."""
    cfg, c, ring, _, added = source
    columns: gl.constexpr = 2 * n if cfg.PLANES == 2 else n
    parts: gl.constexpr = widths(columns)
    layout: gl.constexpr = accumulator_layout(parts[0], 32 if cfg.PLANES else 16)
    EARLY: gl.constexpr = columns == 8 or cfg.PLANES != 2  # more columns of planes leave no registers for it
    unit_row = tile.row_tile * cfg.CONSUMERS + c
    row = (tile.expert * cfg.UNIT_ROWS + unit_row) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if EARLY:  # what the epilogue needs is on its way while the tile is computed
        words = gl.load(pointers.rows + row, unit_row < cfg.UNIT_ROWS, other=0)
    if cfg.STAGED:
        factor, target = _columns(cfg, tile, pointers)
    first = _zeros(cfg, parts[0])
    sums = (first,) if len(parts) == 1 else (first, _zeros(cfg, parts[1]))
    count, slot = adapters_ahead(cfg, added, tile, index)
    for _ in range(tile.begin, tile.end):
        sums, stage, phase = _add_stage(sums, parts, stage, phase, source)
    if not EARLY:
        words = gl.load(pointers.rows + row, unit_row < cfg.UNIT_ROWS, other=0)
    if cfg.RANK > 0:
        count, slot = adapters_of(cfg, added, tile, index, count, slot)
        sums, stage, phase = _add_adapters(sums, parts, words, count, tile, stage, phase, source, pointers)
    if cfg.PLANES == 2:
        sums = (_add_planes(cfg, sums[0], tile, pointers),)
    words = gl.convert_layout(words, gl.SliceLayout(1, sums[0].type.layout), assert_trivial=True)
    bias = gl.where(tile.split == 0, words << 16, 0).to(gl.float32, bitcast=True)
    scale = (words & -65536).to(gl.float32, bitcast=True)
    if cfg.RANK > 0:
        scale = gl.full([64], 1.0, gl.float32, scale.type.layout)
    if cfg.PLANES == 1:
        scale *= TABLE_FACTOR if cfg.GATED else TABLE_FACTOR / cfg.H_FACTOR
    if cfg.STAGED:
        ring.factors.index(c).store(factor)
        ring.targets.index(c).store(target)
    for i in gl.static_range(len(parts)):
        _store(cfg, sums[i], scale, bias, i * parts[0], tile, unit_row, source, pointers)
    return stage, phase


@gluon.jit
def _zeros(cfg, columns: gl.constexpr):
    return gl.zeros([64, columns], gl.float32, accumulator_layout(columns, 32 if cfg.PLANES else 16))


@gluon.jit
def _add_stage(sums, parts: gl.constexpr, stage, phase, source):
    """Returns sums + the products of the stage, the next stage, and its phase."""
    cfg, c, ring, scale_rows, _ = source
    k_width: gl.constexpr = 4 if cfg.PLANES else 2
    layout: gl.constexpr = accumulator_layout(parts[0], 8 * k_width)
    mbarrier.wait(ring.full.index(stage), phase)
    for u in gl.static_range(cfg.UNITS):
        nibbles = ring.nibbles.index((stage * cfg.CONSUMERS + c) * cfg.UNITS + u)
        scales = scale_rows.index((stage * cfg.CONSUMERS + c) * ring.scales.shape[1] + u)
        tokens = ring.tokens.index(stage * cfg.UNITS + u)
        if cfg.PLANES == 2:
            sums = (_add_blocks(nibbles, scales, tokens, sums[0]),)
        else:
            if cfg.PLANES == 1:
                weights = table_weights(nibbles, scales, gl.DotOperandLayout(0, layout, k_width))
            else:
                weights = scaled_weights(nibbles, scales, gl.DotOperandLayout(0, layout, k_width))
            if u > cfg.AHEAD:
                sums = _waited(sums, cfg.AHEAD * len(parts))
            sums = _multiplied(weights, k_width, tokens, sums, parts)
    if cfg.PLANES != 2:
        sums = _waited(sums, 0)
    mbarrier.arrive(ring.empty.index(stage), count=1)
    stage, phase = _next(cfg, stage, phase)
    return sums, stage, phase


@gluon.jit
def _add_adapters(sums, parts: gl.constexpr, words, count, tile, stage, phase, source, pointers):
    """Returns the sums, with the scales that _compute would give them, and what `count` adapters add."""
    cfg, c, ring, _, added = source
    scaled = ()
    for i in gl.static_range(len(parts)):
        own = gl.convert_layout(sums[i], accumulator_layout(parts[i], 16), assert_trivial=True)
        scale = gl.convert_layout(words & -65536, gl.SliceLayout(1, own.type.layout), assert_trivial=True)
        if cfg.PLANES == 2:  # first, as the sums are near the least numbers
            own *= _plane_scales(cfg, own, tile, pointers)
        own *= scale.to(gl.float32, bitcast=True)[:, None]
        scaled += (own,)
    for _ in range(count * (cfg.RANK // 16)):
        mbarrier.wait(ring.full.index(stage), phase)
        factor = _factors(cfg, ring, added).index((stage * cfg.CONSUMERS + c) * cfg.UNITS)
        values = _values(cfg, ring, added, stage)
        more = ()
        for i in gl.static_range(len(parts)):
            columns = values.slice(i * parts[0], parts[i], dim=0).permute([1, 0])
            more += (warpgroup_mma(factor, columns, scaled[i], is_async=True),)
        scaled = _waited(more, 0)
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage, phase = _next(cfg, stage, phase)
    return scaled, stage, phase


@gluon.jit
def _plane_scales(cfg, acc, tile, pointers):
    """[1, 2 n], of planes side by side, or one number: what _add_planes multiplies with."""
    if cfg.GATED:
        column = gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout)) // 2
        _, wanted = rows_of(cfg, tile, column)
        scales = gl.load(pointers.token_scales + tile.source + column, wanted, other=0) * PLANES_FACTOR
        factor = scales[None, :]
    else:
        factor = PLANES_FACTOR / cfg.H_FACTOR
    return factor


@gluon.jit
def _multiplied(weights, k_width: gl.constexpr, tokens, sums, parts: gl.constexpr):
    """Starts sums + weights * tokens; _waited gives the results."""
    added = ()
    for i in gl.static_range(len(parts)):
        added += (_product(weights, k_width, tokens, i * parts[0], parts[i], sums[i]),)
    return added


@gluon.jit
def _product(weights, k_width: gl.constexpr, tokens, begin: gl.constexpr, columns: gl.constexpr, acc):
    """acc + weights * tokens, of some columns from `begin` on."""
    operand: gl.constexpr = gl.DotOperandLayout(0, accumulator_layout(columns, 8 * k_width), k_width)
    weights = gl.convert_layout(weights, operand, assert_trivial=True)
    return warpgroup_mma(weights, tokens.slice(begin, columns, dim=0).permute([1, 0]), acc, is_async=True)


@gluon.jit
def _waited(sums, outstanding: gl.constexpr):
    """Waits until at most `outstanding` products are in flight. Returns sums."""
    there = warpgroup_mma_wait(outstanding, deps=sums)
    return (there,) if len(sums) == 1 else there


@gluon.jit
def _add_blocks(nibbles, scales, tokens, acc):
    """acc + a unit's product with the tokens [columns, 64]; what a scale multiplies is the product of its block."""
    tokens = tokens.slice(0, acc.shape[1], dim=0).permute([1, 0])
    layout: gl.constexpr = acc.type.layout
    first, second = blocks(nibbles, gl.DotOperandLayout(0, layout, 4))
    zero = gl.zeros(acc.shape, gl.float32, layout)
    left = warpgroup_mma(first, tokens.slice(0, 32, dim=0), zero, use_acc=False, is_async=True)
    right = warpgroup_mma(second, tokens.slice(32, 32, dim=0), zero, use_acc=False, is_async=True)
    first_scale, second_scale = block_scales(scales, gl.SliceLayout(1, layout))
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    acc += left * first_scale[:, None]
    acc += right * second_scale[:, None]
    return acc


@gluon.jit
def _add_planes(cfg, acc, tile, pointers):
    """[64, 2 n] -> [64, n]: the two planes of a token, undone what they and the weights were multiplied by."""
    high, low = gl.split(gl.reshape(acc, [64, acc.shape[1] // 2, 2]))
    value = high + low * 0.0625
    if cfg.RANK > 0:  # it has been done
        return value
    value *= PLANES_FACTOR
    if cfg.GATED:
        value *= _token_scales(cfg, value, 0, tile, pointers)[None, :]
    else:
        value *= 1 / cfg.H_FACTOR
    return value


@gluon.jit
def _store(cfg, acc, scale, bias, begin: gl.constexpr, tile, unit_row, source, pointers):
    """acc * scale + bias, in parts of cfg.PART columns, of which the first is `begin`."""
    n: gl.constexpr = acc.shape[1]
    if n > cfg.PART:
        left, right = _halves(acc)
        _store(cfg, left, scale, bias, begin, tile, unit_row, source, pointers)
        _store(cfg, right, scale, bias, begin + n // 2, tile, unit_row, source, pointers)
    elif cfg.STAGED:
        _store_staged(cfg, acc, scale, bias, begin, tile, unit_row, source, pointers)
    else:
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        acc *= gl.convert_layout(scale, rows, assert_trivial=True)[:, None]
        if cfg.GATED and cfg.PLANES == 1:
            acc *= _token_scales(cfg, acc, begin, tile, pointers)[None, :]
        acc += gl.convert_layout(bias, rows, assert_trivial=True)[:, None]
        if cfg.GATED:
            _store_gated(cfg, acc, begin, tile, unit_row, pointers.out)
        else:
            _store_weighted(cfg, acc, begin, tile, unit_row, pointers)


@gluon.jit
def _halves(x):
    """Of the columns."""
    n: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, [64, 2, n // 2]), [0, 2, 1]))


@gluon.jit
def _columns(cfg, tile, pointers):
    """For each of N columns: the factor of its result, and its row of the output, or -1."""
    column = gl.arange(0, cfg.N, gl.BlockedLayout([1], [32], [4], [0]))
    if cfg.GATED:
        row, wanted = rows_of(cfg, tile, column)
        # fp16 has no scales
        factor = gl.load(pointers.token_scales + tile.source + column, wanted & (cfg.PLANES == 1), other=1)
    else:
        pair, wanted = pairs_of(cfg, tile, column, pointers.order)
        factor = gl.load(pointers.weights + pair, wanted, other=0)
        row = pair * cfg.SPLITS + tile.split
    return factor, gl.where(wanted, row, -1)


@gluon.jit
def _store_staged(cfg, acc, scale, bias, begin: gl.constexpr, tile, unit_row, source, pointers):
    n: gl.constexpr = acc.shape[1]
    width: gl.constexpr = 32 if cfg.GATED else 64  # results of a column
    lanes: gl.constexpr = width // 8
    copy: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    _, c, ring, _, _ = source
    factor = ring.factors.index(c).slice(begin, n).load(gl.SliceLayout(0, acc.type.layout))
    scale = gl.convert_layout(scale, rows, assert_trivial=True)
    bias = gl.convert_layout(bias, rows, assert_trivial=True)
    if cfg.GATED:
        acc *= scale[:, None]
        if cfg.PLANES == 1:
            acc *= factor[None, :]
        value = _swiglu(acc + bias[:, None], cfg.LIMIT, cfg.H_FACTOR if cfg.PLANES else 1.0)
    else:
        value = (acc * scale[:, None] + bias[:, None]) * factor[None, :]
    results = ring.results.index(c).slice(0, n, dim=0)
    results.store(gl.permute(value, [1, 0]).to(results.dtype))
    target = ring.targets.index(c).slice(begin, n).load(gl.SliceLayout(1, copy))
    row = unit_row * width + gl.arange(0, width, gl.SliceLayout(0, copy))
    out_ptrs = pointers.out + target.to(gl.int64)[:, None] * cfg.ROWS + row[None, :]
    gl.store(out_ptrs, results.load(copy), (target >= 0)[:, None] & (row < cfg.ROWS)[None, :])


@gluon.jit
def _swiglu(acc, LIMIT: gl.constexpr, FACTOR: gl.constexpr):
    """[64, n] -> FACTOR * h [32, n]."""
    n: gl.constexpr = acc.shape[1]
    pairs = gl.permute(gl.reshape(acc, [4, 2, 8, n]), [0, 2, 3, 1])
    gate, up = gl.split(gl.reshape(pairs, [32, n, 2]))
    gate = gl.minimum(gate, LIMIT)
    up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    below = 1 + gl.exp2(gate * (-1.702 * 1.4426950408889634))
    sigmoid = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [below], dtype=gl.float32, is_pure=True, pack=1
    )
    return (up * FACTOR + FACTOR) * gate * sigmoid


@gluon.jit
def _token_scales(cfg, acc, begin: gl.constexpr, tile, pointers):
    """Of the columns of a part of GEMM 1."""
    column = begin + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
    _, wanted = rows_of(cfg, tile, column)
    return gl.load(pointers.token_scales + tile.source + column, wanted, other=0)


@gluon.jit
def _store_gated(cfg, acc, begin: gl.constexpr, tile, unit_row, out_ptr):
    """h[row, i] = (up + 1) * gate * sigmoid(1.702 * gate), clamped; gate and up lie in one thread."""
    n: gl.constexpr = acc.shape[1]
    pairs = gl.permute(gl.reshape(acc, [4, 2, 8, n]), [0, 2, 3, 1])
    gate, up = gl.split(gl.reshape(pairs, [32, n, 2]))
    gate = gl.minimum(gate, cfg.LIMIT)
    up = gl.minimum(gl.maximum(up, -cfg.LIMIT), cfg.LIMIT)
    value = (up + 1) * gate / (1 + gl.exp2(gate * (-1.702 * 1.4426950408889634)))
    i = unit_row * 32 + gl.arange(0, 32, gl.SliceLayout(1, gate.type.layout))
    column = begin + gl.arange(0, n, gl.SliceLayout(0, gate.type.layout))
    row, wanted = rows_of(cfg, tile, column)
    mask = (i < cfg.ROWS)[:, None] & wanted[None, :]
    if cfg.PLANES == 1:
        out_ptrs = out_ptr + row.to(gl.int64)[None, :] * cfg.ROWS + i[:, None]  # rows have the order of planes.py
        gl.store(out_ptrs, (value * cfg.H_FACTOR).to(gl.float8e4nv), mask)
    elif cfg.PLANES == 2:
        place = (i & -16) | ((i & 7) << 1) | ((i >> 3) & 1)  # of planes.py
        out_ptrs = out_ptr + row.to(gl.int64)[None, :] * (2 * cfg.ROWS) + place[:, None]
        value *= cfg.H_FACTOR
        high = value.to(gl.float8e4nv)
        gl.store(out_ptrs, high, mask)
        gl.store(out_ptrs + cfg.ROWS, ((value - high.to(gl.float32)) * 16).to(gl.float8e4nv), mask)
    else:
        gl.store(out_ptr + row.to(gl.int64)[None, :] * cfg.ROWS + i[:, None], value.to(gl.float16), mask)


@gluon.jit
def _store_weighted(cfg, acc, begin: gl.constexpr, tile, unit_row, pointers):
    """y[pair, split, row] = weight of the pair * acc."""
    n: gl.constexpr = acc.shape[1]
    column = begin + gl.arange(0, n, gl.SliceLayout(0, acc.type.layout))
    pair, wanted = pairs_of(cfg, tile, column, pointers.order)
    weight = gl.load(pointers.weights + pair, wanted, other=0)
    row = unit_row * 64 + gl.arange(0, 64, gl.SliceLayout(1, acc.type.layout))
    place = pair * cfg.SPLITS + tile.split
    out_ptrs = pointers.out + place.to(gl.int64)[None, :] * cfg.ROWS + row[:, None]
    mask = (row < cfg.ROWS)[:, None] & wanted[None, :]
    gl.store(out_ptrs, (acc * weight[None, :]).to(pointers.out.dtype.element_ty), mask)


@gluon.jit(do_not_specialize=["num_tokens"])
def gemm(
    nibbles_desc,
    scales_desc,
    tokens_desc,
    narrow_desc,
    table_ptr,
    out_ptr,
    rows_ptr,
    token_scales_ptr,
    order_ptr,
    ids_ptr,
    weights_ptr,
    tile_counters_ptr,
    factors_desc,
    values_desc,
    lists_ptr,
    num_tokens,
    N: gl.constexpr,
    PLANES: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    HALVES: gl.constexpr,
    MIDDLE: gl.constexpr,
    DYNAMIC: gl.constexpr,
    SPLITS: gl.constexpr,
    K_UNITS: gl.constexpr,
    UNIT_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    SINGLE: gl.constexpr,
    DIRECT: gl.constexpr,
    EXPERTS_PER_TOKEN: gl.constexpr,
    CHOICE: gl.constexpr,
    LIMIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    AHEAD: gl.constexpr,
    WINDOW: gl.constexpr,
    STAGED: gl.constexpr,
    RANK: gl.constexpr,
    MOST: gl.constexpr,
):
    steps: gl.constexpr = (K_UNITS + UNITS - 1) // UNITS
    row_tiles: gl.constexpr = (UNIT_ROWS + CONSUMERS - 1) // CONSUMERS
    cfg = Config(
        N, PLANES, UNITS, STAGES, HALVES, MIDDLE, DYNAMIC, SPLITS, K_UNITS, UNIT_ROWS, ROWS, GATED, SINGLE, DIRECT,
        EXPERTS_PER_TOKEN, CHOICE, CONSUMERS, LIMIT, h_factor(LIMIT), steps, row_tiles, 16 if N < 128 else 32, STAGED,
        AHEAD, WINDOW, RANK, MOST,
    )  # fmt: skip
    BOX: gl.constexpr = scales_desc.block_type.shape[0]  # UNITS, up to a power of two
    COLUMNS: gl.constexpr = 2 * N if PLANES == 2 else N
    ring = Ring(
        gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS * UNITS, 8, 256], nibbles_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, BOX, 32], scales_desc.layout),
        gl.allocate_shared_memory(tokens_desc.dtype, [STAGES * UNITS, COLUMNS, 64], tokens_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], SCALE_ROW),
        gl.allocate_shared_memory(
            out_ptr.dtype.element_ty,
            [CONSUMERS, cfg.PART if STAGED else 1, 32 if GATED else 64],
            (STAGED_H if PLANES else STAGED_HALF_H) if GATED else STAGED_Y,
        ),
        gl.allocate_shared_memory(gl.float32, [CONSUMERS, N if STAGED else 1], SCALE_ROW),
        gl.allocate_shared_memory(gl.int32, [CONSUMERS, N if STAGED else 1], SCALE_ROW),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for s in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(s), count=PRODUCERS)
        mbarrier.init(ring.empty.index(s), count=CONSUMERS)
        mbarrier.init(ring.named.index(s), count=1)
    sources = Sources(nibbles_desc, scales_desc, tokens_desc, narrow_desc)
    pointers = Pointers(
        table_ptr, out_ptr, rows_ptr, token_scales_ptr, order_ptr, ids_ptr, weights_ptr, tile_counters_ptr
    )
    added = table_ptr  # of no use without RANK
    if RANK > 0:
        rows = num_tokens * (EXPERTS_PER_TOKEN * (2 if PLANES == 2 else 1))
        added = Added(factors_desc, values_desc, lists_ptr, rows)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (cfg, 0, ring, sources, pointers, added, num_tokens)),
                (_produce_weights, (cfg, ring, sources, pointers, added, num_tokens)),
                (_produce_tokens, (cfg, ring, sources, pointers, added, num_tokens)),
            ],
            [1, 1],
            [PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (cfg, 0, ring, sources, pointers, added, num_tokens)),
                (_consume, (cfg, 1, ring, sources, pointers, added, num_tokens)),
                (_consume, (cfg, 2, ring, sources, pointers, added, num_tokens)),
                (_produce_weights, (cfg, ring, sources, pointers, added, num_tokens)),
                (_produce_tokens, (cfg, ring, sources, pointers, added, num_tokens)),
            ],
            [4, 4, 1, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )
