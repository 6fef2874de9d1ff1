"""Interprets the inline PTX of kernels: straight lines of code, on registers that are vectors over the threads.

It has the instructions that Oscine's kernels use, as the PTX ISA defines them; any other is an error. A warp is 32
consecutive threads.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Register = NDArray[np.uint64]  # a thread each; what is above a narrower register's bits is zero
Guard = NDArray[np.bool_] | None  # the threads that do it; None is all
WARP = 32
WORD = np.uint64(0xFFFFFFFF)


def run_ptx(asm: str, inputs: list[Tensor], dtypes: tuple[torch.dtype, ...], pack: int) -> list[Tensor]:
    """`inputs`: [threads, pack] each, what one run of the code sees. Returns one such tensor a dtype."""
    counts = [-(-pack * dtype.itemsize // 4) for dtype in dtypes]
    registers: dict[str, Register] = {}
    threads = len(inputs[0])
    for i, register in enumerate(r for x in inputs for r in _registers(x)):
        registers[f"${sum(counts) + i}"] = register
    _Run(registers, threads).run(asm)
    results, first = [], 0
    for dtype, count in zip(dtypes, counts, strict=True):
        words = np.stack([registers[f"${first + i}"] for i in range(count)], 1).astype(np.uint32)
        results.append(torch.from_numpy(words).view(dtype)[:, :pack])
        first += count
    return results


def _registers(x: Tensor) -> list[Register]:
    if x.dtype.itemsize == 8:
        return [x[:, i].numpy().astype(np.uint64) for i in range(x.shape[1])]
    words = x.contiguous().view(torch.int32).numpy().view(np.uint32)
    return [words[:, i].astype(np.uint64) for i in range(words.shape[1])]


def _product_x2(a: Register, b: Register, dtype: torch.dtype) -> Register:
    left, right = (torch.from_numpy(x.astype(np.uint32)).view(dtype).float() for x in (a, b))
    return (left * right).to(dtype).view(torch.int32).numpy().view(np.uint32).astype(np.uint64)


def _bfloat16(x: Register) -> Register:
    rounded = torch.from_numpy(_floats(x)).bfloat16().view(torch.int16)
    return rounded.numpy().view(np.uint16).astype(np.uint64)


def _permuted(a: Register, b: Register, selector: Register) -> Register:
    """Byte i of the result is one of the eight of (b:a), named by bits 4 i .. 4 i + 2; bit 3 would repeat its sign."""
    result, both = np.zeros_like(a), b << np.uint64(32) | a
    for i in range(4):
        place = selector >> np.uint64(4 * i) & np.uint64(15)
        assert (place < 8).all(), "not in these kernels"
        result |= (both >> np.uint64(8) * place & np.uint64(255)) << np.uint64(8 * i)
    return result


def _floats(x: Register) -> NDArray[np.float32]:
    return x.astype(np.uint32).view(np.float32)


def _bits(x: NDArray[np.float32]) -> Register:
    return x.view(np.uint32).astype(np.uint64)


def _signed(x: Register) -> NDArray[np.int32]:
    return x.astype(np.uint32).view(np.int32)


@dataclass(frozen=True)
class _Line:
    opcode: str
    operands: list[str]
    guard: str | None
    negated: bool


@cache
def _parsed(asm: str) -> list[_Line]:
    lines = []
    for text in asm.strip().removeprefix("{").removesuffix("}").split(";"):
        found = re.fullmatch(r"(?:@(!?)(\w+)\s+)?([\w.:]+)\s+(.*)", text.strip(), re.DOTALL)
        if found is not None and found[3] != ".reg":
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[4])
            lines.append(_Line(found[3], operands, found[2], bool(found[1])))
        assert found is not None or not text.strip(), text
    return lines


class _Run:
    def __init__(self, registers: dict[str, Register], threads: int) -> None:
        self.registers, self.threads = registers, threads
        lane = np.arange(threads, dtype=np.uint64) % np.uint64(WARP)
        self.registers |= {"%laneid": lane, "%lanemask_lt": (np.uint64(1) << lane) - np.uint64(1)}

    def run(self, asm: str) -> None:
        for line in _parsed(asm):
            guard = None
            if line.guard:
                guard = (self.registers[line.guard] != 0) ^ line.negated
            self._step(line.opcode, line.operands, guard)

    def _read(self, operand: str) -> Register:
        if operand[0] in "{[":
            parts = [self._read(part.strip()) for part in operand[1:-1].split(",")]
            return parts[0] if len(parts) == 1 else parts[0] | parts[1] << np.uint64(16)
        if operand in self.registers:
            return self.registers[operand]
        return _constant(operand, self.threads)

    def _write(self, target: str, result: Register, guard: Guard) -> None:
        if target[0] == "{":
            low, high = (part.strip() for part in target[1:-1].split(","))
            self._write(low, result & np.uint64(0xFFFF), guard)
            self._write(high, result >> np.uint64(16), guard)
        elif guard is None:
            self.registers[target] = result & WORD
        else:
            self.registers[target] = np.where(guard, result & WORD, self.registers[target])

    def _step(self, opcode: str, operands: list[str], guard: Guard) -> None:
        target, *sources = operands
        if opcode.startswith("atom."):
            assert opcode == "atom.relaxed.gpu.global.add.u32", opcode
            self._write(target, self._atomic_add(*map(self._read, sources), guard), guard)
        elif opcode.startswith("setp."):
            self._write(target, self._compare(opcode.split(".")[1:], [self._read(x) for x in sources]), guard)
        else:
            self._write(target, self._compute(opcode, [self._read(x) for x in sources]), guard)

    def _compute(self, opcode: str, x: list[Register]) -> Register:
        match opcode:
            case "mov.b32" | "mov.u32":
                return x[0]
            case "shl.b32":
                return x[0] << x[1]
            case "shr.u32":
                return x[0] >> x[1]
            case "shr.s32":
                return (_signed(x[0]) >> x[1].astype(np.int32)).view(np.uint32).astype(np.uint64)
            case "and.b32":
                return x[0] & x[1]
            case "or.b32":
                return x[0] | x[1]
            case "xor.b32":
                return x[0] ^ x[1]
            case "add.u32":
                return x[0] + x[1]
            case "mul.lo.u32":
                return x[0] * x[1]
            case "max.u32":
                return np.maximum(x[0], x[1])
            case "add.f32":
                return _bits(_floats(x[0]) + _floats(x[1]))
            case "shf.l.wrap.b32":  # the upper word of (b:a) << c
                return ((x[1] << np.uint64(32) | x[0]) << x[2]) >> np.uint64(32)
            case "lop3.b32":
                return _lop3(*x)
            case "mad.lo.u32":
                return x[0] * x[1] + x[2]
            case "prmt.b32":
                return _permuted(*x)
            case "rcp.approx.ftz.f32":
                return _bits(1 / _floats(x[0]))
            case "mul.f16x2":
                return _product_x2(x[0], x[1], torch.float16)
            case "mul.bf16x2":
                return _product_x2(x[0], x[1], torch.bfloat16)
            case "cvt.rn.bf16x2.f32":  # the first source is the upper half
                return _bfloat16(x[0]) << np.uint64(16) | _bfloat16(x[1])
            case "popc.b32":
                return np.array([int(v).bit_count() for v in x[0]], np.uint64)
            case "match.any.sync.b32":
                return self._by_warp(lambda v: (v[:, None] == v[None, :]) @ _powers(), x[0])
            case "vote.sync.ballot.b32":
                return self._by_warp(lambda v: np.full(WARP, (v != 0) @ _powers(), np.uint64), x[0])
            case "redux.sync.add.u32":
                return self._by_warp(lambda v: np.full(WARP, v.sum(), np.uint64), x[0])
            case "redux.sync.max.u32":
                return self._by_warp(lambda v: np.full(WARP, v.max(), np.uint64), x[0])
            case "redux.sync.min.u32":
                return self._by_warp(lambda v: np.full(WARP, v.min(), np.uint64), x[0])
        raise NotImplementedError(opcode)

    def _compare(self, how: list[str], x: list[Register]) -> Register:
        a, b = (_signed(x[0]), _signed(x[1])) if how[-1] == "s32" else (x[0], x[1])
        result = {"ge": a >= b, "gt": a > b, "eq": a == b}[how[0]]
        if len(how) == 3:
            assert how[1] == "and", how
            result &= x[2] != 0
        return result.astype(np.uint64)

    def _by_warp(self, function: Callable[[Register], Register], x: Register) -> Register:
        assert self.threads % WARP == 0
        return np.concatenate([function(warp) for warp in x.reshape(-1, WARP)])

    def _atomic_add(self, addresses: Register, amount: Register, guard: Guard) -> Register:
        old = np.zeros(self.threads, np.uint64)
        for thread in range(self.threads) if guard is None else guard.nonzero()[0]:
            word = ctypes.c_uint32.from_address(int(addresses[thread]))
            old[thread] = word.value
            word.value += int(amount[thread])
        return old


@cache
def _constant(text: str, threads: int) -> Register:
    number = int(text[2:], 16) if text.startswith("0f") else int(text, 0)  # 0f: the bits of a float
    return np.full(threads, number & int(WORD), np.uint64)


@cache
def _powers() -> Register:
    return np.uint64(1) << np.arange(WARP, dtype=np.uint64)


def _lop3(a: Register, b: Register, c: Register, table: Register) -> Register:
    """Bit i of the table is the result where (a, b, c) are the bits of i, a the highest."""
    result = np.zeros_like(a)
    for i in range(8):
        if int(table[0]) >> i & 1:
            terms = [x if i >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result & WORD
