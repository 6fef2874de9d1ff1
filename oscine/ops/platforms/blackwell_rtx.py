"""Compute capability 12.x (RTX 5090, DGX Spark), for bfloat16: portable kernels, and experts for FP8 activations.

Compiled and interpreted, and never run.
"""

import torch

from oscine.ops.platforms.interface import Platform, fp8_experts_lack
from oscine.ops.target import Target

CAPABILITIES = ((12, 0), (12, 1))
OLDEST_TRITON = (3, 9)  # that multiplies e4m3 with block scales on these chips, and not in bfloat16


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cuda" and dtype != torch.float32 and target.capability in CAPABILITIES


def _lacking_for_fp8_experts(columns: int) -> str | None:
    return fp8_experts_lack(columns, OLDEST_TRITON)


def _trial(target: Target) -> str | None:
    if target.activation_dtype != "fp8":
        return None
    from oscine.ops.moe import blackwell_rtx

    return blackwell_rtx.trial(target)


PLATFORM = Platform(
    "blackwell_rtx",
    _matches,
    {"*": "triton", "moe": "blackwell_rtx", "chooser": "reference", "choose_few": "reference"},
    lacking_for_fp8_experts=_lacking_for_fp8_experts,
    uses_triton=True,
    trial=_trial,
)
