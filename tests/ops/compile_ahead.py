"""Compiles Triton and Gluon kernels for a GPU that is not there, and runs Triton kernels on CPU tensors.

    kernel = compile_ahead(my_kernel, {"x": "*bf16", "n": "i32"}, {"BLOCK": 128}, num_warps=4)
    assert kernel.spills == 0 and kernel.registers <= 168 and "HGMMA" in kernel.sass

    def in_interpreter() -> None: ...  # a plain function of a test module, launches Triton kernels on CPU tensors
    def test_it() -> None:
        run_interpreted(in_interpreter)

Each kernel must fit the chip: its shared memory, its registers, and no spills. A kernel that may spill elsewhere must
not do so in its innermost loops.

Knows nothing of Oscine's kernels. The interpreter has no Gluon and computes bf16 `tl.dot` wrongly (use float32 or
float16); `tl.extra.cuda` calls must be behind a constexpr there.
"""

import re
import struct
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from tests.ops.child import call
from tests.ops.chips import AMD_CHIPS, CHIPS
from tests.ops.sass_loops import innermost_loops

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
REGISTERS = 65536  # of an SM, on all of these chips
MAX_REGISTERS = 255  # of a thread
INSTRUCTION = r"\*/ +(?:@!?\w+ )?(\w+(?:\.\w+)*) (?:PT, )?R(\d+)[.\w]*, ([^;]*?) *;"  # that writes registers
TO_E4M3 = {"F2FP.SATFINITE.E4M3.F32.PACK_AB_MERGE_C"}  # two values of float32


@dataclass(frozen=True)
class Compiled:
    registers: int  # a thread
    spills: int  # bytes of local memory a thread: spilled registers, and nothing else in these kernels
    shared: int  # bytes of shared memory a program
    threads: int  # of a program
    cubin: bytes
    ptx: str
    ttgir: str
    arch: int

    @property
    def sass(self) -> str:
        return _disassembled(self.cubin, self.arch)

    @cached_property
    def spills_in_loops(self) -> int:
        """Instructions that store or load spilled registers, in the innermost loops that multiply."""
        if self.spills == 0:
            return 0
        loops = innermost_loops(self.sass, "GMMA")
        assert loops, "spills, and no loop to look at"
        return sum(text.startswith(("STL", "LDL")) for loop in loops for text in loop)

    @property
    def unpacked_after(self) -> set[str]:
        """The instructions that wrote the registers converted from e4m3. ptxas 12.9 may convert an unrelated one."""
        written: dict[str, str] = {}
        found = set()
        for name, register, sources in re.findall(INSTRUCTION, self.sass):
            if name == "F2FP.F16.E4M3.UNPACK_B":
                found.add(written.get(sources.split(".")[0], "nothing"))
            width = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
            written |= {f"R{int(register) + i}": name for i in range(width)}
        return found


def marked(cases: Iterable[Any], newest: Collection[Any], oldest: Collection[Any] = ()) -> list[Any]:
    """Parameters of a test that compiles: CI runs `newest` with two releases of Triton, `oldest` with the oldest one.

    All other cases are slow.
    """

    def mark(case: Any) -> tuple[pytest.MarkDecorator, ...]:
        return () if case in newest else (pytest.mark.variant if case in oldest else pytest.mark.slow,)

    every = list(cases)
    assert all(case in every for case in (*newest, *oldest)), "not one of the cases"
    return [pytest.param(*(case if type(case) is tuple else (case,)), marks=mark(case)) for case in every]


def compile_ahead(
    kernel: Any,
    signature: Mapping[str, str],
    constexprs: Mapping[str, Any],
    *,
    arch: int = 90,
    unaligned: tuple[str, ...] = (),
    divisible: tuple[str, ...] = (),
    may_spill: bool = False,
    **options: Any,
) -> Compiled:
    """Compiles for compute capability `arch` / 10 (90 means sm_90a).

    signature: the type of each runtime argument ("*bf16", "*fp32", "*i32", "i32", "fp32", "tensordesc<...>").
    constexprs: the values of the others. Pointers are taken as 16-byte aligned, as torch allocates them, but for
    those in `unaligned`; integers named in `divisible` are multiples of 16. may_spill: outside of its innermost loops.
    options: num_warps, num_stages, launch_pdl, maxnreg, ...
    """
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    assert types.keys() >= set(signature) | set(constexprs), "an argument that the kernel does not have"
    assert {name for name, kind in types.items() if kind == "constexpr"} == set(constexprs), "an argument has no value"
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, (name, kind) in enumerate(types.items())
        if name in divisible or (kind.startswith("*") and name not in unaligned)
    }
    return compile_source(
        (GluonASTSource if kernel.is_gluon() else ASTSource)(kernel, types, dict(constexprs), aligned),
        arch,
        options,
        may_spill=may_spill,
    )


