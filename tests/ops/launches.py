"""The kernel launches of gpt-oss-120b and -20b on a chip that is not present, for compilation ahead of time.

    for launch in launches(CHIPS[120]):
        compiled = launch.compile(120)

The launch policies are the ops' own. They run on tensors of the meta device, which have shapes and no memory. Each
launch is recorded instead of being compiled and run.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from benchmarks.kernels.inputs import sampling_batch
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.gpt_oss import GptOss
from oscine.model.tensors import tensor_specs
from oscine.model.weights import load_weights
from oscine.ops.interface import Batch, PageGroup
from oscine.ops.packed import BatchState, PackedSizes, PackedStep
from oscine.ops.platforms.table import choose, platform_of, resolve
from oscine.ops.target import Target
from tests.ops.compile_ahead import AmdCompiled, Compiled, compile_for_amd, compile_source

META = torch.device("meta")
CONFIGS = gpt_oss_120b(), gpt_oss_20b()
DECODES = (1, 16, 64, 129, 1024)
CHUNKS = (2, 17, 129, 513, 1025, 4096, 16384)  # one on each side of what the policies tell apart
ROWS = (1, 5, 1024)  # that are sampled
ADDED_UP = ("BLOCK_S", "BLOCK_C")


@dataclass(frozen=True)
class Launch:
    kernel: Any
    signature: dict[str, str]
    constants: dict[Any, Any]  # by (index,)
    attributes: dict[Any, Any]
    options: Any

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__name__)

    @property
    def kind(self) -> tuple[Any, ...]:
        """Kernel, warps, stages, registers, and the inputs that are missing."""
        missing = tuple(name for name, value in self._named if value is None)
        registers = getattr(self.options, "maxnreg", None)  # AMD's backend has no such option
        return self.name, self.options.num_warps, self.options.num_stages, registers, missing

    def needs_no_less_than(self, other: "Launch") -> bool:
        """Whether `self` needs at least the registers and shared memory of `other`, judged by the sizes of blocks."""
        return self.kind == other.kind and all(size >= other.blocks[name] for name, size in self.blocks.items())

    @property
    def blocks(self) -> dict[str, int]:
        sized = ("BLOCK", "TOKENS", "WINDOW", "STAGES", "NOISE")
        return {name: value for name, value in self._named if name.startswith(sized) and name not in ADDED_UP}

    @property
    def message(self) -> tuple[Any, ...]:
        """The part of a launch that decides how it exchanges with other ranks."""
        signature, named = self.signature, dict(self._named)
        return signature.get("x"), signature.get("addresses"), named.get("J"), named.get("TWO_SHOT")

    @property
    def _named(self) -> list[tuple[str, Any]]:
        return [(self.kernel.arg_names[index], value) for (index,), value in sorted(self.constants.items())]

    def compile(self, arch: int) -> Compiled:
        return compile_source(self._source, arch, self.options.__dict__)

    def compile_for_amd(self, architecture: str) -> AmdCompiled:
        return compile_for_amd(self._source, architecture, self.options.__dict__)

    @property
    def _source(self) -> Any:
        return self.kernel.ASTSource(self.kernel, self.signature, self.constants, self.attributes)


def launches(target: Target) -> list[Launch]:
    """The launches with the largest needs: each of the others needs no more than one of them."""
    with noted(target) as found, torch.inference_mode():
        for config in CONFIGS:
            _run_steps(target, config)
    most: list[Launch] = []
    for launch in found:
        if not any(other.needs_no_less_than(launch) for other in most):
            most = [launch, *(other for other in most if not launch.needs_no_less_than(other))]
    return sorted(most, key=lambda launch: (launch.name, str(launch.kind)))


@contextmanager
def noted(target: Target) -> Iterator[list[Launch]]:
    """Launches while it is open."""
    found: list[Launch] = []
    major, minor = target.capability
    arch = target.architecture or 10 * major + minor
    chip = GPUTarget("hip", arch, 64) if target.architecture else GPUTarget("cuda", arch, 32)
    gpu = SimpleNamespace(
        get_current_target=lambda: chip,
        get_current_device=lambda: arch,  # kernels keep what they know of each device apart
        get_current_stream=lambda device: 0,
    )

    def note(
        kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, warmup: bool
    ) -> None:
        found.append(Launch(kernel, signature, constants, attributes, options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", gpu)
        patch.setattr(JITFunction, "_do_compile", note)  # what gives no kernel is not launched
        yield found


class _Shapes:
    """A TensorSource."""

    def __init__(self, config: ModelConfig) -> None:
        self._specs = tensor_specs(config)

    def get(self, name: str) -> Tensor:
        spec = self._specs[name]
        return _empty(*spec.shape, dtype=torch.uint8 if spec.dtype == "U8" else torch.bfloat16)


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _run_steps(target: Target, config: ModelConfig) -> None:
    """Every op except for those that call cuBLAS."""
    platform = platform_of(replace(target, device=torch.device("cuda")))
    # 10.x has prefill attention of its own, and the portable one for keys in FP8
    ops = resolve(target, choose(platform.name, {"attention": "triton"}))
    layers = replace(config.of_layers((0, 1)), max_position_embeddings=64)  # one of each window
    model = GptOss(layers, load_weights(layers, _Shapes(layers), META, torch.bfloat16), ops)
    kv = tuple(_empty(1000, 1, 2, 8, 64, 64) for _ in range(2))
    for count in DECODES:
        model.hidden(_batch(count, count, count), kv)
    for count in CHUNKS:
        model.hidden(_batch(count, 1, 0), kv)
    shapes = (2, 9, 2048), (10,), (10,), (10, 4)
    state = BatchState(*(_empty(*shape, dtype=torch.int32) for shape in shapes), page_size=64)
    packed = PackedStep.of(_empty(PackedSizes(3, 3, 3, 3).total, dtype=torch.int32), PackedSizes(3, 3, 3, 3))
    ops.prepare_step(packed, state)
    ops.accept(packed, _batch(3, 3, 3), state, _empty(3, dtype=torch.int64))
    for rows in ROWS:
        logits_NV = _empty(rows, config.vocab_size, dtype=torch.float32)
        for wishes in ({"greedy": True}, {}, {"truncated": True}):
            ops.sample(logits_NV, sampling_batch(rows, META, **wishes))
    ruled = {"allowed_KW": _empty(rows, 6284, dtype=torch.int32), "allowed_row_N": _empty(rows, dtype=torch.int32)}
    ops.sample(logits_NV, sampling_batch(rows, META, greedy=True, **ruled))


def _batch(tokens: int, sequences: int, decodes: int) -> Batch:
    def group() -> PageGroup:
        return PageGroup(_empty(sequences, 2048, dtype=torch.int32), _empty(tokens, dtype=torch.int64))

    ids_T, positions_T = (_empty(tokens, dtype=torch.int64) for _ in range(2))
    starts_S1, lens_S = (_empty(count, dtype=torch.int32) for count in (sequences + 1, sequences))
    return Batch(ids_T, positions_T, starts_S1, lens_S, (group(), group()), None, decodes)
