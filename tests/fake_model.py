"""A folder with just enough of a checkpoint for scripted tokens: sizes, and a vocabulary of bytes."""

import json
from pathlib import Path

from oscine.chat.tokenizer import SPECIAL_TOKENS
from oscine.model.config import ModelConfig
from tests.chat.conftest import write_byte_tokenizer

CONFIG = ModelConfig(
    vocab_size=320,
    hidden_size=64,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    num_local_experts=4,
    layer_types=("sliding_attention", "full_attention"),
    max_position_embeddings=65536,
    eos_token_ids=(262,),
)


def write_fake_model(folder: Path) -> Path:
    """In this vocabulary id b is byte b; special tokens follow."""
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    return write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values()))
