"""Products of weights in 12 bits (hopper_bf12.py) with few tokens, in Gluon; hopper_stream.py has those in bfloat16.

The words of three planes arrive by TMA and become the register operand of wgmma. This takes longer than to multiply, so
a kernel does it for its first weights while it waits for the tokens.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscine.ops.compat import async_load, reinterpret
from oscine.ops.linear.bf12_size import WORDS
from oscine.ops.linear.hopper_bf12 import MASK, SHIFT, TURNS, Bf12Matrix, spare_bits
from oscine.ops.linear.hopper_stream import CHUNK, descriptor
from oscine.ops.record import record

GROUPS = 4  # of 16 rows, of a program
MAX_TOKEN_BYTES = gl.constexpr(24 << 10)

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
EXPANDED = gl.constexpr((gl.bfloat16,) * 8)
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


@record
class WordRing:
    """As stream.Ring, for weights in 12 bits, which do not share barriers with the tokens.

    The weights of the first EARLY steps become operands while the kernel before this one runs. Then their place in the
    ring is free for those of later steps.
    """

    weight: tma.tensor_descriptor  # of words [plane, parts, groups, words of a part]
    tokens: tma.tensor_descriptor  # [parts, tokens, columns of a part]
    weight_ring: gl.shared_memory_descriptor
    token_ring: gl.shared_memory_descriptor
    weights_arrived: gl.shared_memory_descriptor  # an mbarrier a stage
    tokens_arrived: gl.shared_memory_descriptor
    group: gl.tensor  # the first of four
    column: gl.tensor
    N: gl.constexpr
    CHUNKS: gl.constexpr
    STAGES: gl.constexpr
    TOKEN_STAGES: gl.constexpr
    STEPS: gl.constexpr
    EARLY: gl.constexpr

    @gluon.jit
    def load_weights(self, step, stage, wanted):
        arrived = self.weights_arrived.index(stage)
        mbarrier.expect(arrived, PLANES * self.weight.block_type.nbytes, pred=wanted)
        word = 2 * (self.column + step * self.CHUNKS * 64)
        for plane in gl.static_range(PLANES):
            target = self.weight_ring.index(stage * PLANES + plane)
            async_load(self.weight, [plane, 0, self.group, word], arrived, target, pred=wanted)

    @gluon.jit
    def load_tokens(self, step, stage, wanted):
        arrived = self.tokens_arrived.index(stage)
        mbarrier.expect(arrived, self.CHUNKS * self.tokens.block_type.nbytes, pred=wanted)
        for chunk in gl.static_range(self.CHUNKS):
            column = self.column + (step * self.CHUNKS + chunk) * 64
            target = self.token_ring.index(stage * self.CHUNKS + chunk)
            async_load(self.tokens, [0, 0, column], arrived, target, pred=wanted)

    @gluon.jit
    def depend(self, layout: gl.constexpr):
        """Waits for the kernel before this one. Returns the operands of the first steps, for `multiply`."""
        operands = ()
        for stage in gl.static_range(self.EARLY):
            mbarrier.wait(self.weights_arrived.index(stage), 0)
            for chunk in gl.static_range(self.CHUNKS):
                operands = operands + (self.expand(stage, chunk, layout),)  # noqa: RUF005
            if stage + self.STAGES < self.STEPS:
                self.load_weights(stage + self.STAGES, stage, True)
        gdc_wait()
        for stage in gl.static_range(self.TOKEN_STAGES):
            self.load_tokens(stage, stage, True)
        return operands

    @gluon.jit
    def multiply(self, operands, layout: gl.constexpr):
        """float32 [64, N], over 2^(e - 127) of each row."""
        sums = gl.zeros([64, self.N], gl.float32, layout)
        for step in gl.static_range(self.EARLY):
            mbarrier.wait(self.tokens_arrived.index(step), 0)
            for chunk in gl.static_range(self.CHUNKS):
                sums = self.add(operands[step * self.CHUNKS + chunk], step, chunk, sums)
        if self.EARLY > 0:
            sums = warpgroup_mma_wait(0, deps=[sums])
            if self.TOKEN_STAGES < self.STEPS:
                for step in gl.static_range(self.EARLY):
                    self.load_tokens(step + self.TOKEN_STAGES, step, step + self.TOKEN_STAGES < self.STEPS)
        for step in range(self.EARLY, self.STEPS):
            stage, token_stage = step % self.STAGES, step % self.TOKEN_STAGES
            mbarrier.wait(self.weights_arrived.index(stage), (step // self.STAGES) & 1)
            mbarrier.wait(self.tokens_arrived.index(token_stage), (step // self.TOKEN_STAGES) & 1)
            first = self.expand(stage, 0, layout)
            if self.CHUNKS == 2:
                second = self.expand(stage, 1, layout)
                sums = self.add(first, token_stage, 0, sums)
                sums = self.add(second, token_stage, 1, sums)
            else:
                sums = self.add(first, token_stage, 0, sums)
            sums = warpgroup_mma_wait(0, deps=[sums])
            if self.STAGES + self.EARLY < self.STEPS:
                self.load_weights(step + self.STAGES, stage, step + self.STAGES < self.STEPS)
            if self.TOKEN_STAGES + self.EARLY < self.STEPS:
                self.load_tokens(step + self.TOKEN_STAGES, token_stage, step + self.TOKEN_STAGES < self.STEPS)
        return sums

    @gluon.jit
    def add(self, operand, token_stage, chunk: gl.constexpr, sums):
        shape: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
        tokens = self.token_ring.index(token_stage * self.CHUNKS + chunk)
        columns = reinterpret(tokens, self.tokens.dtype, [self.N, 64], shape).permute((1, 0))
        return warpgroup_mma(operand, columns, sums, is_async=True)

    @gluon.jit
    def expand(self, stage, chunk: gl.constexpr, layout: gl.constexpr):
        """A chunk of a stage -> its weights bf16 [64, 64] over 2^(e - 127), as the register operand.

        Not pure, so that it is done where it stands: before the wait for the kernel before this one.
        """
        a = _words(self.weight_ring.index(PLANES * stage), chunk, self.CHUNKS)
        b = _words(self.weight_ring.index(PLANES * stage + 1), chunk, self.CHUNKS)
        c = _words(self.weight_ring.index(PLANES * stage + 2), chunk, self.CHUNKS)
        r = gl.inline_asm_elementwise(EXPAND_ASM, EXPAND_CONSTRAINTS, [a, b, c], dtype=EXPANDED, is_pure=False, pack=2)
        lower = gl.join(gl.join(r[0], r[4]), gl.join(r[2], r[6]))
        upper = gl.join(gl.join(r[1], r[5]), gl.join(r[3], r[7]))
        # bits: group, g, q, k5, k0, k4, row 3, k3 -> rows (group, row 3, g), k (k5, k4, k3, q, k0)
        bits = gl.reshape(gl.join(lower, upper), [4, 8, 4, 2, 2, 2, 2, 2])
        weights = gl.reshape(gl.permute(bits, [0, 6, 1, 3, 5, 7, 2, 4]), [64, 64])
        return gl.convert_layout(weights, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)


@gluon.jit
def _words(plane, chunk: gl.constexpr, CHUNKS: gl.constexpr):
    """[group, lane, atom]"""
    words = reinterpret(plane, gl.int32, [4, 4 * CHUNKS, 32], PLAIN).slice(4 * chunk, 4, 1)
    return gl.permute(words.load(WORDS_LAYOUT), [0, 2, 1])


@gluon.jit
def start_words(
    weight,
    tokens,
    group,
    column,
    N: gl.constexpr,
    CHUNKS: gl.constexpr,
    STAGES: gl.constexpr,
    STEPS: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Lets the next kernel begin, and issues the weights of the first STAGES steps; EARLY <= STAGES <= STEPS."""
    gl.static_assert(CHUNKS <= 2, "TMA takes at most 256 words of a group")
    gl.static_assert(EARLY <= STAGES and STAGES <= STEPS, "stages have weights, and those that are early have a stage")
    gdc_launch_dependents()
    # few tokens need no ring
    all_tokens: gl.constexpr = STEPS * CHUNKS * tokens.block_type.nbytes
    token_stages: gl.constexpr = STEPS if all_tokens <= MAX_TOKEN_BYTES else STAGES
    weight_ring = gl.allocate_shared_memory(weight.dtype, [STAGES * PLANES] + weight.block_type.shape, weight.layout)  # noqa: RUF005
    token_ring = gl.allocate_shared_memory(
        tokens.dtype,
        [token_stages * CHUNKS] + tokens.block_type.shape,  # noqa: RUF005
        tokens.layout,
    )
    weights_arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    tokens_arrived = gl.allocate_shared_memory(gl.int64, [token_stages, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(weights_arrived.index(stage), count=1)
    for stage in gl.static_range(token_stages):
        mbarrier.init(tokens_arrived.index(stage), count=1)
    rings = weight_ring, token_ring, weights_arrived, tokens_arrived
    ring = WordRing(weight, tokens, *rings, group, column, N, CHUNKS, STAGES, token_stages, STEPS, EARLY)
    for stage in gl.static_range(STAGES):
        ring.load_weights(stage, stage, True)
    return ring


def word_descriptor(matrix: Bf12Matrix, parts: int, chunks: int) -> TensorDescriptor:
    """Boxes of one plane of words: `chunks` chunks of every part of the columns, 4 / parts groups in each part.

    TMA takes at most 256 of a dimension, so chunks <= 2.
    """
    planes, groups, words = matrix.words.shape
    view = matrix.words.view(planes, groups, parts, words // parts).transpose(1, 2)
    return descriptor(view, [1, parts, GROUPS // parts, 2 * chunks * CHUNK], swizzled=False)
