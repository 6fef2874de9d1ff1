"""The least time that a step can take on a chip: the bytes it must read over the bandwidth, or its arithmetic.

A step reads the attention, router and unembedding weights in bfloat16, and the packed experts in use. It also reads the
keys and values of its contexts: at most a window, in layers that have one. A token uses K of E equally likely experts,
so it leaves an expert out with probability 1 - K/E. Activations, norms and biases outside the experts are not counted.
"""

from dataclasses import dataclass

from oscine.kv_dtype import KVDtype
from oscine.model.config import ModelConfig

BYTES = 2  # of an unquantised weight
PAGE = 64  # tokens
MXFP4_BYTES = 0.5 + 1 / 32  # of a packed weight and its share of a scale


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The measured ceiling of a chip."""

    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense

    def seconds(self, num_bytes: float, flops: float) -> float:
        """The least time of so much work: the bandwidth or the arithmetic bounds it."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)


H200 = Ceiling(bytes_per_s=4.28e12, flops_per_s=700e12)  # a copy, read + write; 8192^3

_CEILINGS = {"H200": H200}


def ceiling_of(gpu: str) -> Ceiling | None:
    """The ceiling for a part of the driver's name; None for a chip that was not measured."""
    return next((ceiling for name, ceiling in _CEILINGS.items() if name in gpu), None)


def expected_experts(num_experts: int, per_token: int, tokens: int) -> float:
    """Distinct experts of one layer that `tokens` tokens use, under uniform routing."""
    return num_experts * (1.0 - (1.0 - per_token / num_experts) ** tokens)


def expert_bytes(config: ModelConfig) -> float:
    """One expert of one layer, biases included."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    return 3 * hidden * intermediate * MXFP4_BYTES + (2 * intermediate + hidden) * BYTES


def _attention_parameters(config: ModelConfig) -> int:
    """Projections of one layer."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    return 2 * (heads + kv_heads) * config.head_dim * config.hidden_size


def fixed_bytes(config: ModelConfig) -> float:
    """Bytes that every step reads: attention, router and unembedding."""
    routers = sum(config.experts) * config.hidden_size
    attention = config.num_hidden_layers * _attention_parameters(config)
    return BYTES * (attention + routers + config.vocab_size * config.hidden_size)


def kv_bytes(config: ModelConfig, context: float, *, dtype: KVDtype = KVDtype.BFLOAT16) -> float:
    """Keys and values that one token of this context reads."""
    groups = config.kv_groups(PAGE, dtype)
    return sum(len(group.layers) * group.layer_token_bytes * min(context, group.window or context) for group in groups)


def token_flops(config: ModelConfig, context: float) -> float:
    """Operations of one token that attends to `context` keys, its logits included."""
    experts = config.num_experts_per_tok * 3 * config.hidden_size * config.intermediate_size
    routers = sum(config.experts) * config.hidden_size
    matrices = config.num_hidden_layers * (_attention_parameters(config) + experts) + routers
    head = config.vocab_size * config.hidden_size
    attended = sum(min(context, window or context) for window in config.windows)
    attention = 2 * config.num_attention_heads * config.head_dim * attended
    return 2.0 * (matrices + head + attention)


def decode_bytes(config: ModelConfig, sequences: int, context: float, *, dtype: KVDtype = KVDtype.BFLOAT16) -> float:
    experts = sum(expected_experts(number, config.num_experts_per_tok, sequences) for number in config.experts)
    return fixed_bytes(config) + experts * expert_bytes(config) + sequences * kv_bytes(config, context, dtype=dtype)


def decode_step_s(
    config: ModelConfig, sequences: int, context: float, ceiling: Ceiling, *, dtype: KVDtype = KVDtype.BFLOAT16
) -> float:
    """Seconds of a step that decodes one token of each sequence, at an average context."""
    num_bytes = decode_bytes(config, sequences, context, dtype=dtype)
    return ceiling.seconds(num_bytes, sequences * token_flops(config, context))
