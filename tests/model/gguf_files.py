"""GGUF files of gpt-oss models, written for tests with ggml's own package `gguf`.

In llama.cpp's layout, or as the first files of Ollama are.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.ops.moe.mxfp4 import dequantize

pytest.importorskip("gguf", reason="it writes GGUF files")

import gguf

Quantization = gguf.GGMLQuantizationType
Bytes = NDArray[np.uint8]
Encode = Callable[[NDArray[np.float32]], tuple[NDArray[Any], Quantization]]  # of [experts, rows, columns]
Types = Callable[[str], Quantization]  # by the stored name of a matrix that is not of experts

LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks.weight",
    "post_attention_layernorm": "post_attention_norm",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_up_proj_": "ffn_gate_up_exps.",
    "mlp.experts.down_proj_": "ffn_down_exps.",
    "model.layers": "blk",
}
OLLAMA_NAMES = LLAMA_NAMES | {
    "self_attn.o_proj": "attn_out",
    "self_attn.sinks": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
}
OLLAMA_MXFP4 = 4


def write_llama_cpp(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, Tensor],
    *,
    types: Types = lambda name: Quantization.BF16,
    tokens: list[str] | None = None,
    max_tensors: int = 0,
    experts: Encode | None = None,
    change: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Writes a model as convert_hf_to_gguf.py does. With `max_tensors` it is split into files of so many tensors.

    `experts`: what encodes them in another type than MXFP4.
    """
    writer = gguf.GGUFWriter(path, "gpt-oss", split_max_tensors=max_tensors)
    describe_for_llama_cpp(writer, config, tokens)
    change(writer)
    for name, tensor in _with_packed_experts(tensors, llama_order):
        stored = _renamed(name, LLAMA_NAMES)
        if experts is not None and name.endswith("_weight"):
            matrix = name.removesuffix("_weight")
            tensor = dequantize(*(tensors[f"{matrix}_{part}"] for part in ("blocks", "scales")))
        halves = {"gate": slice(0, None, 2), "up": slice(1, None, 2)} if "gate_up" in stored else {"": slice(None)}
        for half, rows in halves.items():
            own = stored.replace("gate_up", half) if half else stored
            if experts is not None and name.endswith("_weight"):
                raw, kind = experts(tensor[:, rows].numpy())
                writer.add_tensor(own, raw, raw_dtype=kind)
            else:
                _add(writer, own, tensor[:, rows] if half else tensor, Quantization.MXFP4, types)
    finish(writer)


def write_ollama(path: Path, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
    """Writes a model like Ollama's gpt-oss:20b of August 2025: fused tensors, MXFP4 as type 4 in safetensors' order."""
    writer = gguf.GGUFWriter(path, "gptoss")
    _describe(writer, config, None)
    for name, tensor in _with_packed_experts(_with_fused_qkv(tensors), lambda blocks: blocks):
        kind = OLLAMA_MXFP4 if name.endswith("weight") and "experts" in name else None
        _add(writer, _renamed(name, OLLAMA_NAMES), tensor, kind, lambda name: Quantization.BF16)
    finish(writer)


def describe_for_llama_cpp(writer: gguf.GGUFWriter, config: ModelConfig, tokens: list[str] | None) -> None:
    _describe(writer, config, tokens)
    writer.add_expert_feed_forward_length(config.intermediate_size)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_yarn_beta_fast(config.yarn.beta_fast)
    writer.add_rope_scaling_yarn_beta_slow(config.yarn.beta_slow)


def _describe(writer: gguf.GGUFWriter, config: ModelConfig, tokens: list[str] | None) -> None:
    assert isinstance(config.sliding_window, int)
    assert isinstance(config.num_local_experts, int)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_sliding_window(config.sliding_window)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_local_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_rope_freq_base(config.yarn.rope_theta)
    writer.add_rope_scaling_factor(config.yarn.factor)
    writer.add_rope_scaling_orig_ctx_len(config.yarn.original_max_position_embeddings)
    writer.add_token_list(tokens or [f"token {i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(config.eos_token_ids[0])


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, tensor: Tensor, packed: int | None, types: Types) -> None:
    """Vectors and the router are float32, as in all files."""
    if tensor.dtype == torch.uint8:
        blocks = tensor.flatten(-2).numpy()
        kind = Quantization.MXFP4 if packed == OLLAMA_MXFP4 else None  # the writer knows the size of this one only
        writer.add_tensor(name, blocks, raw_dtype=kind or Quantization.MXFP4)
        if packed == OLLAMA_MXFP4:
            writer.tensors[-1][name].dtype = OLLAMA_MXFP4
        return
    values = tensor.float().numpy()
    kind = types(name) if tensor.dim() == 2 and "ffn_" not in name and name.endswith("weight") else Quantization.F32
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    for published, stored in names.items():
        name = name.replace(published, stored)
    return name


def _with_packed_experts(
    tensors: Mapping[str, Tensor], order: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Blocks and scales of MXFP4 as one tensor [..., blocks, 17]."""
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            scales = tensors[name.replace("_blocks", "_scales")]
            yield name.replace("_blocks", "_weight"), torch.cat((scales.unsqueeze(-1), order(tensor)), dim=-1)
        elif not name.endswith("_scales"):
            yield name, tensor


def _with_fused_qkv(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    made = dict(tensors)
    for name in tensors:
        if ".q_proj." in name:
            parts = [made.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
            made[name.replace("q_proj", "qkv")] = torch.cat(parts)
    return made


def llama_order(blocks: Tensor) -> Tensor:
    """Nibble i of a published block goes to byte i % 16, its high half for i of 16 and more."""
    nibbles = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return nibbles[..., :16] | (nibbles[..., 16:] << 4)
