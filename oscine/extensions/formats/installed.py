"""The gpt-oss models on this machine: the embedded one, those in Hugging Face's cache and in Ollama's store.

And weights that were packed for this machine's CPU: a folder each, named by the file or snapshot of the model.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from oscine.checkpoint.files import weight_files
from oscine.checkpoint.hub import CONFIG, NANO_FOLDER, repository
from oscine.extensions.formats import ollama
from oscine.extensions.formats.gguf.config import ARCHITECTURES
from oscine.extensions.formats.gguf.file import Gguf
from oscine.model.config import MODEL_TYPES
from oscine.settings.config import NANO
from oscine.system.environment import Environment
from oscine.system.model_files import is_file_name, read_json

Place = Literal["Oscine", "Hugging Face", "Ollama", "packed"]


@dataclass(frozen=True, slots=True)
class Installed:
    name: str  # MODEL of `oscine serve`, except for packed weights
    place: Place
    format: str
    num_bytes: int
    path: Path  # the file or folder that `oscine rm` deletes
    whole: bool = True  # whether all of its files are there


def installed(cache_dir: str | None = None) -> list[Installed]:
    """`cache_dir`: Hugging Face's cache; None: as the environment says."""
    num_bytes = sum(size_of(NANO_FOLDER / name) for name in weight_files(NANO_FOLDER))  # without the head for drafts
    nano = Installed(NANO, "Oscine", "safetensors", num_bytes, NANO_FOLDER)
    return [nano, *_of_hugging_face(cache_dir), *_of_ollama(), *_packed()]


def find_removable(name: str, cache_dir: str | None = None) -> list[Installed]:
    """The model and its packed weights. Raises ValueError if it is not there, or if Oscine may not remove it."""
    models = installed(cache_dir)
    found = next((model for model in models if model.name == repository(name)), None)
    if found is None:
        raise ValueError(f"model {name!r} is not on this machine; `oscine list` shows what is")
    if found.place == "Oscine":
        raise ValueError(f"{name} is a part of Oscine")
    if found.place == "Ollama":
        raise ValueError(f"{name} is in Ollama's store, which Oscine only reads: `ollama rm {name}` removes it")
    snapshots = tuple(f"{path.name}-" for path in found.path.glob("snapshots/*"))
    return [found, *(model for model in models if model.place == "packed" and model.name.startswith(snapshots))]


def remove(model: Installed) -> None:
    """Deletes its files, those of an unfinished download too. Raises OSError."""
    if model.path.is_dir():
        shutil.rmtree(model.path)
    else:
        model.path.unlink()


def _of_hugging_face(cache_dir: str | None) -> Iterator[Installed]:
    from huggingface_hub import constants

    cache = Path(cache_dir or constants.HF_HUB_CACHE)
    for folder in filter(lambda path: is_file_name(path.name), _in(cache, "models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = [path for path in folder.glob("snapshots/*") if path.is_dir()]
        for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
            if (kind := _format(snapshot)) is not None:
                yield Installed(name, "Hugging Face", kind, size_of(folder), folder, _is_whole(snapshot, kind))
                break


def _format(snapshot: Path) -> str | None:
    """None for a model that Oscine does not serve."""
    if _json(snapshot / CONFIG).get("model_type") in MODEL_TYPES:
        return "safetensors"
    return "GGUF" if any(_is_gpt_oss(path) for path in snapshot.glob("*.gguf")) else None


def _is_whole(snapshot: Path, kind: str) -> bool:
    if kind == "GGUF":
        return True
    with suppress(ValueError):
        return all((snapshot / name).exists() for name in weight_files(snapshot))
    return False


def _of_ollama() -> Iterator[Installed]:
    for model in ollama.installed():
        with suppress(ValueError):  # of another program, so its broken files are none of ours
            weights = model.weights()
            if _is_gpt_oss(weights):
                yield Installed(model.name, "Ollama", "GGUF", weights.stat().st_size, weights)


def _packed() -> Iterator[Installed]:
    for path in _in(Environment().packed_folder, "*"):
        yield Installed(path.name, "packed", "int8 and MXFP4", size_of(path), path)


def _in(folder: Path, pattern: str) -> list[Path]:
    """Nothing for a folder that is missing, or that this user may not enter."""
    return sorted(folder.glob(pattern)) if os.path.isdir(folder) else []


def _is_gpt_oss(path: Path) -> bool:
    with suppress(ValueError):
        return Gguf(path).metadata.get("general.architecture") in ARCHITECTURES
    return False


def _json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file, or no object in it."""
    with suppress(ValueError):
        return read_json(path)
    return {}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder. Links to the same file count once."""
    files = {file.resolve() for file in (path.rglob("*") if path.is_dir() else (path,)) if file.is_file()}
    return sum(file.stat().st_size for file in files)
