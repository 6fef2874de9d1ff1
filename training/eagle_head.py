"""An EAGLE-3 head in trainable form: one llama layer over the target's residual streams and the next token.

Parameters are named as in published heads. In training the head runs for K drafts at once from every position p. Draft
s reads the token at p + s and a feature: the target's streams at p for the first draft, the head's own hidden state for
the later ones. Everything is indexed by p, so that all drafts share one mask over the keys of the first.

Shapes: B rows, T positions, H hidden, N query heads, G KV heads, D head_dim, A tapped streams, V vocabulary.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import silu

from training.model import BETA_FAST, BETA_SLOW, ROPE_FACTOR, ROPE_ORIGINAL, ROPE_THETA, RMSNorm, rope, rotate


@dataclass(frozen=True)
class HeadSize:
    """The variable sizes of a head; the defaults are oscine-nano's."""

    vocab_size: int = 1920
    hidden: int = 256
    intermediate: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    aux_layers: tuple[int, ...] = (
        1,
        4,
        6,
    )  # streams before these layers of the target; its number of layers is the last


class Attend(Protocol):
    """Causal attention within documents, without sinks: queries, keys, values -> outputs and the logarithm of the
    denominator [B, N, T]."""

    def __call__(self, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor) -> tuple[Tensor, Tensor]: ...


class _Attention(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(2 * size.hidden, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * size.hidden, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden, bias=False)

    def forward(self, x: Tensor, positions_BT: Tensor, attend: Attend, earlier: list[tuple[Tensor, Tensor]]) -> Tensor:
        """`earlier`: keys and values of the drafts before this one; its own are appended."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = rope(positions_BT, self.size.head_dim)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        earlier.append((k, v))
        out, lse = attend(q, *earlier[0])
        out = _with_own(q, out, lse, earlier[1:])
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _with_own(q_BNTD: Tensor, out: Tensor, lse_BNT: Tensor, own: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Adds the keys of the drafts that began at the query's own position."""
    if not own:
        return out
    repeats = q_BNTD.shape[1] // own[0][0].shape[1]
    keys, values = (torch.stack([pair[i] for pair in own], -2).repeat_interleave(repeats, 1) for i in (0, 1))
    scores = (q_BNTD[..., None, :].float() * keys.float()).sum(-1) * q_BNTD.shape[-1] ** -0.5
    weights = torch.cat((lse_BNT[..., None].float(), scores), -1).softmax(-1).to(out.dtype)
    return out * weights[..., :1] + (weights[..., 1:, None] * values).sum(-2)


class _MLP(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class _Layer(nn.Module):
    def __init__(self, size: HeadSize) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size.hidden)  # of the token's embedding
        self.hidden_norm = RMSNorm(size.hidden)  # of the feature
        self.self_attn = _Attention(size)
        self.post_attention_layernorm = RMSNorm(size.hidden)
        self.mlp = _MLP(size)


class Head(nn.Module):
    def __init__(self, size: HeadSize, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.input_norm = RMSNorm(len(size.aux_layers) * size.hidden)
        self.fc = nn.Linear(len(size.aux_layers) * size.hidden, size.hidden, bias=False)
        self.midlayer = _Layer(size)
        self.norm = RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0, 0.5 * parameter.shape[-1] ** -0.5, generator=generator)
        for last in (self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            nn.init.zeros_(last.weight)

    @torch.no_grad()
    def begin_at(self, lm_head: Tensor, streams: list[Tensor]) -> None:
        """Starts from the target's output matrix with small logits, and scales the tapped streams alike."""
        self.lm_head.weight.copy_(lm_head)
        self.norm.weight.fill_(0.3)
        tapped = torch.stack([streams[tap].float().square().mean().sqrt() for tap in self.size.aux_layers])
        scales = tapped.square().mean().sqrt() / tapped
        self.input_norm.weight.copy_(scales.repeat_interleave(self.size.hidden))

    def features(self, streams: list[Tensor]) -> Tensor:
        features: Tensor = self.fc(self.input_norm(torch.cat([streams[tap] for tap in self.size.aux_layers], -1)))
        return features

    def draft(
        self,
        features_BTH: Tensor,
        embedded_BTH: Tensor,
        positions_BT: Tensor,
        attend: Attend,
        earlier: list[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """The hidden states after one draft: the features of the next one."""
        layer = self.midlayer
        x = torch.cat((layer.input_layernorm(embedded_BTH), layer.hidden_norm(features_BTH)), -1)
        x_BTH = features_BTH + layer.self_attn(x, positions_BT, attend, earlier)
        drafted: Tensor = x_BTH + layer.mlp(layer.post_attention_layernorm(x_BTH))
        return drafted

    def logits(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(self.norm(hidden))
        return logits


def export_head(head: Head, folder: Path) -> None:
    """Writes config.json and model.safetensors in the format of nvidia's heads, with an lm_head of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().bfloat16().contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(published_config(head.size), indent=2) + "\n")


def load_head(folder: Path) -> Head:
    config = json.loads((folder / "config.json").read_text())
    size = HeadSize(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        intermediate=config["intermediate_size"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        aux_layers=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
    )
    head = Head(size)
    head.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return head


def published_config(size: HeadSize) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "draft_vocab_size": size.vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(size.aux_layers),
            "use_aux_hidden_state": True,
            "use_input_layernorm_in_first_layer": True,
            "use_last_layernorm": True,
            "norm_before_fc": True,
        },
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": size.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": BETA_FAST,
            "beta_slow": BETA_SLOW,
            "factor": ROPE_FACTOR,
            "original_max_position_embeddings": ROPE_ORIGINAL,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": ROPE_THETA,
        "target_layer_count": size.aux_layers[-1],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": size.vocab_size,
    }
