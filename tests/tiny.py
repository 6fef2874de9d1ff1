"""Configurations of tiny gpt-oss models. Each folder of tests has its own builders of models and engines."""

from dataclasses import replace

from oscine.model.config import ModelConfig, YarnConfig

TINY = ModelConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=32,
    head_dim=16,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=24,
    layer_types=("sliding_attention", "full_attention"),
    max_position_embeddings=256,
    eos_token_ids=(96,),
)
DEEP = replace(TINY, num_hidden_layers=4, layer_types=TINY.layer_types * 2)
BYTES = replace(TINY, vocab_size=320, max_position_embeddings=4096, eos_token_ids=(260,))  # a vocabulary of bytes
# Without weights, for scripted and fake engines: the published window and head size, a long context
SCRIPTED = replace(
    BYTES,
    intermediate_size=64,
    head_dim=64,
    sliding_window=128,
    max_position_embeddings=65536,
    eos_token_ids=(262,),
)
SMALL = replace(  # no two sizes are alike, and the attention is the published one
    TINY,
    vocab_size=211,
    hidden_size=96,
    intermediate_size=160,
    head_dim=64,
    num_attention_heads=8,
    num_hidden_layers=4,
    num_local_experts=5,
    num_experts_per_tok=4,
    sliding_window=128,
    layer_types=TINY.layer_types * 2,
    max_position_embeddings=8192,
    eos_token_ids=(1, 3),
)
WIDE_GROUP = replace(  # all query heads have the same keys; every other constant differs from the published one
    TINY,
    head_dim=32,
    num_attention_heads=8,
    num_key_value_heads=1,
    num_hidden_layers=3,
    num_local_experts=9,
    sliding_window=50,
    swiglu_limit=0.3,
    rms_norm_eps=1e-6,
    layer_types=("full_attention", "full_attention", "sliding_attention"),
    max_position_embeddings=8192,
    eos_token_ids=(0,),
    yarn=YarnConfig(rope_theta=10000.0, factor=4.0, original_max_position_embeddings=1024),
)
