"""The layouts of checkpoints in safetensors that tools write: how their names map to one form, and what is refused.

In the common form a name is MODULE.PART. A module is a matrix with its bias:

    model.layers.0.self_attn.q_proj
    model.layers.0.mlp.experts.gate_up_proj      all experts, the rows of gate and up interleaved
    model.layers.0.mlp.experts.gate_proj         all experts, gate alone
    model.layers.0.mlp.experts.3.gate_up_proj    one expert
    model.layers.0.mlp.experts.3.gate_proj       one expert, gate alone

The part says how values are stored: encodings.py. `in_out` is a weight whose last two dimensions are swapped.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oscine.system.model_files import shown


class Layout(NamedTuple):
    """How a tool names tensors. All that match are renamed, in the order of the table."""

    tool: str
    pattern: re.Pattern[str]
    common: str  # the replacement


def _layout(tool: str, pattern: str, common: str) -> Layout:
    return Layout(tool, re.compile(pattern), common)


LAYOUTS = (
    _layout("torch.compile", r"_orig_mod\.", ""),
    _layout("FSDP and activation checkpointing of torch", r"_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.", ""),
    _layout("DistributedDataParallel, DeepSpeed", r"^module\.", ""),
    _layout("PEFT, merged but not unloaded", r"^base_model\.model\.", ""),
    _layout("PEFT, merged but not unloaded", r"\.base_layer\.", "."),
    _layout("the model without its head", r"^(layers|embed_tokens|norm)\.", r"model.\1."),
    _layout("Unsloth", r"\.router\.linear\.", ".router."),
    _layout("Unsloth", r"\.experts\.(gate_up|down)_projs\.(\d+)\.", r".experts.\2.\1_proj."),
    _layout("llm-compressor", r"\.experts\.experts\.", ".experts."),
    _layout("transformers", r"\.experts\.(gate_up|down)_proj$", r".experts.\1_proj.in_out"),
    _layout(
        "transformers, ModelOpt",
        r"\.experts\.(gate_up|down)_proj_(bias|blocks|scales|(?:weight|input)_scale(?:_2|_inv)?|scale_inv)$",
        r".experts.\1_proj.\2",
    ),
)
# Parts that change nothing here: scales of activations, and what the values show already.
NEEDLESS = re.compile(
    r"input_scale|input_global_scale|input_zero_point|output_scale|weight_shape|weight_format|activation_scale"
)
NEEDLESS_MODULES = re.compile(r"v_head(\..+)?")  # of trl's models for PPO: a value, not a token


class Refused(NamedTuple):
    """A layout that is known and not read: by whom, and which tool and command converts it."""

    tool: str
    remedy: str


_TRANSFORMERS = (
    """`python -c "from transformers import AutoModelForCausalLM as M; """
    """M.from_pretrained('IN').dequantize().save_pretrained('OUT')"`"""
)
_GPTQMODEL = (
    """`python -c "from gptqmodel.utils.model_dequant import dequantize_model as d; d('IN', 'OUT')"` of GPTQModel"""
)
_BASE = "save the model again from its 16-bit form, before this quantisation"
# By quant_method of config.json.
METHODS = ("bitsandbytes", "compressed-tensors", "modelopt", "quark", "fp8", "fbgemm_fp8", "nvfp4", "mxfp8")
REFUSED_METHODS = {
    "gptq": Refused("GPTQModel", _GPTQMODEL),
    "awq": Refused("AWQ", _GPTQMODEL),
    "higgs": Refused("HIGGS", f"{_TRANSFORMERS} of transformers"),
    **{name: Refused(name, _BASE) for name in ("torchao", "hqq", "aqlm", "eetq", "quanto", "vptq", "spqr")},
    **{name: Refused(name, _BASE) for name in ("auto-round", "fp_quant", "bitnet", "metal", "sinq", "fouroversix")},
}
# By the name of a tensor.
REFUSED_NAMES = {
    re.compile(r".*\.lora_[AB]\..+"): Refused(
        "PEFT, with an adapter beside the weights", "`model.merge_and_unload().save_pretrained('OUT')` of PEFT"
    ),
    re.compile(r"block\.\d+\.(attn|mlp)\..+"): Refused(
        "OpenAI's reference code (original/)", "serve the files in the root of the same repository"
    ),
    re.compile(r".*\.(qweight|qzeros|g_idx)"): REFUSED_METHODS["gptq"],
    re.compile(r".*\.weight_zero_point"): Refused(
        "llm-compressor, with zero points",
        """`python -c "from transformers import AutoModelForCausalLM as M, CompressedTensorsConfig as C; """
        """M.from_pretrained('IN', quantization_config=C(run_compressed=False)).save_pretrained('OUT')"`""",
    ),
    re.compile(r"(score|classifier)\..+"): Refused("transformers, as a classifier", "it generates no tokens"),
}
# By a file of a folder that has no safetensors.
REFUSED_FILES = {
    "*.distcp": Refused("FSDP, in shards", "`accelerate merge-weights IN OUT` of accelerate"),
    "pytorch_model_fsdp_*": Refused("FSDP, in shards", "`accelerate merge-weights IN/pytorch_model_fsdp_0 OUT`"),
    "zero_to_fp32.py": Refused("DeepSpeed", "`python IN/zero_to_fp32.py IN OUT --safe_serialization`"),
    "pytorch_model*.bin": Refused(
        "torch, as pickles",
        """`python -c "from transformers import AutoModelForCausalLM as M; """
        """M.from_pretrained('IN').save_pretrained('OUT')"`""",
    ),
    "weights*.npz": Refused("an early mlx-lm", "`mlx_lm.convert --hf-path NAME --mlx-path OUT` of today's mlx-lm"),
}


def refusal(what: str, refused: Refused) -> ValueError:
    return ValueError(f"{what}: written by {refused.tool}, which is not read; to convert: {refused.remedy}")


def common_name(name: str) -> str:
    for layout in LAYOUTS:
        name = layout.pattern.sub(layout.common, name)
    return name


def tools_of(name: str) -> str:
    """Who names a tensor like this; for errors about two layouts at once."""
    tools = dict.fromkeys(layout.tool for layout in LAYOUTS if layout.pattern.search(name))
    return ", ".join(tools) or "another tool"


def check_method(quantization: Mapping[str, Any]) -> None:
    """The quantization_config of a config.json. Tensors say the rest. Raises ValueError for one that is not read."""
    method = quantization.get("quant_method")
    if method is None and "bits" in quantization:  # of mlx-lm
        return
    field = "quantization_config.quant_method"
    if method in REFUSED_METHODS:
        raise refusal(f"{field} {method!r}", REFUSED_METHODS[method])
    if method not in METHODS:
        known = ", ".join(repr(name) for name in ("mxfp4", *METHODS))
        raise ValueError(f"{field} must be one of {known}, not {shown(repr(method))}")


def check_names(path: Path, name: str) -> None:
    for pattern, refused in REFUSED_NAMES.items():
        if pattern.fullmatch(name):
            raise refusal(f"{path}: {shown(name)}", refused)


def why_no_weights(folder: Path) -> str:
    """What a folder without safetensors has instead, for the end of an error."""
    for pattern, refused in REFUSED_FILES.items():
        if next(folder.glob(pattern), None) is not None:
            return f", but {pattern}: written by {refused.tool}, which is not read; to convert: {refused.remedy}"
    return ""
