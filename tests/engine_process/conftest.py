"""A tiny checkpoint in the published layout, with a byte-level vocabulary of its own."""

from pathlib import Path

import pytest
import tokenizers
import torch

from oscine.model.random_weights import RandomTensors
from oscine.model.tensors import tensor_specs
from tests.model.saved import save
from tests.tiny import BYTES

SPECIAL = ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"]
(RETURN,) = BYTES.eos_token_ids


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    source = RandomTensors(BYTES, 0, torch.device("cpu"))
    save(folder, BYTES, {name: source.get(name) for name in tensor_specs(BYTES)})
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
