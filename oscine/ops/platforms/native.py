"""A CPU with a C compiler: kernels in C, for float32."""

import torch

from oscine.kv_dtype import KVDtype
from oscine.ops.native.library import unavailable
from oscine.ops.platforms.interface import Platform, needs_hopper_or_blackwell
from oscine.ops.target import Target


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" and dtype == torch.float32 and unavailable() is None


def _lacking_for_keys(target: Target, dtype: KVDtype) -> str | None:
    return None if dtype is KVDtype.FLOAT32 else "a GPU, as the C kernels for CPUs have no FP8"


PLATFORM = Platform(
    "native",
    _matches,
    {"*": "native", "sample": "reference"},
    lacking_for_keys=_lacking_for_keys,
    lacking_for_fp8_experts=needs_hopper_or_blackwell,
    has_c_kernels=True,
)
