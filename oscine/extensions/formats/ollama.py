"""The models in Ollama's store: a folder with manifests, which name files in blobs by their hashes.

The store is only read.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from oscine.checkpoint.formats import Format
from oscine.system.environment import Environment
from oscine.system.model_files import read_json, shown

_MODEL_LAYER = "application/vnd.ollama.image.model"
_HOST, _OWNER = "registry.ollama.ai", "library"  # which names leave out
_DIGEST = re.compile("sha256[:-][0-9a-f]{64}")
_NAME = re.compile(r"(?:[\w.-]+(?::\d+)?/)*[\w.-]+:[\w.-]+")


@dataclass(frozen=True, slots=True)
class OllamaModel:
    name: str  # as Ollama shows it, such as gpt-oss:20b
    manifest: Path
    store: Path

    def weights(self) -> Path:
        """A GGUF file, which may be missing. Raises ValueError for a manifest that names none."""
        manifest = read_json(self.manifest)
        try:
            digests = [str(layer["digest"]) for layer in manifest["layers"] if layer["mediaType"] == _MODEL_LAYER]
        except (KeyError, TypeError):
            raise ValueError(f"{self.manifest}: not a manifest of Ollama's") from None
        if len(digests) != 1 or not _DIGEST.fullmatch(digests[0]):
            raise ValueError(f"{self.manifest}: names no file with weights")
        return self.store / "blobs" / digests[0].replace(":", "-")


def is_name(name: str) -> bool:
    """Whether a name has the form of one of Ollama's: with a tag."""
    return _NAME.fullmatch(name) is not None


def is_store(folder: Path) -> bool:
    return os.path.isdir(folder / "manifests") and os.path.isdir(folder / "blobs")


def find(name: str) -> Path:
    """The weights of a model in this machine's stores. Raises ValueError."""
    models = installed()
    for model in models:
        if model.name == name:
            return model.weights()
    known = shown(", ".join(model.name for model in models) or "no model")
    closed = "".join(f"; this user may not read {folder}" for folder in Environment().ollama_folders if _closed(folder))
    raise ValueError(f"model {name!r} is not in Ollama's store on this machine, which has {known}{closed}")


def installed() -> list[OllamaModel]:
    """All models in this machine's stores."""
    return [model for folder in Environment().ollama_folders if is_store(folder) for model in models_in(folder)]


def only_model(store: Path) -> Path:
    """The weights of the one gpt-oss model in a store. Raises ValueError if there is none, or more than one."""
    models = list(models_in(store))
    found = [model for model in models if "gpt-oss" in model.name]
    if len(found) != 1:
        known = shown(", ".join(model.name for model in models) or "no model")
        raise ValueError(f"{store} is a store of Ollama's with {known}; name one, such as gpt-oss:20b")
    return found[0].weights()


def models_in(store: Path) -> Iterator[OllamaModel]:
    """In the order of their manifests' paths: host, owner, model, tag. Files with names that Ollama never shows are
    left out."""
    root = store / "manifests"
    for manifest in sorted(path for path in root.glob("*/*/*/*") if path.is_file() and not path.name.startswith(".")):
        host, owner, model, tag = manifest.relative_to(root).parts
        ends = (
            [model] if (host, owner) == (_HOST, _OWNER) else [owner, model] if host == _HOST else [host, owner, model]
        )
        if is_name(name := f"{'/'.join(ends)}:{tag}"):
            yield OllamaModel(name, manifest, store)


def _closed(folder: Path) -> bool:
    """Whether this user may not look into a folder, or not even see whether there is one."""
    try:
        os.listdir(folder)
    except OSError as error:
        return isinstance(error, PermissionError)
    return False


class OllamaStore(Format):
    """Finds models by Ollama's names, and in its stores. Their files are in another format."""

    def find(self, name: str) -> Path | None:
        return find(name) if is_name(name) else None

    def within(self, folder: Path) -> Path | None:
        return only_model(folder) if is_store(folder) else None


STORE = OllamaStore()
