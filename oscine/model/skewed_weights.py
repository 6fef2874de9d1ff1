"""Random tensors whose activations and routing are skewed, as those of trained models are reported to be.

Each tensor is that of random_weights.py, scaled, or with a few entries replaced. A forward pass then shows:

| property | here | source |
|---|---|---|
| popularity of experts | falls with the rank: about rank^-1.1 | assumed |
| outlier channels | 4 of the residual stream, 180 to 250 times the median | assumed |
| massive activation | a fifth channel, at the first position only | Sun et al. 2024 |
| attention sink | the first position draws most attention; its value is small | Xiao et al. 2023 |
| learned sinks | in windows, 3 % to 27 % of the heads give theirs most of their attention | assumed |
| peaked logits | the most likely token mostly has more than half of the probability | assumed |

Sun et al. 2024, "Massive Activations in Large Language Models", and Xiao et al. 2023, "Efficient Streaming Language
Models with Attention Sinks", report these two. All sizes are assumed. None was compared with a trained gpt-oss.

The outliers are columns of the embedding, and the gains of norms make up for them. One head of the first layer tells
the first position from others: its query turns to earlier tokens, and where there is none its sink takes everything.
The router's bias decides how popular experts are. A row of the head is the embedding of the token before, so that token
n + 1 follows token n. The constants are sizes at the published widths, found by forward passes.
"""

import math
import zlib
from dataclasses import asdict

import torch
from torch import Tensor

from oscine.model.config import ModelConfig
from oscine.model.random_weights import MATRIX_STD, RandomTensors
from oscine.ops.rope.yarn import yarn_cos_sin

POPULARITY = 1.07  # minus the exponent of an expert's rank
MAX_POPULAR = 0.97  # share of the tokens that choose an expert, at most
# ---- the residual stream: RMS of its ordinary channels
STREAM = 4.0  # of the embedding
OF_LAYER = 0.65  # of what a layer adds
SHARED = 0.3  # of what a layer adds to all tokens alike
QUIETER = 2  # powers of two by which experts add less than with random weights
# ---- other channels
OUTLIERS, OUTLIER = 4, 250 * STREAM  # their number and value
NORMED_OUTLIER = 12.0  # after a norm, where ordinary channels are 1
MASSIVE = 126.0  # times the size of a head: the massive activation
# ---- attention logits
FIRST_KEY = 2.0  # key of the first position, in the dimensions that draw attention
FIRST_SCORES = (9.0, 17.0)  # of the first position, by head
SINKS = (2.0, 10.0)
EARLIER = 9.0  # of the token before, and minus that of a token itself, in the head that finds the first position
VALUE = 9.0  # of all tokens in this head. Errors of less than 0.3 % are rounded away from it in bfloat16, so that
# VALUE times the weight MASSIVE / VALUE takes away MASSIVE exactly
# ---- the head
ROWS = (0.7, 1.3)  # factors of its rows, as some tokens are more certain than others
ROWS_AT_ONCE = 8192  # that are moved, to bound the workspace
MARGIN = 4.0  # of the most likely token's logit over the logarithm of the vocabulary's size


def router_bias(num_experts: int, chosen: int, shared: float = 0.0) -> Tensor:
    """float32 [E], falling. If logits are this plus N(0, 1), popularity of the `chosen` largest follows the power law.

    An expert is chosen if its logit is above a threshold, so that its bias is a quantile of the normal distribution.
    `shared`: the standard deviation of what is added to the bias of each expert besides, and spreads biases as well.
    """
    law_E = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -POPULARITY
    low, high = 0.0, num_experts**POPULARITY
    for _ in range(60):  # shares, of which some are bounded, add up to `chosen`
        factor = (low + high) / 2
        low, high = (factor, high) if (factor * law_E).clamp(max=MAX_POPULAR).sum() < chosen else (low, factor)
    bias_E: Tensor = torch.special.ndtri((factor * law_E).clamp(max=MAX_POPULAR)).float()
    spread = float(bias_E.std(correction=0))
    return bias_E * (math.sqrt(spread**2 - shared**2) / spread if spread > shared else 0.0)


