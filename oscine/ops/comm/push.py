"""Messages between GPUs whose data is their own flag, for Triton kernels.

A rank stores its message straight into a slot of each other rank's memory. No word of it is zero: a word of zeros
becomes -0.0, or two of bfloat16. A receiver polls its own slots until no word is zero, and stores zeros back. There
are no flags, counters or barriers, so a message costs one way through the link.

Memory order: words are relaxed, since each carries its own validity. A slot may be written again when its writer has
received, in another slot, what the receiver sent in a later kernel than the one that cleared it.

What the functions share:
- messages: tuple of tensors of one dtype whose elements travel side by side, WIDTH words of 32 bits per thread and
  store. Several elements of a thread go into one store, so messages must come from tensors that are loaded or stored:
  Triton lays these out with 16 consecutive bytes per thread. What is compiled is tested for that.
- place: int32 tensor, bytes from the start of a slot to an element, negative where there is none.
- addresses: tuple of int64. First this rank's first slot, then this rank's slot at each other rank, in rank order.
- slot: bytes from one slot to the next. A rank has one for each other rank, in rank order.
- state: int32 [2], whether a poll has failed, and how many LIMIT_NS one may take.
"""

# ruff: noqa: RUF005 (Triton cannot unpack within a tuple)

from typing import Any

import triton
import triton.language as tl
from triton.language import core

LIMIT_NS = 1 << 20  # a unit of a poll's limit
TRIES = 64  # loads between two looks at the clock and at the state


@triton.jit
def push(messages, place, addresses, COUNT: tl.constexpr, PACK: tl.constexpr, WIDTH: tl.constexpr):
    """Stores COUNT messages at every other rank. Returns them as these see them."""
    PEERS: tl.constexpr = len(addresses) - 1
    code: tl.constexpr = _push_code(PEERS, PACK, WIDTH, messages[0].dtype.primitive_bitwidth == 16)
    kinds: tl.constexpr = _kinds(WIDTH, PEERS, PACK, WIDTH)
    return _emit(code, kinds, addresses[1:] + (place,) + messages, messages[0], COUNT, PACK)


