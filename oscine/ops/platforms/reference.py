"""Plain torch, on a CPU and, in float32, on a GPU."""

import torch

from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target


def _matches(target: Target, dtype: torch.dtype) -> bool:
    return target.device.type == "cpu" or (target.device.type == "cuda" and dtype == torch.float32)


PLATFORM = Platform("cpu", _matches, {"*": "reference"})
