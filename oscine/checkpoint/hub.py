"""Finds a model and its tokenizer: inside this package, on this machine, or on the Hugging Face hub.

A model is a folder with config.json and safetensors, or a GGUF file, such as those in Ollama's store.

Only files in the root of a hub repository are fetched: its original/ and metal/ folders hold the same weights again.
The configuration comes first and the weights last, so that a model of another kind costs no download. The library
resumes, caches, and obeys HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from oscine.checkpoint import ollama
from oscine.checkpoint.download import blobs_of, fetch_blobs
from oscine.checkpoint.gguf.config import config_of, tokenizer_of
from oscine.checkpoint.gguf.file import Gguf, gguf_in, is_gguf, parts_of
from oscine.config import NANO, ModelOptions
from oscine.model.config import ModelConfig

NANO_FOLDER = Path(__file__).parents[1] / "model" / "nano"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHTS = "*.safetensors"
ROOT_FILES = ["*.json", "*.jinja", WEIGHTS]
FOLDERS = ["*/*"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_SHORT_NAMES = {name: f"openai/{name}" for name in ("gpt-oss-20b", "gpt-oss-120b")}
_PROBE_S = 10.0  # for the first answer of the hub; its library would try six times


def find_model(options: ModelOptions) -> Path:
    """The folder of the model, or its GGUF file (the first one of a split model).

    Raises ValueError if the hub does not have it, or if Oscine cannot serve it.
    """
    return _local(options.model) or _Hub(options, options.model).fetch_model()


def repository(name: str) -> str:
    """The full name on the hub of a published model, for its short name; any other name as it is."""
    return _SHORT_NAMES.get(name, name)


def pull(options: ModelOptions) -> Path:
    """Downloads what is missing of a model of the hub. Returns its folder. Raises ValueError."""
    if (found := _local(options.model)) is not None:
        raise ValueError(f"model {options.model!r} is on this machine already: {found}")
    hub = _Hub(options, options.model)
    hub.require()
    return hub.fetch_model()


def config_at(path: Path) -> ModelConfig:
    """Of a model that `find_model` found. Raises ValueError naming the file and what is wrong in it."""
    return ModelConfig.from_file(path / CONFIG) if path.is_dir() else config_of(Gguf(path))


def check_model(options: ModelOptions) -> Path:
    """The folder of the tokenizer; fetches no weights. Raises ValueError as `find_model` does."""
    found = _local(options.model)
    if found is None:
        ModelConfig.from_file(_Hub(options, options.model).fetch(CONFIG))
    elif found.is_dir() and not (found / CONFIG).exists():  # the engine checks an existing one at once
        raise ValueError(f"{found / CONFIG}: missing")
    return find_tokenizer(options)


def find_tokenizer(options: ModelOptions) -> Path:
    """The folder of tokenizer.json. Raises ValueError."""
    name = options.tokenizer or options.model
    found = _local(name)
    if found is not None and not found.is_dir():
        return tokenizer_of(Gguf(found))
    folder = found or _Hub(options, name).fetch(TOKENIZER).parent
    if not (folder / TOKENIZER).is_file():
        raise ValueError(f"{folder / TOKENIZER}: missing; --tokenizer names a folder that has one")
    return folder


def _local(name: str) -> Path | None:
    """The folder or GGUF file that `name` means; None for a name on the hub. Raises ValueError for any other name."""
    path = NANO_FOLDER if name == NANO else Path(name)
    if path.is_dir():
        return _within(path)
    if path.is_file():
        if not is_gguf(path):
            raise ValueError(f"model {name!r} is a file, and not a GGUF file")
        return parts_of(path)[0]
    if ollama.is_name(name):
        return ollama.find(name)
    on_hub = name in _SHORT_NAMES or (_HUB_NAME.fullmatch(name) and name[0] not in "./~")
    if not on_hub:
        known = ", ".join((*_SHORT_NAMES, NANO))
        raise ValueError(
            f"model {name!r} is neither a folder, a Hugging Face name (owner/name), a GGUF file, "
            f"a name in Ollama's store (name:tag), nor one of {known}"
        )
    return None


def _within(folder: Path) -> Path:
    """The GGUF file in a folder without config.json, or in a store of Ollama's; else the folder itself."""
    if (folder / CONFIG).exists():
        return folder
    if ollama.is_store(folder):
        return ollama.only_model(folder)
    return gguf_in(folder) or folder


class _Hub:
    """One repository of the hub, or its local cache if the hub cannot be reached."""

    def __init__(self, options: ModelOptions, name: str) -> None:
        from huggingface_hub import constants  # imported here: a machine that only measures need not have it

        self._model = name
        self._own = name == options.model
        self._unreachable = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
        self._where: dict[str, Any] = {
            "repo_id": repository(name),
            "revision": options.revision if self._own else None,
            "cache_dir": options.download_dir,
            "local_files_only": self._unreachable is not None,
        }
        self._has_tokenizer = options.tokenizer is None

    def require(self) -> None:
        """Raises ValueError if the hub cannot be reached."""
        if self._unreachable is not None:
            raise ValueError(f"the hub cannot be reached: {self._unreachable}")

    def fetch_model(self) -> Path:
        """Fetches the configuration, the tokenizer, then the weights, so that errors come before the large download."""
        from huggingface_hub import snapshot_download

        ModelConfig.from_file(self.fetch(CONFIG))
        if self._has_tokenizer:
            self.fetch(TOKENIZER)
        if self._unreachable is None:
            self._get(self._fetch_weights)
        return Path(self._get(snapshot_download, allow_patterns=ROOT_FILES, ignore_patterns=FOLDERS))

    def fetch(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(self._get(hf_hub_download, filename=file))

    def _fetch_weights(self, repo_id: str, revision: str | None, cache_dir: str | None, **_: Any) -> None:
        fetch_blobs(blobs_of(repo_id, revision, cache_dir, lambda name: fnmatch(name, WEIGHTS) and "/" not in name))

    def _get(self, fetch: Callable[..., Any], **what: Any) -> str:
        from huggingface_hub import errors

        of_its_library: type[Exception] = errors.HfHubHTTPError.__mro__[1]  # for HTTP: one of two
        try:
            return str(fetch(**self._where, **what))
        except errors.LocalEntryNotFoundError as error:
            why = self._unreachable or str(error).splitlines()[0]
            raise ValueError(
                f"model {self._model!r} is not in the local cache, and the hub cannot be reached: {why}"
            ) from error
        except errors.GatedRepoError as error:
            raise ValueError(
                f"model {self._model!r} is gated: its page on the hub says on what terms HF_TOKEN may read it"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise ValueError(f"model {self._model!r} is not on the hub, or HF_TOKEN may not read it") from error
        except errors.RevisionNotFoundError as error:
            raise ValueError(f"model {self._model!r} has no --revision {self._where['revision']!r}") from error
        except errors.EntryNotFoundError as error:
            raise ValueError(f"model {self._model!r} has no {what['filename']}") from error
        except (of_its_library, errors.HFValidationError, OSError) as error:
            why = str(error).strip().splitlines()[0]
            raise ValueError(f"model {self._model!r} cannot be fetched: {why}") from error


def _unreachable(endpoint: str) -> str | None:
    """The reason why the hub does not answer; None if it does."""
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_PROBE_S)
    except Exception as error:  # from either HTTP library of huggingface_hub
        return f"{endpoint}: {str(error) or type(error).__name__}"
    return None