@triton.jit
def poll(
    messages,
    place,
    address,
    slot,
    state,
    SOURCES: tl.constexpr,
    CLEAR: tl.constexpr,
    COUNT: tl.constexpr,
    PACK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Waits for what other ranks push into SOURCES slots from `address` on. Returns their messages, a flat tuple.

    messages: what push returned, so that nothing can wait before it has sent. CLEAR: stores zeros back.
    Of what does not come within the limit it returns any words, and all later polls end at once.
    """
    code: tl.constexpr = _poll_code(SOURCES, CLEAR, PACK, WIDTH)
    kinds: tl.constexpr = _kinds(WIDTH * SOURCES, 3, PACK, WIDTH)
    bases = (address, slot.to(tl.int64), state.to(tl.int64, bitcast=True))
    return _emit(code, kinds, bases + (place,) + messages, messages[0], COUNT * SOURCES, PACK)


@triton.jit
def clear(messages, place, address, slot, SOURCES: tl.constexpr, PACK: tl.constexpr, WIDTH: tl.constexpr):
    """Stores zeros into SOURCES slots that were polled without CLEAR."""
    code: tl.constexpr = _clear_code(SOURCES, PACK, WIDTH)
    kinds: tl.constexpr = _kinds(WIDTH, 2, PACK, WIDTH)
    _emit(code, kinds, (address, slot.to(tl.int64), place) + messages, messages[0], 1, PACK)


@core.extern
def _emit(code: Any, kinds: Any, arguments: Any, like: Any, count: Any, pack: Any, _semantic: Any = None) -> Any:
    """Runs the code once per `pack` elements of a thread. Returns `count` tensors."""
    results = (like.dtype,) * core._unwrap_if_constexpr(count)
    found = core.inline_asm_elementwise(code, kinds, arguments, results, False, pack, _semantic=_semantic)
    return core.tuple(found)


# The operands of a block of code are the words of its results, the bases, the place and the words of the messages. Of
# a base and of the place there are `pack` copies; the first is used.


@triton.constexpr_function
def _kinds(results: int, bases: int, pack: int, sources: int) -> str:
    return ",".join(["=&r"] * results + ["l"] * (bases * pack) + ["r"] * (pack + sources))


@triton.constexpr_function
def _words(first: int, count: int) -> list[str]:
    return [f"${first + index}" for index in range(count)]


@triton.constexpr_function
def _store(at: str, words: list[str]) -> str:
    return f"st.relaxed.sys.global.v{len(words)}.b32 [{at}], {{{', '.join(words)}}};"


@triton.constexpr_function
def _block(lines: list[str]) -> str:
    return "\n".join(("{", *lines, "}"))


@triton.constexpr_function
def _push_code(peers: int, pack: int, width: int, halves: bool) -> Any:
    words, place = _words(0, width), f"${width + peers * pack}"
    sources = _words(width + (peers + 1) * pack, width)
    nothing = "0x80008000" if halves else "0x80000000"
    lines = [".reg .pred is;", ".reg .b64 offset, at;"]
    for word, source in zip(words, sources, strict=True):
        lines += [f"setp.eq.b32 is, {source}, 0;", f"selp.b32 {word}, {nothing}, {source}, is;"]
    lines += [f"setp.ge.s32 is, {place}, 0;", f"cvt.s64.s32 offset, {place};"]
    for peer in range(peers):
        lines += [f"add.s64 at, ${width + peer * pack}, offset;", f"@is {_store('at', words)}"]
    return _block(lines)


@triton.constexpr_function
def _poll_code(sources: int, clears: bool, pack: int, width: int) -> Any:
    total = width * sources
    words = _words(0, total)
    first, step, state, place = (f"${total + index * pack}" for index in range(4))
    parts = [(f"at{source}", words[source * width : (source + 1) * width]) for source in range(sources)]
    lines = [
        ".reg .pred is;",
        ".reg .b32 least, tries, failed;",
        f".reg .b64 begin, now, limit, {', '.join(at for at, _ in parts)};",
        *(f"mov.b32 {word}, 0;" for word in words),
        f"setp.lt.s32 is, {place}, 0;",
        "@is bra DONE;",
        f"cvt.s64.s32 at0, {place};",
        f"add.s64 at0, at0, {first};",
        *(f"add.s64 at{source}, at{source - 1}, {step};" for source in range(1, sources)),
        "mov.b32 tries, 0;",
        "mov.b64 begin, 0;",
        "AGAIN:",
        *(f"ld.relaxed.sys.global.v{width}.b32 {{{', '.join(part)}}}, [{at}];" for at, part in parts),
        f"min.u32 least, {words[0]}, {words[1]};",
        *(f"min.u32 least, least, {word};" for word in words[2:]),
        "setp.ne.u32 is, least, 0;",
        "@is bra READY;",
        "add.u32 tries, tries, 1;",
        f"and.b32 least, tries, {TRIES - 1};",
        "setp.ne.u32 is, least, 0;",
        "@is bra AGAIN;",
        f"ld.relaxed.sys.global.v2.b32 {{failed, least}}, [{state}];",
        "setp.ne.u32 is, failed, 0;",
        "@is bra DONE;",
        f"mul.wide.u32 limit, least, {LIMIT_NS};",
        "mov.u64 now, %globaltimer;",
        "setp.eq.u64 is, begin, 0;",
        "@is mov.b64 begin, now;",
        "sub.u64 now, now, begin;",
        "setp.lt.u64 is, now, limit;",
        "@is bra AGAIN;",
        f"st.relaxed.sys.global.b32 [{state}], 1;",
        "bra DONE;",
        "READY:",
    ]
    if clears:
        lines.append("mov.b32 least, 0;")
        lines += [_store(at, ["least"] * width) for at, _ in parts]
    return _block([*lines, "DONE:"])


@triton.constexpr_function
def _clear_code(sources: int, pack: int, width: int) -> Any:
    words, place = _words(0, width), f"${width + 2 * pack}"
    lines = [".reg .pred is;", ".reg .b64 at;", *(f"mov.b32 {word}, 0;" for word in words)]
    lines += [f"setp.ge.s32 is, {place}, 0;", f"cvt.s64.s32 at, {place};", f"add.s64 at, at, ${width};"]
    for _ in range(sources):
        lines += [f"@is {_store('at', words)}", f"add.s64 at, at, ${width + pack};"]
    return _block(lines)
