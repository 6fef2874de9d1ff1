"""Where the tokenizer of the served model is. Knows names and folders; reads no vocabulary itself."""

from importlib.resources import files
from pathlib import Path

from oscine.chat.o200k import o200k_folder
from oscine.config import NANO, EngineOptions


def tokenizer_folder(options: EngineOptions) -> Path:
    """The folder with tokenizer.json; may fetch it (blocking). Raises ValueError with what is missing."""
    model = options.model
    if model.random_weights is not None:
        config = Path(model.random_weights)  # a file, its folder, or the name of a published model
        folder = config if config.is_dir() else config.parent
        return folder if config.exists() and (folder / "tokenizer.json").is_file() else o200k_folder()
    if model.model == NANO:
        return Path(str(files("oscine.model") / "nano"))
    if Path(model.model).is_dir():
        return Path(model.model)
    return _fetch(model.model, model.revision)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from oscine.model.hub import HUB_NAME

    if not HUB_NAME.fullmatch(name):
        raise ValueError(f"model {name!r} is neither a folder nor a Hugging Face name (owner/name)")
    try:
        return Path(hf_hub_download(name, "tokenizer.json", revision=revision)).parent
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(f"cannot fetch tokenizer.json of {name}: {str(error).splitlines()[0]}") from error