class SkewedTensors:
    """As RandomTensors: a tensor depends only on seed, name, shapes and kind of device."""

    def __init__(self, config: ModelConfig, seed: int, device: torch.device) -> None:
        self._random = RandomTensors(config, seed, device)
        self._config, self._seed, self._device = config, seed, device
        found = torch.randperm(config.hidden_size, generator=self._draws("channels"))[: OUTLIERS + 1]
        self.outliers, self.massive = found[:-1].to(device), int(found[-1])
        self._turns = yarn_cos_sin(2, config.head_dim, torch.device("cpu"), **asdict(config.yarn))[1]

    def get(self, name: str) -> Tensor:
        if name == "lm_head.weight":
            return self._head()
        tensor = self._random.get(name)
        room, _, own = name.removeprefix("model.").partition(".")
        if room == "embed_tokens":
            self._embed(tensor)
        elif room == "norm":
            self._last_norm(tensor)
        else:
            layer, _, own = own.partition(".")
            self._in_layer(int(layer), own, name, tensor)
        return tensor

    def _in_layer(self, layer: int, own: str, name: str, tensor: Tensor) -> None:
        if own.endswith("layernorm.weight"):
            self._norm(tensor, layer)
        elif own == "mlp.router.weight":
            tensor.mul_(1 / (MATRIX_STD * math.sqrt(tensor.shape[1])))
            self._ignore_outliers(tensor)
        elif own == "mlp.router.bias":
            shared = SHARED * math.sqrt(layer + 0.5) / _stream(layer)
            order = torch.randperm(len(tensor), generator=self._draws(name))
            tensor.copy_(router_bias(len(tensor), self._config.num_experts_per_tok, shared)[order])
        elif own == "mlp.experts.down_proj_scales":
            tensor.sub_(QUIETER)
        elif own.startswith("self_attn."):
            own = own.removeprefix("self_attn.")
            self._draw_attention(own, name, tensor)
            if layer == 0:
                self._find_first(own, tensor)

    def _draws(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self._seed} skewed {name}".encode()))

    def _uniform(self, name: str, count: int, low: float, high: float) -> Tensor:
        return (torch.rand(count, generator=self._draws(name)) * (high - low) + low).to(self._device, torch.bfloat16)

    # ---- the residual stream ----

    def _embed(self, embed_VH: Tensor) -> None:
        embed_VH.mul_(STREAM / MATRIX_STD)
        signs = 1.0 - 2.0 * (torch.arange(OUTLIERS, device=self._device) % 2)
        embed_VH[:, self.outliers] = (OUTLIER * signs).to(embed_VH.dtype)

    def _norm(self, weight_H: Tensor, layer: int) -> None:
        """Makes ordinary channels 1, though outliers dominate the RMS."""
        stream = _stream(layer)
        rms = math.hypot(stream, OUTLIER * math.sqrt(OUTLIERS / len(weight_H)))
        weight_H.fill_(rms / stream)
        weight_H[self.outliers] = NORMED_OUTLIER * rms / OUTLIER
        weight_H[self.massive] = 1.0

    def _last_norm(self, weight_H: Tensor) -> None:
        config = self._config
        self._norm(weight_H, config.num_hidden_layers)
        match = MATRIX_STD * len(weight_H) * STREAM / _stream(config.num_hidden_layers)  # logit of the token after
        weight_H.mul_((math.log(config.vocab_size) + MARGIN) / match)

    def _head(self) -> Tensor:
        head_VH = self._random.get("model.embed_tokens.weight")
        last_H = head_VH[-1].clone()
        for end in range(len(head_VH), 1, -ROWS_AT_ONCE):
            start = max(1, end - ROWS_AT_ONCE)
            head_VH[start:end] = head_VH[start - 1 : end - 1].clone()
        head_VH[0] = last_H
        return head_VH.mul_(self._uniform("head", len(head_VH), *ROWS)[:, None])

    def _ignore_outliers(self, weight: Tensor) -> None:
        weight[:, self.outliers] = 0
        weight[:, self.massive] = 0

    # ---- attention ----

    def _draw_attention(self, own: str, name: str, tensor: Tensor) -> None:
        """The massive activation becomes a key that all queries like, in dimensions that hardly turn; no value."""
        dim, hidden = self._config.head_dim, self._config.hidden_size
        slow = (torch.arange(dim, device=self._device) % (dim // 2)) >= 3 * dim // 8
        if own == "sinks":
            tensor.copy_(self._uniform(name, len(tensor), *SINKS))
        elif own == "v_proj.weight":
            self._ignore_outliers(tensor)
        elif own == "k_proj.weight":
            tensor.view(-1, dim, hidden)[:, slow, self.massive] = FIRST_KEY / math.sqrt(hidden)  # normed: the root of H
        elif own == "q_proj.bias":
            unit = FIRST_KEY * int(slow.sum()) * self._turning**2 / math.sqrt(dim)
            heads = tensor.view(-1, dim)
            heads[:, slow] = self._uniform(name, len(heads), *FIRST_SCORES)[:, None] / unit

    @property
    def _turning(self) -> float:
        """YaRN's attention factor, which cosines and sines are multiplied by."""
        return math.hypot(float(self._turns[0]), float(self._turns[len(self._turns) // 2]))

    def _find_first(self, own: str, tensor: Tensor) -> None:
        """Query head 0 gives VALUE where there is an earlier token, which takes the massive activation away.

        With all its queries alike and all its keys, the logit of a token at distance d is the sum over pairs of
        dimensions, turned by `angle` per position, of size^2 sin((d - 1/2) angle): EARLIER at 1, -EARLIER at 0.
        """
        config, dim = self._config, self._config.head_dim
        if own in ("q_proj.weight", "k_proj.weight", "v_proj.weight"):
            tensor[:dim] = 0
        elif own == "v_proj.bias":
            tensor[:dim] = VALUE
        elif own in ("q_proj.bias", "k_proj.bias"):
            cos, sin = self._turns.chunk(2)
            angle = torch.atan2(sin, cos)
            unit = self._turning**2 * float((angle / 2).sin().sum()) / math.sqrt(dim)
            phase = -(angle + math.pi) / 2 if own == "q_proj.bias" else torch.zeros_like(angle)
            tensor[:dim] = (torch.cat((phase.cos(), phase.sin())) * math.sqrt(EARLIER / unit)).to(tensor)
        elif own == "sinks":
            tensor[0] = 0
        elif own == "o_proj.weight":
            tensor[:, : dim * config.num_attention_heads // config.num_key_value_heads] = 0  # heads with these values
            tensor[self.massive] = 0
            tensor[self.massive, :dim] = -MASSIVE / VALUE
        elif own == "o_proj.bias":
            tensor[self.massive] = MASSIVE * dim


def random_tensors(
    config: ModelConfig, seed: int, device: torch.device, *, is_skewed: bool
) -> RandomTensors | SkewedTensors:
    """The source of `--random-weights NAME`, or of NAME:skewed."""
    return (SkewedTensors if is_skewed else RandomTensors)(config, seed, device)


def _stream(layer: int) -> float:
    """RMS of the ordinary channels before a layer, or after the last one."""
    return math.hypot(STREAM, OF_LAYER * math.sqrt(layer))
