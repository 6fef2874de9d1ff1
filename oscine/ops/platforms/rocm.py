"""An AMD GPU of CDNA 3 or 4 (gfx942, gfx950), for bfloat16: the portable kernels in Triton. Compiled, and never run."""

import torch

from oscine.kv_dtype import KVDtype
from oscine.ops.platforms.interface import Platform, needs_hopper_or_blackwell
from oscine.ops.target import Target

ARCHITECTURES = ("gfx942", "gfx950")  # that the kernels are compiled for in tests


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cuda" and dtype != torch.float32 and target.architecture in ARCHITECTURES


def _lacking_for_keys(_: Target, dtype: KVDtype) -> str | None:
    return None if dtype is not KVDtype.FP8 else "an NVIDIA GPU, as FP8 was not compiled for AMD"


PLATFORM = Platform(
    "rocm",
    _matches,
    {"*": "triton", "chooser": "reference", "choose_few": "reference"},
    lacking_for_keys=_lacking_for_keys,
    lacking_for_fp8_experts=needs_hopper_or_blackwell,
    uses_triton=True,
)
