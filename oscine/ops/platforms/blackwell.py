"""Compute capability 10.x (B200, B300), for bfloat16: portable kernels, and experts in Gluon for FP8 activations.

Compiled and interpreted, and never run. The chips of blackwell_rtx.py differ from it in their experts alone.
"""

from importlib import import_module

import torch

from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target
from oscine.ops.triton_range import installed, release_of

# Its Gluon has what the experts for 10.x are written with, and its products of e4m3 with block scales are such on 12.x.
OLDEST_TRITON = (3, 9)


def _lacking_for_fp8_experts(columns: int) -> str | None:
    if columns % 32:
        return f"a hidden size in multiples of 32, not {columns}"
    version = installed() or "none"
    if release_of(version) < OLDEST_TRITON:
        return f"Triton {'.'.join(map(str, OLDEST_TRITON))} or newer on this GPU, not {version}"
    return None


def platform(name: str, *capabilities: tuple[int, int]) -> Platform:
    """The experts are in oscine.ops.moe.<name>."""

    def matches(target: Target, dtype: torch.dtype) -> bool:
        return target.device.type == "cuda" and dtype != torch.float32 and target.capability in capabilities

    def trial(target: Target) -> str | None:
        if target.activation_dtype != "fp8":
            return None
        wrong: str | None = import_module(f"oscine.ops.moe.{name}").trial(target)
        return wrong

    return Platform(
        name,
        matches,
        {"*": "triton", "moe": name, "chooser": "reference", "choose_few": "reference"},
        lacking_for_fp8_experts=_lacking_for_fp8_experts,
        uses_triton=True,
        trial=trial,
    )


PLATFORM = platform("blackwell", (10, 0), (10, 3))
