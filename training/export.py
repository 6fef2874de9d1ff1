"""Writes and reads the published checkpoint format: MXFP4 experts as blocks and scales, everything else bfloat16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from oscine.chat.tokenizer import Tokenizer
from training.model import GptOss, Size
from training.quantize import dequantize, fake_quantize, quantize

_EXPERTS = ("gate_up_proj", "down_proj")


def export(model: GptOss, folder: Path, tokenizer: Tokenizer) -> None:
    """Writes config.json, generation_config.json and model.safetensors; the tokenizer's files are there already."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(published_tensors(model), folder / "model.safetensors", metadata={"format": "pt"})
    ends = [tokenizer.return_, tokenizer.endoftext, tokenizer.call]
    (folder / "config.json").write_text(json.dumps(published_config(model.size, tokenizer), indent=2) + "\n")
    generation = {
        "bos_token_id": tokenizer.vocab_size - 9,
        "do_sample": True,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.endoftext,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def published_tensors(model: GptOss) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.state_dict().items():
        if name.endswith(_EXPERTS):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = quantize(parameter.cpu())
        else:
            tensors[name] = parameter.cpu().bfloat16()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def load(folder: Path, device: str = "cpu") -> GptOss:
    """The exported model in float32, experts rounded for good, for generation."""
    tensors = load_file(folder / "model.safetensors")
    state: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            state[name.removesuffix("_blocks")] = dequantize(tensor, tensors[name.replace("_blocks", "_scales")])
        elif not name.endswith("_scales"):
            state[name] = tensor.float()
    model = GptOss(size_of(json.loads((folder / "config.json").read_text())))
    model.load_state_dict(state)
    return rounded(model.to(device))


@torch.no_grad()
def rounded(model: GptOss) -> GptOss:
    """Rounds the experts in place, so that no forward pass has to, and everything else to bfloat16."""
    for name, parameter in model.named_parameters():
        parameter.copy_(fake_quantize(parameter) if name.endswith(_EXPERTS) else parameter.bfloat16())
    for module in model.modules():
        _mark(module)
    return model.requires_grad_(False)


def _mark(module: nn.Module) -> None:
    if hasattr(module, "rounded"):
        module.rounded = True


def size_of(config: dict[str, Any]) -> Size:
    return Size(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        experts=config["num_local_experts"],
        active_experts=config["num_experts_per_tok"],
        window=config["sliding_window"],
    )


def published_config(size: Size, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "attention_dropout": 0.0,
        "eos_token_id": tokenizer.return_,
        "experts_per_token": size.active_experts,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initial_context_length": 4096,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate,
        "layer_types": [
            "sliding_attention" if size.is_sliding(layer) else "full_attention" for layer in range(size.layers)
        ],
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": size.heads,
        "num_experts_per_tok": size.active_experts,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "num_local_experts": size.experts,
        "output_router_logits": False,
        "pad_token_id": tokenizer.endoftext,
        "quantization_config": {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": size.window,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
        "use_cache": True,
        "vocab_size": size.vocab_size,
    }
