"""The MXFP4 GEMM of the Hopper mixture of experts, in Gluon.

Knows tiles, barriers and registers; not routing policy, shapes of models, or how a schedule is chosen (hopper.py).

    out[token, row] = sum over k of weight[row, k] * token[k]   for the tokens of one expert

Weights are the register operand of wgmma, tokens (N of them) the shared one, so that a few tokens fill an instruction.
One producer warp runs ahead through a ring of STAGES buffers, across the borders of tiles; CONSUMERS warpgroups own one
unit row (64 weight rows) each. A stage holds UNITS units of 64 along k:

    producer: wait empty[s]  ->  TMA nibbles, scales, tokens  ->  full[s]
    consumer: wait full[s]   ->  LDS, expand, wgmma   ->  empty[s]

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.moe.hopper_tiles import (
    Config,
    find_entries,
    h_factor,
    is_narrow,
    next_tile,
    note_order,
    pairs_of,
    rows_of,
    tile_at,
)
from oscine.ops.moe.repack import FIELDS, SCALE_BITS, V_FROM_B, V_SHIFT, VALUE_BITS, Y_FROM_A, A, B
from oscine.ops.record import record


def _half_asm() -> str:
    """PTX that expands the thread's 32 nibbles: $0-$15 out (fp16x2), $16-$19 nibble words, $20 a scale word.

    Turned and masked (repack.py) a nibble is, as fp16, its value times 2^-14, subnormals included. The scale f at bits
    14..10 is 2^(f - 15); the product takes it from the lower or upper half of a word, for free.
    """
    lines = [".reg .b32 a, y, v, scales<2>, scale<2>;", ".reg .b16 lower, upper;"]
    for r in range(2):
        lines += _turned(f"scales{r}", "$20", 10 - SCALE_BITS[r], 0x7C007C00)
    for p in range(2):
        lines += _blends(f"${16 + 2 * p}", f"${17 + 2 * p}")
        for r in range(2):
            side = ("lower", "upper")[p]
            lines += [f"mov.b32 {{lower, upper}}, scales{r};", f"mov.b32 scale{r}, {{{side}, {side}}};"]
        for (j, r), (word, turn) in FIELDS.items():
            for h in range(2):
                lines += _turned("a", _named(word, p, 16), turn + 8 - 8 * h, HALF_MASK)
                lines += [f"mul.f16x2 ${8 * h + 4 * p + 2 * j + r}, a, scale{r};"]
    return "{\n" + "\n".join(lines) + "\n}"


def _byte_asm() -> str:
    """PTX that expands the thread's 32 nibbles to FP8 times 2^-14, scales left out: $0-$7 out, $8-$11 nibble words."""
    lines = [".reg .b32 y, v;"]
    for p in range(2):
        lines += _blends(f"${8 + 2 * p}", f"${9 + 2 * p}")
        for (j, r), (word, turn) in FIELDS.items():
            lines += _turned(f"${4 * p + 2 * j + r}", _named(word, p, 8), turn, BYTE_MASK)
    return "{\n" + "\n".join(lines) + "\n}"


def _scales_asm() -> str:
    """PTX that takes the scales 2^(f - 127), $0-$3 out, from a scale word, $4."""
    lines = []
    for i, bit in enumerate(SCALE_BITS):
        lines += [f"shl.b32 ${i}, $4, {23 - bit};" if bit < 23 else f"shr.u32 ${i}, $4, {bit - 23};"]
        if bit:  # there is nothing below the first, and what is above it leaves the word
            lines += [f"and.b32 ${i}, ${i}, {31 << 23};"]
    return "\n".join(lines)


def _blends(a: str, b: str) -> list[str]:
    choose = "0xE4"  # of two words by a third one's bits
    return [
        f"lop3.b32 y, {a}, {b}, {Y_FROM_A}, {choose};",
        f"shl.b32 v, {a}, {V_SHIFT};",
        f"lop3.b32 v, {b}, v, {V_FROM_B}, {choose};",
    ]


