"""A tokenizer without merges, for tests that need one but no vocabulary of a model."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from oscine.chat.tokenizer import BYTE_CHARACTERS


def write_byte_tokenizer(folder: Path, specials: list[str], more: Mapping[str, int] = MappingProxyType({})) -> Path:
    """A vocabulary without merges: id b is byte b, special tokens follow."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    (folder / "tokenizer.json").write_text(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [{"id": 256 + i, "content": name, **flags} for i, name in enumerate(specials)],
                "pre_tokenizer": byte_level,
                "decoder": byte_level,
                "model": {
                    "type": "BPE",
                    "vocab": {c: byte for byte, c in enumerate(BYTE_CHARACTERS)} | dict(more),
                    "merges": [],
                },
            }
        )
    )
    return folder
