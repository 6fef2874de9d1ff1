"""The published layout of a folder: its tensors, and the forms of experts that its config.json may name.

An extension knows the layouts of other tools.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from oscine.checkpoint.formats import CHECK_METHOD, WHY_NO_WEIGHTS
from oscine.model.config import ModelConfig, read_config, require
from oscine.model.tensors import TensorSpec, tensor_specs
from oscine.system.extensions import is_there, load

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FLOATS = ("BF16", "F16", "F32")  # read as BF16; as safetensors spells them
# As vLLM, ModelOpt, compressed-tensors and Quark name them.
_KV_SCALE = re.compile(
    r"model\.layers\.\d+\.self_attn\.((attn\.|[qkv]_proj\.)?(q|k|v|kv|prob)_scale|[qkv]_proj\.output_scale)"
)


def is_kv_scale(name: str) -> bool:
    """Whether a tensor is a calibrated scale of FP8 attention, which is not needed (docs/decisions/0028)."""
    return _KV_SCALE.fullmatch(name) is not None


def is_published(config: ModelConfig, held: Collection[str]) -> bool:
    """Whether all these names are of the published layout, and no blocks lack their scales."""
    specs = tensor_specs(config)
    scales = (f"{name.removesuffix('_blocks')}_scales" for name in held if name.endswith("_blocks"))
    return all(name in specs or is_kv_scale(name) for name in held) and all(name in held for name in scales)


def stored_specs(config: ModelConfig, held: Collection[str]) -> dict[str, TensorSpec]:
    """The tensors that a folder needs, by name. `held`: the names that it has. With tied embeddings, the head may be
    missing."""
    specs = tensor_specs(config)
    if config.tie_word_embeddings and HEAD not in held:
        del specs[HEAD]
    return specs


def folder_config(path: Path) -> ModelConfig:
    """Reads the config.json of a folder. Raises ValueError naming the file, and what is wrong in it or not read."""
    return read_config(path, _config)


def _config(values: dict[str, Any]) -> ModelConfig:
    _check_quantization(values)
    return ModelConfig.from_dict(values)


def _check_quantization(values: Mapping[str, Any]) -> None:
    quantization = values.get("quantization_config")
    if quantization is None:  # the experts are in floats, as transformers saves fine-tunes
        return
    require(isinstance(quantization, dict), "quantization_config", "an object with quant_method mxfp4", quantization)
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return
    if is_there(CHECK_METHOD):
        load(CHECK_METHOD)(quantization)
        return
    require(False, "quantization_config.quant_method", "'mxfp4', or no quantization_config", method)


def why_no_weights(folder: Path) -> str:
    """What a folder without safetensors has instead, for the end of an error."""
    found: str = load(WHY_NO_WEIGHTS)(folder) if is_there(WHY_NO_WEIGHTS) else ""
    return found
