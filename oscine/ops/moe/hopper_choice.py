"""The experts of a single token, chosen from the router's logits by each warp that needs them.

So the router's last program does not choose, and the next kernel does not wait for a choice. Of equal logits the lower
expert goes first; a NaN logit counts as -inf.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LANES = 32
MAX_EXPERTS = 256  # an id is a byte of a word
MAX_CHOSEN = 4


def can_choose(num_experts: int, per_token: int) -> bool:
    """Whether each thread of a warp has as many logits, a power of two, and a word has room for the chosen ones."""
    few = LANES <= num_experts <= MAX_EXPERTS and per_token <= MAX_CHOSEN
    return few and num_experts & (num_experts - 1) == 0


def _choice_asm(count: int, per_token: int) -> str:
    """PTX for a warp: ids of the largest logits, byte by byte, in $0 and its like; the thread's logits follow.

    Keys are unsigned integers in the order of the logits. No key is 0 but of those that are chosen already.
    """
    keys = [f"k{i}" for i in range(count)]
    lines = [".reg .pred same;", ".reg .b32 x, sign, first, best, id, chosen;", f".reg .b32 {', '.join(keys)};"]
    lines += ["mov.u32 first, %laneid;", f"mul.lo.u32 first, first, {count};", "mov.b32 chosen, 0;"]
    for i, key in enumerate(keys):
        lines += [f"add.f32 x, ${count + i}, 0f00000000;"]  # -0 is 0
        lines += ["and.b32 sign, x, 0x7FFFFFFF;", "setp.gt.u32 same, sign, 0x7F800000;", "@same mov.b32 x, 0xFF800000;"]
        lines += ["shr.s32 sign, x, 31;", "or.b32 sign, sign, 0x80000000;", f"xor.b32 {key}, x, sign;"]
    for place in range(per_token):
        lines += [f"mov.b32 best, {keys[0]};", *(f"max.u32 best, best, {key};" for key in keys[1:])]
        lines += ["redux.sync.max.u32 best, best, 0xFFFFFFFF;", "mov.b32 id, 0xFFFFFFFF;"]
        for i in reversed(range(count)):
            lines += [f"setp.eq.u32 same, {keys[i]}, best;", f"@same add.u32 id, first, {i};"]
        lines += ["redux.sync.min.u32 id, id, 0xFFFFFFFF;"]
        for i, key in enumerate(keys):
            lines += [f"add.u32 x, first, {i};", "setp.eq.u32 same, x, id;", f"@same mov.b32 {key}, 0;"]
        lines += [f"shl.b32 id, id, {8 * place};", "or.b32 chosen, chosen, id;"]
    lines += [f"mov.b32 ${i}, chosen;" for i in range(count)]
    return "{\n" + "\n".join(lines) + "\n}"


def _choice_constraints(count: int) -> str:
    return ",".join(["=&r"] * count + ["r"] * count)


choice_asm = gluon.constexpr_function(_choice_asm)
choice_constraints = gluon.constexpr_function(_choice_constraints)


@gluon.jit
def choose_experts(logits_ptr, EXPERTS: gl.constexpr, EXPERTS_PER_TOKEN: gl.constexpr, WARPS: gl.constexpr):
    """Ids of the largest of EXPERTS float32 logits, one per byte from the lowest on. For callers of so many warps."""
    each: gl.constexpr = EXPERTS // 32
    expert_E = gl.arange(0, EXPERTS, gl.BlockedLayout([each], [32], [WARPS], [0]))
    chosen_E = gl.inline_asm_elementwise(
        choice_asm(each, EXPERTS_PER_TOKEN),
        choice_constraints(each),
        [gl.load(logits_ptr + expert_E)],
        dtype=gl.int32,
        is_pure=False,
        pack=each,
    )
    return gl.max(chosen_E, 0)


@gluon.jit
def store_choice(chosen, logits_ptr, ids_ptr, weights_ptr, EXPERTS_PER_TOKEN: gl.constexpr, WARPS: gl.constexpr):
    """The chosen experts and their weights, a softmax over their logits, for kernels that run later."""
    place = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    valid = place < EXPERTS_PER_TOKEN
    expert = (chosen >> gl.where(valid, 8 * place, 0)) & 255
    logit = gl.load(logits_ptr + expert, valid, other=float("-inf"))
    power = gl.where(valid, gl.exp(logit - gl.max(logit, 0)), 0.0)
    gl.store(ids_ptr + place, expert, valid)
    gl.store(weights_ptr + place, power / gl.sum(power, 0), valid)
