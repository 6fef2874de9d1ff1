"""Bytes of weights on a device, by the form that its ops want."""

from collections.abc import Mapping
from math import prod

import torch

from oscine.model.tensors import TensorSpec

_DENSE = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "lm_head.weight")


def torch_bytes(specs: Mapping[str, TensorSpec], dtype: torch.dtype) -> dict[str, int]:
    """Bytes by tensor name: MXFP4 stays packed, everything else is cast to dtype."""
    return {
        name: spec.num_bytes if spec.dtype == "U8" else prod(spec.shape) * dtype.itemsize
        for name, spec in specs.items()
    }


def native_bytes(specs: Mapping[str, TensorSpec], cpu_weights: str) -> dict[str, int]:
    """Bytes by tensor name for the C kernels: dense matrices in one of three types, the embedding in bfloat16."""
    of_dense = {"float32": 4.0, "bf16": 2.0, "int8": 1 + 2 / 32}

    def bytes_per_value(name: str, spec: TensorSpec) -> float:
        if spec.dtype == "U8":
            return 1
        if "embed_tokens" in name:
            return 2
        return of_dense[cpu_weights] if name.endswith(_DENSE) else 4

    return {name: int(prod(spec.shape) * bytes_per_value(name, spec)) for name, spec in specs.items()}
