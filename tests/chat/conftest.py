import openai_harmony
import pytest

from oscine.chat.harmony import HarmonyRenderer
from oscine.chat.tokenizer import SPECIAL_TOKENS, Tokenizer
from oscine.model.o200k import o200k_folder
from tests.byte_tokenizer import write_byte_tokenizer


@pytest.fixture(scope="session")
def oracle() -> openai_harmony.HarmonyEncoding:
    return openai_harmony.load_harmony_encoding("HarmonyGptOss")


@pytest.fixture(scope="session")
def o200k() -> Tokenizer:
    return Tokenizer(o200k_folder())


@pytest.fixture(scope="session")
def renderer(o200k: Tokenizer) -> HarmonyRenderer:
    return HarmonyRenderer(o200k)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("byte_tokenizer")
    return Tokenizer(write_byte_tokenizer(folder, sorted(SPECIAL_TOKENS.values())))
