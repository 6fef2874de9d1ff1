"""From words of 12 bits to the register operand of wgmma, in Gluon. The format: bf12.py."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from oscine.ops.linear.bf12 import MASK, SHIFT, TURNS, WORDS, spare_bits

FACTOR = (127 + SHIFT << 7) * 0x10001  # 2^112 twice, as bfloat16


def _expand_asm() -> str:
    """PTX that expands two atoms: $0-$3 out for the first, $4-$7 for the second; A, B, C of both in $8-$13."""
    lines = [".reg .b32 a, rest, factor;", f"mov.b32 factor, {FACTOR};"]
    for atom in range(2):
        words = [f"${8 + 2 * i + atom}" for i in range(WORDS)]
        # 0xE4: of two words by a third one's bits
        lines += [f"lop3.b32 rest, {words[0]}, {words[1]}, {spare_bits(0)}, 0xE4;"]
        lines += [f"lop3.b32 rest, {words[2]}, rest, {spare_bits(2)}, 0xE4;"]
        for i, (word, turn) in enumerate(zip((*words, "rest"), TURNS, strict=True)):
            if turn:
                lines += [f"shf.l.wrap.b32 a, {word}, {word}, {turn};"]
            lines += [f"and.b32 a, {'a' if turn else word}, {MASK};", f"mul.bf16x2 ${4 * atom + i}, a, factor;"]
    return "{\n" + "\n".join(lines) + "\n}"


EXPAND_ASM = gl.constexpr(_expand_asm())
EXPAND_CONSTRAINTS = gl.constexpr(",".join(["=&r"] * 8 + ["r"] * 6))
PLANES = gl.constexpr(WORDS)
# [group (warp), atom, lane]: the words of a plane that a chunk of 64 columns has
WORDS_LAYOUT = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1, 0], [0, 2, 0]],
        lane_bases=[[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [0, 0, 16]],
        warp_bases=[[1, 0, 0], [2, 0, 0]],
        block_bases=[],
        shape=[4, 4, 32],
    )
)
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[2, 1, 0]))


@gluon.jit
def expand(ring, stage, chunk: gl.constexpr, CHUNKS: gl.constexpr, operand: gl.constexpr):
    """A chunk of a stage -> its weights bf16 [64, 64] over 2^(e - 127), as the register operand.

    ring: int32 [3 stages, ...], of which each entry holds a plane of the words of four groups of 16 rows and so many
    chunks. Rows are those of the groups.
    """
    a = _words(ring.index(3 * stage), chunk, CHUNKS)
    b = _words(ring.index(3 * stage + 1), chunk, CHUNKS)
    c = _words(ring.index(3 * stage + 2), chunk, CHUNKS)
    dtypes: gl.constexpr = (gl.bfloat16,) * 8
    r = gl.inline_asm_elementwise(EXPAND_ASM, EXPAND_CONSTRAINTS, [a, b, c], dtype=dtypes, is_pure=True, pack=2)
    lower = gl.join(gl.join(r[0], r[4]), gl.join(r[2], r[6]))
    upper = gl.join(gl.join(r[1], r[5]), gl.join(r[3], r[7]))
    # bits: group, g, q, k5, k0, k4, row 3, k3 -> rows (group, row 3, g), k (k5, k4, k3, q, k0)
    bits = gl.reshape(gl.join(lower, upper), [4, 8, 4, 2, 2, 2, 2, 2])
    weights = gl.reshape(gl.permute(bits, [0, 6, 1, 3, 5, 7, 2, 4]), [64, 64])
    return gl.convert_layout(weights, operand, assert_trivial=True)


@gluon.jit
def _words(plane, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """[group, lane, atom]"""
    words = plane._reinterpret(gl.int32, [4, 4 * CHUNKS, 32], PLAIN).slice(4 * chunk, 4, 1)
    return gl.permute(words.load(WORDS_LAYOUT), [0, 2, 1])
