"""How a folder stores the published tensors where it does not store them as published.

transformers saves a fine-tune with the experts in floats, [experts, in, out], where the published blocks are of
[experts, out, in]. A model that it dequantised when it loaded it keeps the names that end in _blocks, without scales.
With tied embeddings there is no head.
"""

import re
from collections.abc import Collection

from oscine.model.config import ModelConfig
from oscine.model.tensors import TensorSpec, tensor_specs
from oscine.ops.moe.mxfp4 import BLOCK

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = ("BF16", "F16", "F32")  # read as BF16; as safetensors spells them
# As vLLM, ModelOpt, compressed-tensors and Quark name them.
_KV_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\.((attn\.|[qkv]_proj\.)?(q|k|v|kv|prob)_scale|[qkv]_proj\.output_scale)"
)
_BLOCKS, _SCALES = "_blocks", "_scales"


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a calibrated scale of FP8 attention, which is not needed (docs/decisions/0028)."""
    return _KV_SCALE.fullmatch(name) is not None


def matrix_of(name: str, held: Collection[str]) -> str | None:
    """The stored matrix in floats that published blocks or scales are made from; None if there is none."""
    if not name.endswith((_BLOCKS, _SCALES)):
        return None
    matrix = name.rpartition("_")[0]
    if matrix in held:
        return matrix
    return matrix + _BLOCKS if matrix + _BLOCKS in held and matrix + _SCALES not in held else None


def stored_specs(config: ModelConfig, held: Collection[str]) -> dict[str, TensorSpec]:
    """The tensors that a folder needs, by name. `held`: the names that it has."""
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensor_specs(config).items():
        if (matrix := matrix_of(name, held)) is not None:
            if name.endswith(_BLOCKS):
                experts, rows, blocks, _ = spec.shape
                specs[matrix] = TensorSpec((experts, blocks * BLOCK, rows), "BF16")
        elif name != HEAD or name in held or not config.tie_word_embeddings:
            specs[name] = spec
    return specs
