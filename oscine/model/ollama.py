"""The models in Ollama's store: a folder with manifests, which name files in blobs by their hashes.

The store is only read.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oscine.config import Environment

_MODEL_LAYER = "application/vnd.ollama.image.model"
_DEFAULTS = ("registry.ollama.ai", "library")  # of a name without a host or an owner
_NAME = re.compile(r"(?:[\w.-]+(?::\d+)?/)*[\w.-]+:[\w.-]+")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    name: str  # as Ollama shows it, such as gpt-oss:20b
    path: Path  # of its weights, a GGUF file
    manifest: Path


def is_name(name: str) -> bool:
    """Whether a name has the form of one of Ollama's: with a tag."""
    return _NAME.fullmatch(name) is not None


def is_store(folder: Path) -> bool:
    return (folder / "manifests").is_dir() and (folder / "blobs").is_dir()


def find(name: str) -> Path:
    """The weights of a model in this machine's store. Raises ValueError."""
    stores = [folder for folder in Environment().ollama_folders if is_store(folder)]
    models = [model for folder in stores for model in models_in(folder)]
    for model in models:
        if model.name == name:
            return model.path
    if not stores:
        raise ValueError(f"model {name!r} is a name of Ollama's, and this machine has no store of Ollama's")
    known = ", ".join(model.name for model in models) or "no model"
    raise ValueError(f"model {name!r} is not in Ollama's store {stores[0]}, which has {known}")


def only_model(folder: Path) -> Path:
    """The weights of the one gpt-oss model in a store. Raises ValueError if there is none, or more than one."""
    models = list(models_in(folder))
    found = [model for model in models if "gpt-oss" in model.name]
    if len({model.path for model in found}) != 1:
        known = ", ".join(model.name for model in models) or "no model"
        raise ValueError(f"{folder} is a store of Ollama's with {known}; name one, such as gpt-oss:20b")
    return found[0].path


def models_in(folder: Path) -> Iterator[OllamaModel]:
    """Those with weights; sorted by name. Raises ValueError for a manifest that cannot be read."""
    root = folder / "manifests"
    for manifest in sorted(path for path in root.rglob("*") if path.is_file() and not path.name.startswith(".")):
        *owner, model, tag = manifest.relative_to(root).parts
        shown = [part for part, default in zip(owner, _DEFAULTS, strict=False) if part != default] + [*owner[2:], model]
        if (path := _weights(folder, manifest)) is not None:
            yield OllamaModel(f"{'/'.join(shown)}:{tag}", path, manifest)


def _weights(folder: Path, manifest: Path) -> Path | None:
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digest = next((str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER), None)
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{manifest}: not a manifest of Ollama's") from None
    if digest is None or not re.fullmatch(r"sha256[:-][0-9a-f]+", digest):
        return None
    return folder / "blobs" / digest.replace(":", "-")
