"""A tiny checkpoint in the published layout, with a byte-level vocabulary of its own."""

from pathlib import Path

import pytest
import tokenizers
import torch

from oscine.model.config import ModelConfig
from oscine.model.random_weights import RandomTensors
from oscine.model.weights import tensor_specs
from tests.model.saved import save

SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
RETURN = 260

CONFIG = ModelConfig(
    vocab_size=320,
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
    max_position_embeddings=4096,
    eos_token_ids=(RETURN,),
)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = RandomTensors(CONFIG, 0, torch.device("cpu"))
    save(folder, CONFIG, {name: source.get(name) for name in tensor_specs(CONFIG)})
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
