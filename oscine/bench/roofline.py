"""The least time that a step can take on a chip: the bytes it must read over the bandwidth, or its arithmetic.

A step reads the attention, router and unembedding weights in bfloat16, the packed experts in use, and the keys and
values of its contexts (at most a window, in sliding layers). A token uses K of E equally likely experts, so it leaves
an expert out with probability 1 - K/E. Activations, norms and biases outside the experts are not counted.
"""

from dataclasses import dataclass

from oscine.model.config import ModelConfig

BYTES = 2  # of an unquantised weight, a key or a value
MXFP4_BYTES = 0.5 + 1 / 32  # of a packed weight and its share of a scale


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The measured ceiling of a chip."""

    bytes_per_s: float
    flops_per_s: float  # bfloat16, dense


H200 = Ceiling(bytes_per_s=4.28e12, flops_per_s=700e12)  # a copy, read + write; 8192^3

_CEILINGS = {"H200": H200}


def ceiling_of(gpu: str) -> Ceiling | None:
    """The ceiling for a part of the driver's name; None for a chip that was not measured."""
    return next((ceiling for name, ceiling in _CEILINGS.items() if name in gpu), None)


def expected_experts(config: ModelConfig, tokens: int) -> float:
    """Distinct experts of one layer that `tokens` tokens use, under uniform routing."""
    experts = config.num_local_experts
    return experts * (1.0 - (1.0 - config.num_experts_per_tok / experts) ** tokens)


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
    router = config.num_local_experts * config.hidden_size
    layers = config.num_hidden_layers * (_attention_parameters(config) + router)
    return BYTES * (layers + config.vocab_size * config.hidden_size)


def _attended(config: ModelConfig, context: float) -> float:
    """Keys that one token attends to, summed over the layers."""
    return config.num_full_layers * context + config.num_sliding_layers * min(context, config.sliding_window)


def kv_bytes(config: ModelConfig, context: float) -> float:
    """Keys and values that one token of this context reads."""
    return 2 * config.num_key_value_heads * config.head_dim * BYTES * _attended(config, context)


def token_flops(config: ModelConfig, context: float) -> float:
    """Operations of one token that attends to `context` keys, its logits included."""
    experts = config.num_experts_per_tok * 3 * config.hidden_size * config.intermediate_size
    router = config.num_local_experts * config.hidden_size
    matrices = config.num_hidden_layers * (_attention_parameters(config) + router + experts)
    head = config.vocab_size * config.hidden_size
    attention = 2 * config.num_attention_heads * config.head_dim * _attended(config, context)
    return 2.0 * (matrices + head + attention)


def decode_bytes(config: ModelConfig, sequences: int, context: float) -> float:
    experts = config.num_hidden_layers * expected_experts(config, sequences) * expert_bytes(config)
    return fixed_bytes(config) + experts + sequences * kv_bytes(config, context)


def decode_step_s(config: ModelConfig, sequences: int, context: float, ceiling: Ceiling) -> float:
    """Seconds of a step that decodes one token of each sequence, at an average context."""
    flops = sequences * token_flops(config, context)
    return max(decode_bytes(config, sequences, context) / ceiling.bytes_per_s, flops / ceiling.flops_per_s)
