"""Finds a model's folder: as it is, inside this package, or fetched from the Hugging Face hub.

Only files in the root of a hub repository are fetched: its original/ and metal/ folders hold the same weights again.
huggingface_hub resumes, caches, and obeys HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

import re
from pathlib import Path

from oscine.config import NANO

NANO_FOLDER = Path(__file__).parent / "nano"
ROOT_FILES = ["*.json", "*.jinja", "*.safetensors"]
FOLDERS = ["*/*"]
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_folder(model: str, revision: str | None = None) -> Path:
    """Raises ValueError when the model is no folder and cannot be had from the hub."""
    if model == NANO:
        return NANO_FOLDER
    if Path(model).is_dir():
        return Path(model)
    if not HUB_NAME.fullmatch(model):
        raise ValueError(f"model {model!r} is neither a folder, a Hugging Face name (owner/name), nor {NANO}")
    return _fetch(model, revision)


def _fetch(model: str, revision: str | None) -> Path:
    # Imported here: a machine that only measures has no need of it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=ROOT_FILES, ignore_patterns=FOLDERS)
    except LocalEntryNotFoundError as error:
        raise ValueError(f"model {model!r} is not in the local cache, and the hub cannot be reached") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ValueError(f"model {model!r} cannot be fetched: {error}") from error
    return Path(folder)
