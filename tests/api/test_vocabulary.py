"""Which tokenizer goes with which model."""

from pathlib import Path

import pytest

from oscine.chat.vocabulary import tokenizer_folder
from oscine.config import EngineOptions, ModelOptions


@pytest.mark.parametrize("name", ["", "config.json"])
def test_random_weights_have_the_vocabulary_beside_their_config(model_folder: Path, name: str) -> None:
    options = EngineOptions(model=ModelOptions(random_weights=str(model_folder / name)))
    assert tokenizer_folder(options) == model_folder


def test_a_name_that_the_hub_cannot_have_is_not_asked_for() -> None:
    with pytest.raises(ValueError, match="'nowhere' is neither a folder, a Hugging Face name"):
        tokenizer_folder(EngineOptions(model=ModelOptions(model="nowhere")))