def _named(word: str, pair: int, first: int) -> str:
    """The register of a word of FIELDS, the nibble words being operands from `first` on."""
    return {A: f"${first + 2 * pair}", B: f"${first + 1 + 2 * pair}"}.get(word, word)


def _turned(out: str, word: str, turn: int, mask: int) -> list[str]:
    lowest = (mask & -mask).bit_length() - 1
    if turn == 0:
        return [f"and.b32 {out}, {word}, {mask};"]
    # a shift where no bit must come round: it need not run where the masks do
    turned = f"shl.b32 {out}, {word}, {turn};" if turn <= lowest else f"shf.l.wrap.b32 {out}, {word}, {word}, {turn};"
    return [turned, f"and.b32 {out}, {out}, {mask};"]


BYTE_MASK = sum(0x01010101 << bit for bit in VALUE_BITS)
HALF_MASK = BYTE_MASK & 0xFF00FF00
HALF_ASM = gl.constexpr(_half_asm())
HALF_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 20))
BYTE_ASM = gl.constexpr(_byte_asm())
BYTE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 4))
SCALES_ASM = gl.constexpr(_scales_asm())
SCALES_CONSTRAINTS = gl.constexpr("=&r,=&r,=&r,=&r,r")
PLANES_FACTOR = gl.constexpr(2.0**112)  # weights as FP8 are 2^-14 too small, their scales 2^-98

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
BEYOND = gl.constexpr(1 << 28)  # a row that neither tokens nor weights have
PAGE_ROWS = gl.constexpr(8192)  # of 256 bytes, in a page of 2 MiB
LOOK_UPS = gl.constexpr(5)  # of pages, by each program
PRODUCER_REGISTERS = gl.constexpr(40)  # a thread
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
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    warmed: gl.shared_memory_descriptor


@record
class Sources:
    """What TMA reads."""

    nibbles: tma.tensor_descriptor
    scales: tma.tensor_descriptor
    tokens: tma.tensor_descriptor  # boxes of N tokens
    narrow: tma.tensor_descriptor  # of fewer: half of them, or a lone one with zeros behind it


@record
class Pointers:
    """What programs read and write themselves."""

    table: gl.tensor
    out: gl.tensor
    rows: gl.tensor
    token_scales: gl.tensor  # GEMM 1 with PLANES: of the rows of the tokens
    order: gl.tensor
    weights: gl.tensor
    tile_counters: gl.tensor
    soon: gl.tensor  # weights that a later kernel reads
    soon_bytes: gl.tensor


@gluon.jit
def _load_weights(cfg, ring, sources, stage, tile, step):
    """Opens a stage: all its bytes are announced, zeros among them; those of the weights are on their way."""
    _name_tile(cfg, ring, stage, tile.index)
    full = ring.full.index(stage)
    weights: gl.constexpr = cfg.CONSUMERS * (
        cfg.UNITS * sources.nibbles.block_type.nbytes + sources.scales.block_type.nbytes
    )
    if is_narrow(cfg, tile):
        mbarrier.expect(full, weights + cfg.UNITS * sources.narrow.block_type.nbytes)
    else:
        mbarrier.expect(full, weights + cfg.UNITS * sources.tokens.block_type.nbytes)
    for c in gl.static_range(cfg.CONSUMERS):
        slot = stage * cfg.CONSUMERS + c
        unit = (tile.expert * cfg.UNIT_ROWS + tile.row_tile * cfg.CONSUMERS + c) * cfg.K_UNITS + step * cfg.UNITS
        for u in gl.static_range(cfg.UNITS):
            buffer = ring.nibbles.index(slot * cfg.UNITS + u)
            tma.async_copy_global_to_shared(sources.nibbles, [(unit + u) * 8, 0], full, buffer)
        tma.async_copy_global_to_shared(sources.scales, [unit, 0], full, ring.scales.index(slot))


