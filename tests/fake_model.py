"""A folder with just enough of a checkpoint for scripted tokens: sizes, and a vocabulary of bytes."""

import json
from pathlib import Path

from oscine.chat.tokenizer import SPECIAL_TOKENS
from tests.byte_tokenizer import write_byte_tokenizer
from tests.tiny import SCRIPTED


def write_fake_model(folder: Path) -> Path:
    """In this vocabulary id b is byte b; special tokens follow."""
    (folder / "config.json").write_text(json.dumps(SCRIPTED.to_dict()))
    return write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values()))