def compile_source(source: Any, arch: int, options: dict[str, Any], *, may_spill: bool = False) -> Compiled:
    """`source`: what triton.compile takes; may_spill: as in compile_ahead."""
    fused = {"enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=fused | options)
    files = compiled.asm["ptx"], compiled.asm["cubin"], compiled.metadata.shared, compiled.asm["ttgir"]
    return _described(*files, arch, may_spill=may_spill)


@dataclass(frozen=True)
class AmdCompiled:
    registers: int  # a thread: those of vectors and of accumulators
    spills: int  # of registers of vectors, and bytes of memory that a thread has of its own
    shared: int  # bytes of shared memory a program
    threads: int  # of a program
    assembler: str


def compile_for_amd(source: Any, architecture: str, options: dict[str, Any]) -> AmdCompiled:
    """`architecture`: such as gfx942. Asserts that the kernel fits the chip."""
    given = {name: options[name] for name in ("num_warps", "num_stages") if name in options}
    target = GPUTarget("hip", architecture, 64)
    compiled = triton.compile(source, target=target, options=given | {"enable_fp_fusion": True})
    text = compiled.asm["amdgcn"]

    def noted(name: str) -> int:
        found = re.search(rf"\.{name}:\s+(\d+)", text)
        assert found, name
        return int(found[1])

    spills = noted("vgpr_spill_count") + noted("private_segment_fixed_size")  # scalars spill into vectors, not memory
    threads = 64 * compiled.metadata.num_warps
    found = AmdCompiled(noted("vgpr_count"), spills, compiled.metadata.shared, threads, text)
    size = {name: getattr(found, name) for name in ("registers", "spills", "shared", "threads")}
    assert found.shared <= AMD_CHIPS[architecture].shared_memory, size
    assert threads <= 1024, size
    waves = -(-compiled.metadata.num_warps // 4)  # of a program, on each of the four processors of a compute unit
    assert found.registers * waves <= 512, size
    assert found.spills == 0, size
    return found


def assemble_for(arch: int, compiled: Compiled) -> Compiled:
    """The same PTX for another chip, which must have all of its instructions; a tenth of the time of a compilation."""
    ptx = re.sub(r"\.target sm_\w+", f".target {_name(arch)}", compiled.ptx)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-lineinfo", f"--gpu-name={_name(arch)}", source, "-o", target]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return _described(ptx, target.read_bytes(), compiled.shared, compiled.ttgir, arch)


def _name(arch: int) -> str:
    return f"sm_{arch}{'a' if arch >= 90 else ''}"


def _described(ptx: str, cubin: bytes, shared: int, ttgir: str, arch: int, *, may_spill: bool = False) -> Compiled:
    """Asserts that the kernel fits the chip."""
    usage = _said(TOOLS / "cuobjdump", "-res-usage", file=cubin)
    found, threads = re.search(r"REG:(\d+) STACK:(\d+)", usage), re.search(r"\.reqntid (\d+)", ptx)
    assert found, usage
    assert threads, "no .reqntid"
    compiled = Compiled(int(found[1]), int(found[2]), shared, int(threads[1]), cubin, ptx, ttgir, arch)
    size = {name: getattr(compiled, name) for name in ("registers", "spills", "shared", "threads")}
    assert compiled.shared <= CHIPS[arch].shared_memory, size
    assert compiled.registers * compiled.threads <= REGISTERS, size
    assert compiled.registers <= MAX_REGISTERS, size
    assert (compiled.spills_in_loops if may_spill else compiled.spills) == 0, size
    return compiled


def box_type(*shape: int) -> str:
    """Of an argument that is a descriptor of bfloat16 boxes, as oscine.ops.linear.hopper_stream makes them."""
    return f"tensordesc<bf16[{', '.join(map(str, shape))}],{gl.NVMMASharedLayout(128, 16, len(shape))!r}>"


def byte_box_type(swizzle: int, *shape: int) -> str:
    """Of boxes of bytes; `swizzle`: the bytes of a row, or 0."""
    return f"tensordesc<u8[{', '.join(map(str, shape))}],{gl.NVMMASharedLayout(swizzle, 8, len(shape))!r}>"


def word_box_type(*shape: int, dtype: str = "i32", swizzle: int = 0) -> str:
    """Of boxes of 32 bits an element; `swizzle`: the bytes of a row, or 0."""
    return f"tensordesc<{dtype}[{', '.join(map(str, shape))}],{gl.NVMMASharedLayout(swizzle, 32, len(shape))!r}>"


def run_interpreted(function: Callable[[], None]) -> None:
    """Calls a module-level function in a process of its own, where `triton.jit` makes interpreted kernels."""
    call("tests.ops.triton_interpreter", function)


@lru_cache(10)
def _disassembled(cubin: bytes, arch: int) -> str:
    """What `cuobjdump -sass` says, without the codes of the instructions, in three quarters of its time."""
    return _said(TOOLS / "nvdisasm", "--binary", _name(arch).replace("sm_", "SM"), file=_code(cubin))


def _code(cubin: bytes) -> bytes:
    """The section .text.KERNEL of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, index_of_names = struct.unpack_from("<3H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q", cubin, table + i * size) for i in range(count)]
    names = sections[index_of_names][4]
    [code] = [one for one in sections if cubin.startswith(b".text.", names + one[0])]
    return cubin[code[4] : code[4] + code[5]]


def _said(program: Path, *options: str, file: bytes) -> str:
    with tempfile.NamedTemporaryFile() as written:
        written.write(file)
        written.flush()
        return subprocess.run([program, *options, written.name], capture_output=True, text=True, check=True).stdout
