"""The C kernels on processors other than this machine's: compiled for each, and run where that is possible.

Processors of the same kind run by themselves, ARM's under QEMU. Nothing here emulates AVX-512 or AVX-VNNI.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from platform import machine
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.inputs import random_experts, random_routing
from oscine.ops.moe import reference as reference_moe
from oscine.ops.native.levels import features
from oscine.ops.native.library import FLAGS, OF_STEPS, OTHERS
from tests.ops.bound import CPU_TARGET

SOURCES = Path(__file__).parents[2] / "oscine" / "ops" / "native"
PROGRAM = Path(__file__).parent / "native_program.c"
CPU = torch.device("cpu")
INT8_ERROR, DENSE_ERROR = 0.015, 0.009  # as in test_native.py
PORTABLE = [flag for flag in FLAGS if flag not in ("-march=native", "-shared", "-fPIC")]

Run = Callable[[list[int], list[Tensor]], Tensor]


class Processor(NamedTuple):
    name: str
    compiler: str
    flags: tuple[str, ...]
    emulator: tuple[str, ...] = ()  # empty: it runs here
    needs: str = ""  # of this machine's processor, to run here


ARM, X86 = "aarch64-linux-gnu-gcc", "gcc"
RUN = [
    Processor("ARM with dot products", ARM, ("-march=armv8.2-a+dotprod", "-static"), ("qemu-aarch64", "-cpu", "max")),
    Processor("ARM without", ARM, ("-march=armv8-a", "-static"), ("qemu-aarch64", "-cpu", "max")),
    Processor("x86 without AVX2", X86, ("-march=x86-64-v2",)),
    Processor("AVX2 without VNNI", X86, ("-march=haswell",), needs="avx2"),
]
COMPILED = [
    Processor("AVX-512 VNNI", X86, ("-march=icelake-server",)),
    Processor("AVX-VNNI", X86, ("-march=alderlake",)),
]


def compile_for(processor: Processor, target: Path) -> None:
    here = processor.compiler == X86 and machine() == "x86_64"
    needed = [processor.compiler, *processor.emulator[:1]]
    missing = [tool for tool in needed if shutil.which(tool) is None]
    if missing or not (here or processor.compiler == ARM):
        pytest.skip(f"{processor.name}: there is no {' and no '.join(missing) or 'x86 processor'}")
    header = shutil.copy(SOURCES / "oscine.h", target.parent)  # compiled first: it includes all of x86's vectors
    sources = [PROGRAM, *sorted(SOURCES.glob("*.c"))]
    command = [
        processor.compiler,
        *PORTABLE,
        *processor.flags,
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-psabi",
        f"-I{SOURCES}",
    ]
    for arguments in (
        ["-x", "c-header", str(header), "-o", f"{header}.gch"],
        ["-include", str(header), "-o", str(target), *map(str, sources), "-lm"],
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        assert not done.returncode, done.stderr


@pytest.fixture(scope="module", params=RUN, ids=lambda processor: processor.name)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    processor, program = request.param, tmp_path_factory.mktemp("native") / "program"
    if processor.needs and processor.needs not in features():
        pytest.skip(f"this processor has no {processor.needs}")
    compile_for(processor, program)

    def run_program(numbers: list[int], arrays: list[Tensor]) -> Tensor:
        header = torch.tensor([*numbers, *[0] * (8 - len(numbers))])
        given = b"".join(array.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for array in (header, *arrays))
        done = subprocess.run([*processor.emulator, str(program)], input=given, capture_output=True, check=True)
        return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)

    return run_program


@pytest.mark.parametrize("processor", COMPILED, ids=lambda processor: processor.name)
def test_it_compiles(processor: Processor, tmp_path: Path) -> None:
    compile_for(processor, tmp_path / "program")


@pytest.mark.parametrize("num_tokens", [1, 2, 35])
@pytest.mark.parametrize(("kind", "most"), [(0, 1e-5), (1, DENSE_ERROR), (2, 1e-5)])
def test_dense_products(run: Run, num_tokens: int, kind: int, most: float) -> None:
    num_rows, width = 70, 200
    x, weight = torch.randn(num_tokens, width), torch.randn(num_rows, width).bfloat16()
    stored = weight.float() if kind == 0 else weight
    found = run([0, num_tokens, num_rows, width, kind], [x, stored]).view(num_tokens, num_rows)
    expected = x @ weight.float().T
    assert (found - expected).norm() <= most * expected.norm()


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_experts(run: Run, num_tokens: int) -> None:
    num_experts, hidden, intermediate, per_token = 5, 96, 64, 2
    experts = random_experts(num_experts, hidden, intermediate, CPU, torch.float32, scales=(118, 124))
    routing = random_routing(num_tokens, num_experts, per_token, CPU)
    x = torch.randn(num_tokens, hidden)
    gate_up = experts.gate_up_blocks, experts.gate_up_scales, experts.gate_up_bias
    down = experts.down_blocks, experts.down_scales, experts.down_bias
    inputs = [x, routing.expert_ids_TK.long(), routing.weights_TK, *gate_up, *down]
    found = run([1, num_tokens, hidden, intermediate, num_experts, per_token], inputs).view(num_tokens, hidden)
    expected = reference_moe.moe(x, routing, reference_moe.prepare_experts(CPU_TARGET, experts), 7.0)
    assert (found - expected).norm() <= INT8_ERROR * expected.norm()


@pytest.mark.parametrize(("num_tokens", "vocab", "width"), [(1, 999, 200), (2, 1000, 64)])
def test_screened_tokens(run: Run, num_tokens: int, vocab: int, width: int) -> None:
    """The screen changes neither the tokens nor the last bit of their scores."""
    x, head = torch.randn(num_tokens, width), torch.randn(vocab, width).bfloat16()
    dither = (torch.randint(1 << 16, (-(-width // 32) * 32,)) + 0.5) / (1 << 16)
    for temperature in (0.0, 1.0):
        heat, seeds = torch.full((num_tokens,), temperature), torch.arange(num_tokens)
        found = run([2, num_tokens, vocab, width], [x, head, dither, heat, seeds, seeds]).view(2, 2, num_tokens)
        assert torch.equal(found[0], found[1])
        logits = x @ head.float().T
        chosen = logits.gather(1, found[0, 1].long()[:, None])[:, 0]
        assert temperature or (logits.amax(1) - chosen < 0.05 * logits.norm(dim=1) / vocab**0.5).all()


WRITTEN = {name: kinds for name, kinds in (OF_STEPS | OTHERS).items() if name != "oscine_run"}  # which is generated


@pytest.mark.parametrize(("name", "kinds"), WRITTEN.items())
def test_python_calls_functions_by_the_types_that_c_gives_them(name: str, kinds: str) -> None:
    code = "".join(path.read_text() for path in SOURCES.glob("*.c"))
    found = re.search(rf"^(int|void|int64_t) {name}\(([^)]*)\) {{", code, re.MULTILINE)
    assert found
    given = found[2].split(",")
    assert ["*" in one or one.split()[-2] for one in given] == [
        {"p": True, "i": "int64_t", "f": "float"}[k] for k in kinds
    ]
    assert (found[1] == "int64_t") == name.endswith("_bytes")
