"""Compute capability 9.0 (H100, H200), for bfloat16: kernels in Gluon where they are faster than the portable ones."""

import torch

from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target

_FP8_COLUMNS = 64  # of x that experts look up at once


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cuda" and dtype != torch.float32 and target.capability == (9, 0)


def _lacking_for_fp8_experts(columns: int) -> str | None:
    return f"a hidden size in multiples of {_FP8_COLUMNS}, not {columns}" if columns % _FP8_COLUMNS else None


PLATFORM = Platform(
    "hopper",
    _matches,
    {
        "*": "hopper",
        "embed": "triton",
        "rms_norm": "triton",
        "sample": "triton",
        "chooser": "screened",
        "choose_few": "reference",
        "prepare_step": "triton",
    },
    lacking_for_fp8_experts=_lacking_for_fp8_experts,
    uses_triton=True,
    screens_projections=True,
)
