"""Finds a model and its tokenizer: inside this package, on this machine, or on the Hugging Face hub.

A model is a folder with config.json and safetensors, or a GGUF file, such as those in Ollama's store.

Only files in the root of a hub repository are fetched: its original/ and metal/ folders hold the same weights again.
The configuration comes first and the weights last, so that a model of another kind costs no download. The library
resumes, caches, and obeys HF_HOME, HF_TOKEN and HF_HUB_OFFLINE.
"""

import os
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from oscine.checkpoint import formats
from oscine.checkpoint.download import Peers, blobs_of, fetch_blobs
from oscine.checkpoint.layout import folder_config
from oscine.model.config import ModelConfig, gpt_oss_20b, gpt_oss_120b
from oscine.model.o200k import o200k_folder
from oscine.settings.config import NANO, ModelOptions
from oscine.settings.option import OptionError, did_you_mean
from oscine.system.model_files import is_file_name, shown

PUBLISHED: dict[str, Callable[[], ModelConfig]] = {"20b": gpt_oss_20b, "120b": gpt_oss_120b}
NANO_FOLDER = Path(__file__).parents[1] / "model" / "nano"
CONFIG = "config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
ADAPTER = "adapter_config.json"  # of PEFT
WEIGHTS = "*.safetensors"
ROOT_FILES = ["*.json", "*.jinja", WEIGHTS]
FOLDERS = ["*/*"]
_HUB_NAME = re.compile(r"([\w.-]+/[\w.-]+)(?:/([\w.-]+\.gguf))?")  # of a repository, and of a file in it
_SHORT_NAMES = {name: f"openai/{name}" for name in ("gpt-oss-20b", "gpt-oss-120b")}
_PROBE_S = 10.0  # for the first answer of the hub; its library would try six times


def find_model(options: ModelOptions, peers: Peers | None = None) -> Path:
    """The folder of the model, or its GGUF file (the first one of a split model).

    `peers`: machines that are asked for weights before the hub.

    Raises ValueError if the hub does not have it, or if Oscine cannot serve it.
    """
    return _here(options) or _Hub(options, options.model, peers).fetch_model()


def is_on_hub(options: ModelOptions) -> bool:
    """Whether the model is a repository of the hub, and not a file or folder of this machine. Raises ValueError."""
    return options.random_weights is None and _here(options) is None


def find_head(name: str, options: ModelOptions) -> Path:
    """The folder of a head that drafts for the model: a folder, or a repository of the hub. Raises ValueError."""
    if os.path.isdir(name):
        return Path(name)
    if not _HUB_NAME.fullmatch(name) or name[0] in "./~":
        raise ValueError(f"head {name!r} is neither a folder nor a Hugging Face name (owner/name)")
    return _Hub(options, name).fetch_head()


def repository(name: str) -> str:
    """The full name on the hub of a published model, for its short name; any other name as it is."""
    return _SHORT_NAMES.get(name, name)


def pull(options: ModelOptions) -> Path:
    """Downloads what is missing of a model of the hub. Returns its folder. Raises ValueError."""
    if (found := _here(options)) is not None:
        raise ValueError(f"model {options.model!r} is on this machine already: {found}")
    hub = _Hub(options, options.model)
    hub.require()
    return hub.fetch_model()


def config_at(path: Path) -> ModelConfig:
    """The configuration of a model that `find_model` found. Raises ValueError naming the file and the wrong field."""
    return folder_config(path / CONFIG) if path.is_dir() else formats.format_of(path).config(path)


def tokenizer_at(path: Path) -> Path:
    """Where the tokenizer.json of a found model should be. Raises ValueError for a GGUF file without a known one."""
    return path if path.is_dir() else formats.format_of(path).tokenizer(path)


def check_local(options: ModelOptions) -> None:
    """Raises ValueError if the configuration of a model on this machine is wrong."""
    if options.random_weights is None and (found := _here(options)) is not None:
        _check_folder(found)
        config_at(found)


