"""gpt-oss in trainable form: float32 master weights, experts rounded to MXFP4 in every forward pass.

Parameters are named as in the published checkpoint. All experts are computed for every token, and the four of the
router are kept: at this size that is faster than any dispatch.

Shapes: B rows, T positions of a row, H hidden, E experts, I intermediate, N query heads, G KV heads, D head_dim,
V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from training.quantize import fake_quantize


@dataclass(frozen=True)
class Size:
    """The variable sizes of the architecture; the defaults are oscine-nano."""

    vocab_size: int = 1920
    hidden: int = 256
    intermediate: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 8
    active_experts: int = 4
    window: int = 128

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


EPS = 1e-5
SWIGLU_LIMIT = 7.0
ROPE_THETA = 150000.0
ROPE_FACTOR, ROPE_ORIGINAL, BETA_FAST, BETA_SLOW = 32.0, 4096, 32.0, 1.0


class Attend(Protocol):
    """Attention of one layer over a batch; it has the masks and caches of the batch."""

    def __call__(self, layer: int, q_BNTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, sinks_N: Tensor) -> Tensor: ...


def rope(positions_BT: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """YaRN cosines and sines, float32 [B, 1, T, D/2]."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BT.device)
    frequency = 1.0 / ROPE_THETA ** (half / head_dim)

    def bound(rotations: float) -> float:
        return head_dim * math.log(ROPE_ORIGINAL / (rotations * 2 * math.pi)) / (2 * math.log(ROPE_THETA))

    low, high = bound(BETA_FAST), bound(BETA_SLOW)
    ramp = ((half / 2 - low) / (high - low)).clamp(0, 1)
    frequency = frequency / ROPE_FACTOR * ramp + frequency * (1 - ramp)
    angle = positions_BT[:, None, :, None].float() * frequency
    scale = 0.1 * math.log(ROPE_FACTOR) + 1
    return angle.cos() * scale, angle.sin() * scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.q_proj = nn.Linear(size.hidden, size.heads * size.head_dim)
        self.k_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim)
        self.v_proj = nn.Linear(size.hidden, size.kv_heads * size.head_dim)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.hidden)
        self.sinks = nn.Parameter(torch.zeros(size.heads))

    def forward(self, x_BTH: Tensor, layer: int, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = (
            project(x_BTH).unflatten(-1, (-1, self.size.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out_BNTD = attend(layer, rotate(q, cos, sin), rotate(k, cos, sin), v, self.sinks)
        return self.o_proj(out_BNTD.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        E, H, I = size.experts, size.hidden, size.intermediate  # noqa: E741
        self.rounded = False  # whether the parameters are MXFP4 values already
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * I, H))  # even rows gate, odd rows up
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(E, 2 * I))
        self.down_proj = nn.Parameter(torch.empty(E, H, I))
        self.down_proj_bias = nn.Parameter(torch.zeros(E, H))

    def forward(self, x_TH: Tensor, weights_TE: Tensor) -> Tensor:
        """The sum of all experts' outputs, weighted; a weight of zero switches an expert off."""
        E, H, I = self.down_proj.shape  # noqa: E741
        gate_up = self._mxfp4(self.gate_up_proj).view(E, I, 2, H)
        bias = self.gate_up_proj_bias.view(E, I, 2)
        gate = linear(x_TH, gate_up[:, :, 0].reshape(E * I, H), bias[:, :, 0].reshape(-1)).float()
        up = linear(x_TH, gate_up[:, :, 1].reshape(E * I, H), bias[:, :, 1].reshape(-1)).float()
        gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        hidden = (hidden.unflatten(-1, (E, I)) * weights_TE[..., None]).flatten(-2)
        down = self._mxfp4(self.down_proj).transpose(0, 1).reshape(H, E * I)
        return linear(hidden, down) + weights_TE @ self.down_proj_bias

    def _mxfp4(self, weight: Tensor) -> Tensor:
        return weight if self.rounded else fake_quantize(weight)


class MLP(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.active_experts = size.active_experts
        self.router = nn.Linear(size.hidden, size.experts)
        self.experts = Experts(size)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Output and the load-balancing loss: 1 when all experts are used alike."""
        with torch.autocast(x_TH.device.type, enabled=False):
            logits_TE = linear(x_TH.float(), self.router.weight, self.router.bias)
            rank = (logits_TE[..., None, :] > logits_TE[..., :, None]).sum(-1)  # fuses, unlike topk
            chosen = rank < self.active_experts
            weights_TE = logits_TE.masked_fill(~chosen, -math.inf).softmax(-1)
            load = chosen.float().flatten(0, -2).mean(0) / self.active_experts
            balance = (load * logits_TE.softmax(-1).flatten(0, -2).mean(0)).sum() * logits_TE.shape[-1]
        return self.experts(x_TH, weights_TE), balance


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(size.hidden)
        self.self_attn = Attention(size)
        self.post_attention_layernorm = RMSNorm(size.hidden)
        self.mlp = MLP(size)


class Decoder(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocab_size, size.hidden)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.hidden)


class GptOss(nn.Module):
    """Called with ids and positions [B, T], both int64; gives logits [B, T, V] and the load-balancing loss."""

    def __init__(self, size: Size, seed: int = 0) -> None:
        super().__init__()
        self.size = size
        self.model = Decoder(size)
        self.lm_head = nn.Linear(size.hidden, size.vocab_size, bias=False)
        self._initialise(torch.Generator().manual_seed(seed))

    def forward(
        self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend, streams: list[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """`streams` receives the residual stream before each layer, and after the last one: [B, T, H] each."""
        cos, sin = rope(positions_BT, self.size.head_dim)
        x_BTH = self.model.embed_tokens(ids_BT)
        balance = x_BTH.new_zeros(())
        streams = [] if streams is None else streams
        streams.append(x_BTH)
        for index, layer in enumerate(self.model.layers):
            x_BTH = x_BTH + layer.self_attn(layer.input_layernorm(x_BTH), index, cos, sin, attend)
            out, layer_balance = layer.mlp(layer.post_attention_layernorm(x_BTH))
            x_BTH, balance = x_BTH + out, balance + layer_balance / self.size.layers
            streams.append(x_BTH)
        return self.lm_head(self.model.norm(x_BTH)), balance

    @torch.no_grad()
    def _initialise(self, generator: torch.Generator) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):
                continue
            deviation = 0.5 * parameter.shape[-1] ** -0.5
            if "embed" in name:
                deviation = 0.5
            elif "o_proj" in name or "down_proj" in name or "router" in name or "lm_head" in name:
                deviation = 0.01
            parameter.normal_(0.0, deviation, generator=generator)
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                parameter.mul_(2.0)
        for name, parameter in self.named_parameters():
            if name.endswith("proj.bias"):
                parameter.zero_()