@gluon.jit
def _warm(cfg, ring, sources):
    """Fetches the descriptors that are first used after the wait for the kernel before, and with WARM 2 looks up the
    addresses of all pages of the weights: a box of each page.

    Boxes beyond the tokens are zeros, and read no memory.
    """
    box: gl.constexpr = sources.narrow.block_type.shape
    tokens: gl.constexpr = sources.tokens.block_type.nbytes + sources.narrow.block_type.nbytes
    weights: gl.constexpr = sources.nibbles.block_type.nbytes + sources.scales.block_type.nbytes
    mbarrier.expect(ring.warmed, tokens + weights if cfg.GATED else tokens)
    tma.async_copy_global_to_shared(sources.tokens, [BEYOND, 0], ring.warmed, ring.tokens.index(0))
    buffer = ring.tokens.index(1)
    if cfg.DIRECT or cfg.SINGLE:
        lone = buffer.slice(0, box[1], dim=0)._reinterpret(sources.narrow.dtype, box, sources.narrow.layout)
        tma.async_copy_global_to_shared(sources.narrow, [BEYOND, 0, 0], ring.warmed, lone)
    else:
        tma.async_copy_global_to_shared(sources.narrow, [BEYOND, 0], ring.warmed, buffer.slice(0, box[0], dim=0))
    if cfg.GATED:
        tma.async_copy_global_to_shared(sources.scales, [BEYOND, 0], ring.warmed, ring.scales.index(0))
        tma.async_copy_global_to_shared(sources.nibbles, [BEYOND, 0], ring.warmed, ring.nibbles.index(0))
    mbarrier.wait(ring.warmed, 0)
    if cfg.GATED and cfg.WARM == 2:
        mbarrier.expect(ring.warmed, LOOK_UPS * sources.nibbles.block_type.nbytes)
        for i in gl.static_range(LOOK_UPS):
            row = (gl.program_id(0) + i * gl.num_programs(0)) * PAGE_ROWS
            tma.async_copy_global_to_shared(sources.nibbles, [row, 0], ring.warmed, ring.nibbles.index(0))
        mbarrier.wait(ring.warmed, 1)


# The first thread of a warp asks for $2 bytes of memory to be in the L2, and to stay there.
FETCH_SOON = gl.constexpr("""{
    .reg .pred first;
    .reg .b32 lane;
    .reg .b64 policy;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    createpolicy.fractional.L2::evict_last.b64 policy, 1.0;
    @first cp.async.bulk.prefetch.L2.global.L2::cache_hint [$1], $2, policy;
    mov.b32 $0, 0;
}""")
SOON_AT_ONCE = gl.constexpr(16384)  # bytes