def check_ranks(options: ModelOptions) -> None:
    """Raises ValueError if --tensor-parallel-size cannot divide the model. Fetches at most its configuration."""
    if (num_ranks := options.tensor_parallel_size) == 1:
        return
    config = shapes_of(options)
    try:
        if config is not None:
            config.check_divisible(num_ranks)
    except ValueError as error:
        raise ValueError(f"--tensor-parallel-size {num_ranks}: {error}") from None


def shapes_of(options: ModelOptions) -> ModelConfig | None:
    """The configuration of a model. Fetches config.json only, and nothing for a published model.

    None for a GGUF file on the hub. Raises ValueError.
    """
    if options.random_shapes is not None:
        return random_config(options)
    if (found := _here(options)) is not None:
        return config_at(found)
    if (size := repository(options.model).removeprefix("openai/gpt-oss-")) in PUBLISHED:
        return PUBLISHED[size]()
    return _Hub(options, options.model).config()


def random_config(options: ModelOptions) -> ModelConfig:
    """The shapes that --random-weights names. Raises ValueError."""
    assert options.random_shapes is not None
    name, _ = options.random_shapes
    if name in PUBLISHED:
        return PUBLISHED[name]()
    path = Path(name)
    if not os.path.exists(name):
        names = f"neither {' nor '.join(PUBLISHED)} nor a config.json, with or without :skewed"
        raise ValueError(f"--random-weights {options.random_weights!r} is {names}")
    return ModelConfig.from_file(path / CONFIG if path.is_dir() else path)


def check_model(options: ModelOptions) -> Path:
    """The folder of the tokenizer; fetches no weights. Raises ValueError as `find_model` does."""
    found = _here(options)
    if found is None:
        tokenizer = _Hub(options, options.model).check()
        return find_tokenizer(options) if tokenizer is None or options.tokenizer else tokenizer
    _check_folder(found)  # the engine checks an existing config.json at once
    return find_tokenizer(options)


def _check_folder(found: Path) -> None:
    """Raises ValueError for a folder that holds no model."""
    if found.is_dir() and not os.path.lexists(found / CONFIG):
        raise ValueError(f"{found.absolute()} is not the folder of a model: it has no {CONFIG}")


def find_tokenizer(options: ModelOptions) -> Path:
    """The folder of tokenizer.json. Raises ValueError."""
    name = options.tokenizer or options.model
    found = _local(name)
    folder = tokenizer_at(found) if found is not None else _Hub(options, name).fetch(TOKENIZER).parent
    if not (folder / TOKENIZER).is_file():
        raise ValueError(f"{folder / TOKENIZER}: missing; --tokenizer names a folder that has one")
    return folder


def tokenizer_of_shapes(options: ModelOptions) -> Path | None:
    """The folder of tokenizer.json for random weights, or None.

    It is the one that the options name, or else the folder of config.json if it has a tokenizer. Raises ValueError.
    """
    if options.tokenizer is not None:
        return find_tokenizer(options)
    name, _ = options.random_shapes or ("", False)
    config = Path(name)  # a config.json, its folder, or the name of a published model
    folder = config if config.is_dir() else config.parent
    return folder if config.exists() and (folder / TOKENIZER).is_file() else None


def _here(options: ModelOptions) -> Path | None:
    """As _local, for the model itself. Only one on the hub has revisions."""
    found = _local(options.model)
    if found is not None and options.revision is not None:
        raise OptionError("revision", f"is for a model on the Hugging Face hub, not {options.model!r}", "model")
    return found


def _local(name: str) -> Path | None:
    """The folder or GGUF file that `name` means; None for a name on the hub. Raises ValueError for any other name."""
    path = NANO_FOLDER if name == NANO else Path(name)
    if name and os.path.isdir(path):  # False, too, for a name that no file can have
        return _within(path)
    is_file = os.path.isfile(path)
    try:
        found = formats.find(name)
    except ValueError as error:
        raise ValueError(f"{error}{'' if is_file else did_you_mean(name, _SHORT_NAMES)}") from None
    if found is not None:
        return found
    if is_file:
        raise ValueError(f"model {name!r} is a file, and not a GGUF file{formats.missing()}")
    on_hub = name in _SHORT_NAMES or (_HUB_NAME.fullmatch(name) and name[0] not in "./~")
    if not on_hub and (os.path.isabs(name) or name.startswith(("./", "../", "~"))) and "\0" not in name:
        raise ValueError(f"model {name!r}: there is no such folder or GGUF file{formats.missing()}")
    if not on_hub:
        known = (*_SHORT_NAMES, NANO)
        raise ValueError(
            f"model {name!r} is neither a folder, a Hugging Face name (owner/name), a GGUF file, "
            f"a name in Ollama's store (name:tag), nor one of {', '.join(known)}{did_you_mean(name, known)}"
            f"{formats.missing()}"
        )
    return None


