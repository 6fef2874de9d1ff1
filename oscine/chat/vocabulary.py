"""Finds the tokenizer of the served model."""

from pathlib import Path

from oscine.config import EngineOptions
from oscine.model.o200k import o200k_folder


def tokenizer_folder(options: EngineOptions) -> Path:
    """The folder with tokenizer.json. May fetch it (blocking), after the model's configuration.

    Raises ValueError that says what is missing or wrong.
    """
    from oscine.checkpoint import hub

    model = options.model
    if model.random_weights is None:
        return hub.check_model(model)
    if model.tokenizer is not None:
        return hub.find_tokenizer(model)
    config = Path(model.random_weights)  # a config.json, its folder, or the name of a published model
    folder = config if config.is_dir() else config.parent
    return folder if config.exists() and (folder / hub.TOKENIZER).is_file() else o200k_folder()
