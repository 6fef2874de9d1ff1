"""Compute capability 10.x (B200, B300), for bfloat16: portable kernels; in Gluon, prefill attention and the experts
with FP8 activations.

Compiled and interpreted, but never run. For 12.x, blackwell_rtx.py has only experts.
"""

from importlib import import_module

import torch

from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target
from oscine.ops.triton_range import lacking_for_blackwell


def _lacking_for_fp8_experts(columns: int) -> str | None:
    if columns % 32:
        return f"a hidden size in multiples of 32, not {columns}"
    return lacking_for_blackwell()


def platform(name: str, *capabilities: tuple[int, int], attention: str = "triton") -> Platform:
    """The experts are in oscine.ops.moe.<name>. attention: its backend."""

    def matches(target: Target, dtype: torch.dtype) -> bool:
        return target.device.type == "cuda" and dtype != torch.float32 and target.capability in capabilities

    def tries_attention() -> bool:
        return attention == name and lacking_for_blackwell() is None

    def trial(target: Target) -> str | None:
        wrong: str | None = None
        if tries_attention():
            wrong = import_module(f"oscine.ops.attention.{name}").trial(target)
        if wrong is None and target.activation_dtype == "fp8":
            wrong = import_module(f"oscine.ops.moe.{name}").trial(target)
        return wrong

    return Platform(
        name,
        matches,
        {"*": "triton", "attention": attention, "moe": name, "chooser": "reference", "choose_few": "reference"},
        lacking_for_fp8_experts=_lacking_for_fp8_experts,
        uses_triton=True,
        trial=trial,
        needs_trial=lambda target: tries_attention() or target.activation_dtype == "fp8",
    )


PLATFORM = platform("blackwell", (10, 0), (10, 3), attention="blackwell")
