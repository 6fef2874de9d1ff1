"""Random tensors in the published names, shapes and dtypes: to run true shapes without a checkpoint.

Each tensor depends only on seed, name, shape and kind of device. It is made when asked for, so no tensor is held twice.
"""

import zlib

import torch
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.tensors import tensor_specs

MATRIX_STD = 0.02
VECTOR_STD = 0.1  # biases and sinks: large enough that a wrong one shows
SCALES = (118, 122)  # E8M0 exponents, [low, high): expert values of about 0.003 to 0.2


class RandomTensors:
    """Norm weights 1, matrices N(0, 0.02), vectors N(0, 0.1), MXFP4 nibbles uniform, scales 118 to 121."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device) -> None:
        self._specs = tensor_specs(config)
        self._seed = seed
        self._device = device

    def get(self, name: str) -> Tensor:
        spec = self._specs[name]
        generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{self._seed} {name}".encode()))
        if spec.dtype == "U8":
            out = torch.empty(spec.shape, dtype=torch.uint8, device=self._device)
            if name.endswith("_scales"):
                return out.random_(*SCALES, generator=generator)
            out.view(torch.int64).random_(-(1 << 63), None, generator=generator)  # eight bytes per draw
            return out
        out = torch.empty(spec.shape, dtype=torch.bfloat16, device=self._device)
        if "norm" in name:
            return out.fill_(1.0)
        std = MATRIX_STD if name.endswith("weight") else VECTOR_STD
        return out.normal_(0.0, std, generator=generator)
