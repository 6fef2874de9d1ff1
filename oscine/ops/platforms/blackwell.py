"""Compute capability 10.x (B200, B300), for bfloat16: portable kernels, and experts in Gluon for FP8 activations.

Compiled and interpreted, and never run.
"""

import torch

from oscine.ops.platforms.interface import Platform, fp8_experts_lack
from oscine.ops.target import Target

CAPABILITIES = ((10, 0), (10, 3))
OLDEST_TRITON = (3, 9)  # whose Gluon has what the experts are written with


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cuda" and dtype != torch.float32 and target.capability in CAPABILITIES


def _lacking_for_fp8_experts(columns: int) -> str | None:
    return fp8_experts_lack(columns, OLDEST_TRITON)


def _trial(target: Target) -> str | None:
    if target.activation_dtype != "fp8":
        return None
    from oscine.ops.moe import blackwell

    return blackwell.trial(target)


PLATFORM = Platform(
    "blackwell",
    _matches,
    {"*": "triton", "moe": "blackwell", "chooser": "reference", "choose_few": "reference"},
    lacking_for_fp8_experts=_lacking_for_fp8_experts,
    uses_triton=True,
    trial=_trial,
)
