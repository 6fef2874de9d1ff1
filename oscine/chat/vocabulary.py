"""Finds the tokenizer of the served model."""

from pathlib import Path

from oscine.model.o200k import o200k_folder
from oscine.settings.config import EngineOptions


def tokenizer_folder(options: EngineOptions) -> Path:
    """The folder with tokenizer.json. May fetch it (blocking), after the model's configuration.

    Raises ValueError that says what is missing or wrong, also for ranks that cannot divide the model.
    """
    from oscine.checkpoint import hub

    if options.executor != "fake":  # which has no ranks
        hub.check_ranks(options.model)
    if options.model.random_weights is None:
        return hub.check_model(options.model)
    return hub.tokenizer_of_shapes(options.model) or o200k_folder()
