"""Any NVIDIA GPU, for bfloat16: portable kernels in Triton."""

import torch

from oscine.kv_dtype import KVDtype
from oscine.ops.platforms.interface import Platform, needs_hopper_or_blackwell
from oscine.ops.target import Target

_FP8_CAPABILITY = (8, 9)  # of the first GPUs that convert e4m3 to other types


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cuda" and dtype != torch.float32 and not target.architecture


def _lacking_for_keys(target: Target, dtype: KVDtype) -> str | None:
    if dtype is not KVDtype.FP8 or target.capability >= _FP8_CAPABILITY:
        return None
    least, ours = (".".join(map(str, capability)) for capability in (_FP8_CAPABILITY, target.capability))
    return f"a GPU of compute capability {least}, not {ours}"


PLATFORM = Platform(
    "cuda",
    _matches,
    {"*": "triton", "chooser": "reference", "choose_few": "reference"},
    lacking_for_keys=_lacking_for_keys,
    lacking_for_fp8_experts=needs_hopper_or_blackwell,
    uses_triton=True,
)