@gluon.jit
def _fetch_soon(soon_ptr, soon_bytes):
    """Brings weights that a later kernel reads into the L2, a share by each program."""
    step = gl.num_programs(0) * SOON_AT_ONCE
    for begin in range(gl.program_id(0) * SOON_AT_ONCE, soon_bytes, step):
        size = gl.minimum(soon_bytes - begin, SOON_AT_ONCE)
        gl.inline_asm_elementwise(
            FETCH_SOON, "=r,l,r", [soon_ptr.to(gl.int64) + begin, size], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def _load_tokens(cfg, ring, sources, stage, tile, step):
    full = ring.full.index(stage)
    box: gl.constexpr = sources.narrow.block_type.shape
    for u in gl.static_range(cfg.UNITS):
        buffer = ring.tokens.index(stage * cfg.UNITS + u)
        column = (step * cfg.UNITS + u) * 64
        row = tile.source * (2 if cfg.PLANES else 1)
        if not is_narrow(cfg, tile):
            tma.async_copy_global_to_shared(sources.tokens, [row, column], full, buffer)
        elif cfg.DIRECT or cfg.SINGLE:
            lone = buffer.slice(0, box[1], dim=0)._reinterpret(sources.narrow.dtype, box, sources.narrow.layout)
            tma.async_copy_global_to_shared(sources.narrow, [tile.source, 0, column], full, lone)
        else:
            tma.async_copy_global_to_shared(sources.narrow, [row, column], full, buffer.slice(0, box[0], dim=0))


@gluon.jit
def _produce(cfg, ring, sources, pointers, num_tokens):
    stage = 0
    phase = 1
    early = 0  # stages of the first tile that are filled before the loop
    begin_index = gl.program_id(0)
    if cfg.WARM:
        _warm(cfg, ring, sources)
    if cfg.GATED and cfg.SOON:
        _fetch_soon(pointers.soon, pointers.soon_bytes)
    if cfg.GATED:
        gdc_wait()
    # GEMM 1 let GEMM 2 start only after it had waited for the routing: the table is there, h is not.
    entries = find_entries(cfg, pointers.table, num_tokens, 1)
    tiles = entries.count * (cfg.ROW_TILES * cfg.SPLITS)
    if not cfg.GATED:
        tile = tile_at(cfg, entries, begin_index)
        early = gl.where(begin_index < tiles, gl.minimum(tile.end - tile.begin, cfg.STAGES), 0)
        for s in range(early):
            _load_weights(cfg, ring, sources, s, tile, tile.begin + s)
        gdc_wait()
        for s in range(early):
            _load_tokens(cfg, ring, sources, s, tile, tile.begin + s)
        stage = gl.where(early == cfg.STAGES, 0, early)
        phase = gl.where(early == cfg.STAGES, 0, 1)
    if cfg.DYNAMIC and begin_index == 0:
        # of the other product, which has ended or will wait for this
        gl.store(pointers.tile_counters + (1 if cfg.GATED else 0), 0)
    index = begin_index
    while index < tiles:
        tile = tile_at(cfg, entries, index)
        for step in range(tile.begin + gl.where(index == begin_index, early, 0), tile.end):
            mbarrier.wait(ring.empty.index(stage), phase)
            _load_weights(cfg, ring, sources, stage, tile, step)
            _load_tokens(cfg, ring, sources, stage, tile, step)
            stage += 1
            if stage == cfg.STAGES:
                stage = 0
                phase ^= 1
        index = (
            next_tile(pointers.tile_counters + (0 if cfg.GATED else 1)) if cfg.DYNAMIC else index + gl.num_programs(0)
        )
    if cfg.DYNAMIC:
        mbarrier.wait(ring.empty.index(stage), phase)
        _name_tile(cfg, ring, stage, index)
        mbarrier.arrive(ring.full.index(stage), count=1)


@gluon.jit
def _name_tile(cfg, ring, stage, index):
    """Tells the consumers which tile the stage is of."""
    if cfg.DYNAMIC:
        ring.tiles.index(stage).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def _quads(nibbles):
    return gl.convert_layout(gl.reshape(nibbles.load(NIBBLES), [32, 64]), QUADS, assert_trivial=True)


@gluon.jit
def _scaled_weights(nibbles, scales, operand: gl.constexpr):
    """Nibbles [8, 256] and scale words [32] of a unit -> its weights [64, 64], fp16, as the register operand."""
    quads = _quads(nibbles)
    words = gl.expand_dims(scales.load(gl.SliceLayout(1, QUADS)), 1)
    low, high = gl.inline_asm_elementwise(
        HALF_ASM, HALF_CONSTRAINTS, [quads, words], dtype=(gl.float16, gl.float16), is_pure=True, pack=16
    )
    # bits: warp, g, lane % 4, k5, k4, row 3, k0, k3 -> rows (warp, row 3, g), k (k5, k4, k3, lane % 4, k0)
    bits = gl.reshape(gl.join(low, high), [4, 8, 4, 2, 2, 2, 2, 2])
    weights = gl.reshape(gl.permute(bits, [0, 5, 1, 3, 4, 7, 2, 6]), [64, 64])
    return gl.convert_layout(weights, operand, assert_trivial=True)


@gluon.jit
def _blocks(nibbles, operand: gl.constexpr):
    """Nibbles [8, 256] of a unit -> its two blocks along k [64, 32], FP8, without their scales."""
    first, second = gl.inline_asm_elementwise(
        BYTE_ASM, BYTE_CONSTRAINTS, [_quads(nibbles)], dtype=(gl.float8e5, gl.float8e5), is_pure=True, pack=16
    )
    return _block(first, operand), _block(second, operand)


@gluon.jit
def _block(weights, operand: gl.constexpr):
    # bits: warp, g, lane % 4, k4, row 3, (k0, k3) -> rows (warp, row 3, g), k (k4, lane % 4, k0, k3)
    bits = gl.permute(gl.reshape(weights, [4, 8, 4, 2, 2, 4]), [0, 4, 1, 3, 2, 5])
    return gl.convert_layout(gl.reshape(bits, [64, 32]), operand, assert_trivial=True)


@gluon.jit
def _block_scales(scales, layout: gl.constexpr):
    """Scale words [32] of a unit -> 2^(f - 127) of the rows of its two blocks, float32 [64]."""
    words = scales.load(gl.SliceLayout(1, QUADS))
    a, b, c, d = gl.inline_asm_elementwise(
        SCALES_ASM,
        SCALES_CONSTRAINTS,
        [words],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True,
        pack=1,
    )
    return _by_row(a, b, layout), _by_row(c, d, layout)


@gluon.jit
def _by_row(upper, lower, layout: gl.constexpr):
    """Of rows (warp, 0, g) and of rows (warp, 1, g), float32 [32] each -> [64]."""
    rows = gl.permute(gl.reshape(gl.join(upper, lower), [4, 8, 2]), [0, 2, 1])
    return gl.convert_layout(gl.reshape(rows, [64]), layout, assert_trivial=True)


@gluon.jit
def _consume(cfg, c: gl.constexpr, ring, sources, pointers, num_tokens):
    gdc_wait()
    gdc_launch_dependents()
    scale_rows = ring.scales._reinterpret(
        gl.int32, [cfg.STAGES * cfg.CONSUMERS * sources.scales.block_type.shape[0], 32], SCALE_ROW
    )
    stage = 0
    phase = 0
    entries = find_entries(cfg, pointers.table, num_tokens, 4)
    args = (cfg, c, ring, scale_rows, pointers)
    index = gl.program_id(0)
    while index < entries.count * (cfg.ROW_TILES * cfg.SPLITS):
        tile = tile_at(cfg, entries, index)
        if cfg.DIRECT and cfg.GATED and c == 0 and tile.row_tile == 0:
            note_order(tile, pointers.order, 4)
        if cfg.HALVES and cfg.N == 128 and tile.rows <= cfg.N // 4:
            stage, phase = _compute(cfg.N // 4, tile, stage, phase, args)
        elif cfg.HALVES and is_narrow(cfg, tile):
            stage, phase = _compute(cfg.N // 2, tile, stage, phase, args)
        else:
            stage, phase = _compute(cfg.N, tile, stage, phase, args)
        if cfg.DYNAMIC:
            mbarrier.wait(ring.full.index(stage), phase)
            index = gl.max(ring.tiles.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        else:
            index += gl.num_programs(0)


@gluon.jit
def _compute(n: gl.constexpr, tile, stage, phase, args):
    """A tile of n tokens, the ring's N or a half or quarter of it. Returns the stage that comes next, and its phase."""
    cfg, c, ring, scale_rows, pointers = args
    columns: gl.constexpr = 2 * n if cfg.PLANES else n
    layout: gl.constexpr = accumulator_layout(columns, 32 if cfg.PLANES else 16)
    EARLY: gl.constexpr = columns == 8 or not cfg.PLANES  # more columns of planes leave no registers for it
    unit_row = tile.row_tile * cfg.CONSUMERS + c
    row = (tile.expert * cfg.UNIT_ROWS + unit_row) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    if EARLY:  # what the epilogue needs is on its way while the tile is computed
        words = gl.load(pointers.rows + row, unit_row < cfg.UNIT_ROWS, other=0)
    acc = gl.zeros([64, columns], gl.float32, layout)
    for _ in range(tile.begin, tile.end):
        mbarrier.wait(ring.full.index(stage), phase)
        for u in gl.static_range(cfg.UNITS):
            nibbles = ring.nibbles.index((stage * cfg.CONSUMERS + c) * cfg.UNITS + u)
            scales = scale_rows.index((stage * cfg.CONSUMERS + c) * ring.scales.shape[1] + u)
            tokens = ring.tokens.index(stage * cfg.UNITS + u).slice(0, columns, dim=0).permute([1, 0])
            if cfg.PLANES:
                acc = _add_blocks(nibbles, scales, tokens, acc)
            else:
                weights = _scaled_weights(nibbles, scales, gl.DotOperandLayout(0, layout, 2))
                if u > 0:
                    acc = warpgroup_mma_wait(0, deps=[acc])
                acc = warpgroup_mma(weights, tokens, acc, is_async=True)
        if not cfg.PLANES:
            acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(stage), count=1)
        stage += 1
        if stage == cfg.STAGES:
            stage = 0
            phase ^= 1
    if not EARLY:
        words = gl.load(pointers.rows + row, unit_row < cfg.UNIT_ROWS, other=0)
    if cfg.PLANES:
        acc = _add_planes(cfg, acc, tile, pointers)
    words = gl.convert_layout(words, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    bias = gl.where(tile.split == 0, words << 16, 0).to(gl.float32, bitcast=True)
    scale = (words & -65536).to(gl.float32, bitcast=True)
    acc = acc * scale[:, None] + bias[:, None]
    _store(cfg, acc, 0, tile, unit_row, pointers)
    return stage, phase


@gluon.jit
def _add_blocks(nibbles, scales, tokens, acc):
    """acc + a unit's product with the tokens [64, columns]; what a scale multiplies is the product of its block."""
    layout: gl.constexpr = acc.type.layout
    first, second = _blocks(nibbles, gl.DotOperandLayout(0, layout, 4))
    zero = gl.zeros(acc.shape, gl.float32, layout)
    left = warpgroup_mma(first, tokens.slice(0, 32, dim=0), zero, use_acc=False, is_async=True)
    right = warpgroup_mma(second, tokens.slice(32, 32, dim=0), zero, use_acc=False, is_async=True)
    first_scale, second_scale = _block_scales(scales, gl.SliceLayout(1, layout))
    left, right = warpgroup_mma_wait(0, deps=[left, right])
    acc += left * first_scale[:, None]
    acc += right * second_scale[:, None]
    return acc


@gluon.jit
def _add_planes(cfg, acc, tile, pointers):
    """[64, 2 n] -> [64, n]: the two planes of a token, undone what they and the weights were multiplied by."""
    high, low = gl.split(gl.reshape(acc, [64, acc.shape[1] // 2, 2]))
    value = (high + low * 0.0625) * PLANES_FACTOR
    if cfg.GATED:
        column = gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
        _, wanted = rows_of(cfg, tile, column)
        factor = gl.load(pointers.token_scales + tile.source + column, wanted, other=0)
        value *= factor[None, :]
    else:
        value *= 1 / cfg.H_FACTOR
    return value


@gluon.jit
def _store(cfg, acc, begin: gl.constexpr, tile, unit_row, pointers):
    """In parts of cfg.PART columns, of which the first is `begin`."""
    n: gl.constexpr = acc.shape[1]
    if n > cfg.PART:
        left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, n // 2]), [0, 2, 1]))
        _store(cfg, left, begin, tile, unit_row, pointers)
        _store(cfg, right, begin + n // 2, tile, unit_row, pointers)
    elif cfg.GATED:
        _store_gated(cfg, acc, begin, tile, unit_row, pointers.out)
    else:
        _store_weighted(cfg, acc, begin, tile, unit_row, pointers)


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
    if cfg.PLANES:
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
    out_ptrs = pointers.out + (pair * cfg.SPLITS + tile.split).to(gl.int64)[None, :] * cfg.ROWS + row[:, None]
    mask = (row < cfg.ROWS)[:, None] & wanted[None, :]
    gl.store(out_ptrs, (acc * weight[None, :]).to(pointers.out.dtype.element_ty), mask)


@gluon.jit(do_not_specialize=["num_tokens", "soon_bytes"])
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
    weights_ptr,
    tile_counters_ptr,
    soon_ptr,
    soon_bytes,
    num_tokens,
    N: gl.constexpr,
    PLANES: gl.constexpr,
    UNITS: gl.constexpr,
    STAGES: gl.constexpr,
    HALVES: gl.constexpr,
    DYNAMIC: gl.constexpr,
    SPLITS: gl.constexpr,
    K_UNITS: gl.constexpr,
    UNIT_ROWS: gl.constexpr,
    ROWS: gl.constexpr,
    GATED: gl.constexpr,
    SINGLE: gl.constexpr,
    DIRECT: gl.constexpr,
    EXPERTS_PER_TOKEN: gl.constexpr,
    LIMIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    WARM: gl.constexpr,
    SOON: gl.constexpr,
):
    steps: gl.constexpr = (K_UNITS + UNITS - 1) // UNITS
    row_tiles: gl.constexpr = (UNIT_ROWS + CONSUMERS - 1) // CONSUMERS
    cfg = Config(
        N, PLANES, UNITS, STAGES, HALVES, DYNAMIC, SPLITS, K_UNITS, UNIT_ROWS, ROWS, GATED, SINGLE, DIRECT,
        EXPERTS_PER_TOKEN, CONSUMERS, LIMIT, h_factor(LIMIT), steps, row_tiles, 16 if N < 128 else 32, WARM, SOON,
    )  # fmt: skip
    BOX: gl.constexpr = scales_desc.block_type.shape[0]  # UNITS, up to a power of two
    ring = Ring(
        gl.allocate_shared_memory(gl.uint8, [STAGES * CONSUMERS * UNITS, 8, 256], nibbles_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES * CONSUMERS, BOX, 32], scales_desc.layout),
        gl.allocate_shared_memory(tokens_desc.dtype, [STAGES * UNITS, 2 * N if PLANES else N, 64], tokens_desc.layout),
        gl.allocate_shared_memory(gl.int32, [STAGES, 1], SCALE_ROW),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
    )
    mbarrier.init(ring.warmed, count=1)
    for s in gl.static_range(STAGES):
        mbarrier.init(ring.full.index(s), count=1)
        mbarrier.init(ring.empty.index(s), count=CONSUMERS)
    sources = Sources(nibbles_desc, scales_desc, tokens_desc, narrow_desc)
    pointers = Pointers(
        table_ptr, out_ptr, rows_ptr, token_scales_ptr, order_ptr, weights_ptr, tile_counters_ptr, soon_ptr, soon_bytes
    )
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (_consume, (cfg, 0, ring, sources, pointers, num_tokens)),
                (_produce, (cfg, ring, sources, pointers, num_tokens)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (cfg, 0, ring, sources, pointers, num_tokens)),
                (_consume, (cfg, 1, ring, sources, pointers, num_tokens)),
                (_consume, (cfg, 2, ring, sources, pointers, num_tokens)),
                (_produce, (cfg, ring, sources, pointers, num_tokens)),
            ],
            [4, 4, 1],
            [CONSUMER_REGS, CONSUMER_REGS, PRODUCER_REGISTERS],
        )
