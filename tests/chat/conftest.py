import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import openai_harmony
import pytest

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.tokenizer import BYTE_CHARACTERS, SPECIAL_TOKENS, Tokenizer
from oscine.model.o200k import o200k_folder


@pytest.fixture(scope="session")
def oracle() -> openai_harmony.HarmonyEncoding:
    return openai_harmony.load_harmony_encoding("HarmonyGptOss")


@pytest.fixture(scope="session")
def o200k() -> Tokenizer:
    return Tokenizer(o200k_folder())


@pytest.fixture(scope="session")
def renderer(o200k: Tokenizer) -> HarmonyRenderer:
    return HarmonyRenderer(o200k)


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


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_tokenizer")
    return Tokenizer(write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values())))
