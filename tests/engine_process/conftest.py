"""A folder that is enough of a checkpoint for the fake executor: sizes, and a byte-level vocabulary of its own."""

import json
from pathlib import Path

import pytest
import tokenizers

from oscine.model.config import ModelConfig

SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]


def small_config(**changes: object) -> ModelConfig:
    values = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 32,
        "head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ("sliding_attention", "full_attention"),
        "max_position_embeddings": 4096,
        "eos_token_ids": (261,),
    }
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({character: i for i, character in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(small_config().to_dict()))
    return folder