def _within(folder: Path) -> Path:
    """The GGUF file in a folder without config.json, or in a store of Ollama's; else the folder itself."""
    if (folder / CONFIG).exists():
        return folder
    if (folder / ADAPTER).exists():
        raise _adapter_error(str(folder))
    return formats.within(folder) or folder


def _adapter_error(name: str) -> ValueError:
    return ValueError(
        f"model {name!r} is a LoRA adapter, not a model: serve it beside its base with "
        "`oscine serve BASE --enable-lora --lora-modules NAME=FOLDER`, or merge it with "
        "`oscine convert BASE TARGET --lora FOLDER`"
    )


class _MissingError(ValueError):
    """The repository, or its copy in the cache, lacks a file."""


class _Hub:
    """One repository of the hub, or its local cache if the hub cannot be reached."""

    def __init__(self, options: ModelOptions, name: str, peers: Peers | None = None) -> None:
        self._model, self._peers = name, peers
        self._own = name == options.model
        self._unreachable = _offline()
        matched = _HUB_NAME.fullmatch(repository(name))
        assert matched is not None
        repo_id, self._file = matched.groups()
        self._where: dict[str, Any] = {
            "repo_id": repo_id,
            "revision": options.revision if self._own else None,
            "cache_dir": options.download_dir,
            "local_files_only": self._unreachable is not None,
        }
        self._has_tokenizer = options.tokenizer is None

    def require(self) -> None:
        """Raises ValueError if the hub cannot be reached."""
        if self._unreachable is not None:
            raise ValueError(f"the hub cannot be reached: {self._unreachable}{_hint(self._where['repo_id'])}")

    def fetch_model(self) -> Path:
        """Fetches the configuration, the tokenizer, then the weights, so that errors come before the large download."""
        if files := self._files_of_model():
            return self._fetch_files(files) / files[0]
        if self._has_tokenizer:
            self.fetch(TOKENIZER)
        return self._fetch_files(ROOT_FILES)

    def fetch_head(self) -> Path:
        return self._fetch_files([CONFIG, WEIGHTS])

    def check(self) -> Path | None:
        """Raises ValueError for a model that Oscine cannot serve. Returns the tokenizer's folder for a GGUF file, whose
        repository has none."""
        return o200k_folder() if self._files_of_model() else None

    def config(self) -> ModelConfig | None:
        """None for a repository without config.json: that of a GGUF file is in the large file."""
        try:
            return None if self._file is not None else folder_config(self.fetch(CONFIG))
        except _MissingError:
            return None

    def _fetch_files(self, patterns: Sequence[str]) -> Path:
        """The folder of the files in the root of the repository that match one of these."""
        from huggingface_hub import snapshot_download

        if self._unreachable is None:
            self._get(self._fetch_blobs, patterns=patterns)
        return Path(self._get(snapshot_download, allow_patterns=patterns, ignore_patterns=FOLDERS))

    def _files_of_model(self) -> list[str]:
        """All parts of the model in a repository that has no config.json; empty for one that has it, and is checked.

        Raises ValueError.
        """
        if self._file is not None:
            models = self._models()
            return self._parts({self._file} & models.keys(), models)
        try:
            folder_config(self.fetch(CONFIG))
            return []
        except _MissingError:
            if not (models := self._models()):
                if ADAPTER in self._get(_list_files).split("\n"):
                    raise _adapter_error(self._model) from None
                raise
        usual = {name for name in models if "mxfp4" in name.lower()}
        return self._parts(usual if len(usual) == 1 else {*models}, models)

    def _parts(self, chosen: set[str], models: dict[str, formats.Format]) -> list[str]:
        if len(chosen) != 1:
            known = shown(", ".join(sorted(models)) or "none")
            raise ValueError(f"model {self._model!r} does not say which GGUF file: owner/name/FILE, of {known}")
        (name,) = chosen
        return [part.name for part in models[name].parts(Path(name))]

    def _models(self) -> dict[str, formats.Format]:
        """The first file of each model that is no folder."""
        return formats.models_among(self._get(_list_files).split("\n"))

    def fetch(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        return Path(self._get(hf_hub_download, filename=file))

    def _fetch_blobs(
        self, repo_id: str, revision: str | None, cache_dir: str | None, patterns: Sequence[str], **_: Any
    ) -> None:
        def wanted(name: str) -> bool:
            return is_file_name(name) and any(fnmatch(name, pattern) for pattern in patterns)

        fetch_blobs(blobs_of(repo_id, revision, cache_dir, wanted), self._peers)

    def _get(self, fetch: Callable[..., Any], **what: Any) -> str:
        return _fetched(f"model {self._model!r}", self._unreachable, fetch, self._where | what)


def fetch_data(name: str, file: str) -> Path:
    """A file of a data set of the hub, or its copy in the local cache. Raises ValueError."""
    from huggingface_hub import hf_hub_download

    offline = _offline()
    where = {"repo_id": name, "filename": file, "repo_type": "dataset", "local_files_only": offline is not None}
    return Path(_fetched(f"data set {name!r}", offline, hf_hub_download, where))


def _fetched(of: str, offline: str | None, fetch: Callable[..., Any], where: dict[str, Any]) -> str:
    """What `fetch` returns. `of`: the repository, as errors name it. `offline`: why the hub cannot be asked."""
    from huggingface_hub import errors

    hint = _hint(where["repo_id"])
    of_its_library: type[Exception] = errors.HfHubHTTPError.__mro__[1]  # for HTTP: one of two
    try:
        return str(fetch(**where))
    except errors.LocalEntryNotFoundError as error:
        why = offline or str(error).splitlines()[0]
        raise _MissingError(f"{of} is not in the local cache, and the hub cannot be reached: {why}{hint}") from error
    except errors.GatedRepoError as error:
        raise ValueError(f"{of} is gated: its page on the hub says on what terms HF_TOKEN may read it") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"{of} is not on the hub, or HF_TOKEN may not read it{hint}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{of} has no --revision {where['revision']!r}") from error
    except errors.EntryNotFoundError as error:
        raise _MissingError(f"{of} has no {where['filename']}") from error
    except (of_its_library, errors.HFValidationError, OSError) as error:
        why = shown(str(error).strip().splitlines()[0])
        raise ValueError(f"{of} cannot be fetched: {why}") from error


def _hint(repo_id: str) -> str:
    """The end of an error that suggests a published model, or nothing."""
    published = _SHORT_NAMES.values()
    return "" if repo_id in published else did_you_mean(repo_id, published)


def _list_files(repo_id: str, revision: str | None, cache_dir: str | None, local_files_only: bool) -> str:
    """Names of the files of a repository, or of what is in the cache of it; one per line."""
    from huggingface_hub import HfApi, snapshot_download

    if not local_files_only:
        return "\n".join(HfApi().list_repo_files(repo_id, revision=revision))
    where: Any = {"repo_id": repo_id, "revision": revision, "cache_dir": cache_dir, "local_files_only": True}
    return "\n".join(path.name for path in Path(snapshot_download(**where, allow_patterns=[CONFIG])).iterdir())


def _offline() -> str | None:
    """The reason why the hub cannot be asked; None if it can."""
    from huggingface_hub import constants, get_session  # imported here: a machine that only measures need not have it

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_PROBE_S)
    except Exception as error:  # from either HTTP library of huggingface_hub
        return f"{constants.ENDPOINT}: {str(error) or type(error).__name__}"
    return None
