"""Which tokenizer goes with which model."""

from pathlib import Path

import pytest

from oscine.chat.vocabulary import tokenizer_folder
from oscine.checkpoint.hub import find_model
from oscine.settings.config import EngineOptions, ModelOptions


@pytest.mark.parametrize("name", ["", "config.json"])
def test_random_weights_have_the_vocabulary_beside_their_config(model_folder: Path, name: str) -> None:
    options = EngineOptions(model=ModelOptions(random_weights=str(model_folder / name)))
    assert tokenizer_folder(options) == model_folder


def test_a_name_that_the_hub_cannot_have_is_not_asked_for() -> None:
    with pytest.raises(ValueError, match="'nowhere' is neither a folder, a Hugging Face name"):
        tokenizer_folder(EngineOptions(model=ModelOptions(model="nowhere")))


@pytest.mark.needs("formats")
@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("gpt-os-20b", "gpt-oss-20b"),
        ("gpt-oss-120", "gpt-oss-120b"),
        ("oscine-nao", "oscine-nano"),
        ("gpt-oss:20b", "gpt-oss-20b"),
    ],
)
def test_a_name_that_was_probably_meant(given: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", "/nowhere")
    with pytest.raises(ValueError, match=f"{given}.*; did you mean {meant}[?]$"):
        find_model(ModelOptions(model=given))
