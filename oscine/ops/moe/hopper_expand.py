"""MXFP4 weights of a unit from shared memory to the register operand of wgmma: fp16 or FP8, with or without scales.

Each thread of a warpgroup reads the 16 bytes that it needs, in the order of hopper_repack.py, and exchanges nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.moe.hopper_repack import FIELDS, SCALE_BITS, TABLE, V_FROM_B, V_SHIFT, VALUE_BITS, Y_FROM_A, A, B


def _half_asm() -> str:
    """PTX that expands the thread's 32 nibbles: $0-$15 out (fp16x2), $16-$19 nibble words, $20 a scale word.

    Turned and masked (hopper_repack.py) a nibble is, as fp16, its value times 2^-14, subnormals included. The scale f
    at bits 14..10 is 2^(f - 15); the product takes it from the lower or upper half of a word, for free.
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


def _table_asm() -> str:
    """PTX that looks up the thread's 32 nibbles as FP8, scales included: $0-$7 out, $8-$11 nibble words, $12 scales.

    The two words of a row have a table of eight bytes: the magnitudes of E2M1 times the row's scale.
    """
    lines = [".reg .b32 f, lower, upper, m, s;"]
    for r in range(2):
        lines += ["and.b32 f, $12, 255;" if r == 0 else "shr.u32 f, $12, 8;"]
        for name, (factor, entries) in zip(("lower", "upper"), TABLE, strict=True):
            lines += [f"mad.lo.u32 {name}, f, {factor}, {entries};"]
        for i in range(2):
            word = f"${8 + 2 * r + i}"
            for h in range(2):
                out = f"${4 * i + 2 * h + r}"
                lines += [f"and.b32 m, {word}, 0x77777777;" if h == 0 else "shr.u32 m, m, 16;"]
                lines += [f"prmt.b32 {out}, lower, upper, m;"]
                lines += [f"shl.b32 s, {word}, 4;"] if h else []
                lines += [f"lop3.b32 {out}, {out}, {'s' if h else word}, 0x80808080, 0xF8;"]  # first | second & third
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
TABLE_ASM = gl.constexpr(_table_asm())
TABLE_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 20))
SCALES_ASM = gl.constexpr(_scales_asm())
SCALES_CONSTRAINTS = gl.constexpr("=&r,=&r,=&r,=&r,r")

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
# The same bytes as [64 (warp, g, block), 32 (half of the block, byte)]: a pair of scales belongs to one row of it.
HALVES = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8]],
        lane_bases=[[0, 16], [1, 0], [2, 0], [4, 0], [8, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
)


@gluon.jit
def _quads(nibbles):
    return gl.convert_layout(gl.reshape(nibbles.load(NIBBLES), [32, 64]), QUADS, assert_trivial=True)


@gluon.jit
def scaled_weights(nibbles, scales, operand: gl.constexpr):
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
def blocks(nibbles, operand: gl.constexpr):
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
def table_weights(nibbles, scales, operand: gl.constexpr):
    """Nibbles [8, 256] and pairs of scales [64] of a unit -> its weights [64, 64], FP8, as the register operand."""
    halves = gl.convert_layout(gl.reshape(nibbles.load(NIBBLES), [64, 32]), HALVES, assert_trivial=True)
    pairs = gl.expand_dims(scales.load(gl.SliceLayout(1, HALVES)).to(gl.int32), 1)
    first, second = gl.inline_asm_elementwise(
        TABLE_ASM, TABLE_CONSTRAINTS, [halves, pairs], dtype=(gl.float8e5, gl.float8e5), is_pure=True, pack=16
    )
    # bits: warp, g, block, half of it, h, row 3, k1 and k0, i -> rows (warp, row 3, g), k (i, h, block, half, k1, k0)
    bits = gl.reshape(gl.join(first, second), [4, 8, 2, 2, 2, 2, 4, 2])
    weights = gl.reshape(gl.permute(bits, [0, 5, 1, 7, 4, 2, 3, 6]), [64, 64])
    return gl.convert_layout(weights, operand, assert_trivial=True)


@gluon.jit
def block_scales(scales, layout: gl.constexpr):
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
