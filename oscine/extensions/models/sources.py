"""Which models a server has on demand: those that --models names, and those in --models-dir.

The folder may have folders and GGUF files, each a model with its own name, and repositories in the layout of Hugging
Face's cache, into which downloads go.
"""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from oscine.checkpoint.hub import CONFIG, check_local, repository, shapes_of
from oscine.model.tensors import size_of
from oscine.settings.config import NANO, Config, EngineOptions
from oscine.settings.option import OptionError

logger = logging.getLogger(__name__)

_CACHED = "models--"  # in the names of folders of Hugging Face's cache
_OLLAMA = re.compile(r"(gpt-oss(?:-safeguard)?):(\d+b)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Source:
    """A model that can be loaded."""

    name: str  # for clients
    options: EngineOptions
    path: Path | None = None  # in --models-dir, which /api/delete removes

    def num_bytes(self) -> int | None:
        """Of its weights; None if they are not known. May read or fetch its configuration."""
        try:
            config = shapes_of(self.options.model)
        except ValueError:
            return None
        return None if config is None else size_of(config, on_gpu=False).checkpoint_bytes


def sources_of(config: Config) -> list[Source]:
    """Raises OptionError for a model that cannot be served, and for two of one name."""
    options = config.models
    if config.engine.model.model != NANO:
        raise OptionError("models", "names all models: MODEL before it excludes it", "model")
    if config.server.data_parallel_size > 1:
        raise OptionError("models", f"needs --data-parallel-size 1, not {config.server.data_parallel_size}")
    if config.server.served_model_names:
        raise OptionError("served-model-name", "is for one model, not for --models or --models-dir", "models")
    found = [_named(name, config.engine) for name in options.models]
    if options.models_dir is not None:
        folder = Path(options.models_dir)
        if not folder.is_dir():
            raise OptionError("models-dir", f"must be a folder, not {options.models_dir!r}")
        found += in_folder(folder, config.engine)
    names = [source.name for source in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise OptionError("models", f"has two models with the name {twice[0]!r}")
    if unknown := sorted({*options.pinned_models} - {*names}):
        raise OptionError("pinned-models", f"must be names of these models, not {unknown[0]!r}")
    return found


def _named(name: str, engine: EngineOptions) -> Source:
    if engine.model.random_weights is not None:  # of one shape, under any names
        return Source(name, engine)
    options = replace(engine, model=replace(engine.model, model=name))
    try:
        check_local(options.model)
    except ValueError as error:
        raise OptionError("models", f"has {name!r}: {error}") from None
    return Source(Path(name).resolve().name if Path(name).is_dir() else name, options)


def in_folder(folder: Path, engine: EngineOptions) -> Iterator[Source]:
    """The models in it by their names. Any other file or folder is left out, with a line in the log if it looks like
    a model."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        source = _at(path, folder, engine)
        if source is None:
            continue
        try:
            check_local(source.options.model)
        except ValueError as error:
            logger.warning("%s is not served: %s", path, error)
        else:
            yield source


def _at(path: Path, folder: Path, engine: EngineOptions) -> Source | None:
    if path.is_dir() and path.name.startswith(_CACHED):
        name = path.name.removeprefix(_CACHED).replace("--", "/", 1)
        has_model = any(_has_model(snapshot) for snapshot in path.glob("snapshots/*"))
        return downloaded(name, folder, engine) if has_model else None
    if _has_model(path):
        model = replace(engine.model, model=str(path))
        return Source(path.name if path.is_dir() else path.stem, replace(engine, model=model), path)
    return None


def _has_model(path: Path) -> bool:
    if path.is_dir():
        return (path / CONFIG).exists() or any(path.glob("*.gguf"))
    return path.suffix == ".gguf"


def downloaded(name: str, folder: Path, engine: EngineOptions) -> Source:
    """A repository of the hub whose files are, or will be, in the folder."""
    model = replace(engine.model, model=name, download_dir=str(folder))
    return Source(name, replace(engine, model=model), folder / f"{_CACHED}{name.replace('/', '--')}")


def hub_name(name: str) -> str:
    """The name on the hub for one that a client wants: also gpt-oss:20b and hf.co/owner/name."""
    for prefix in ("hf.co/", "huggingface.co/"):
        name = name.removeprefix(prefix)
    if published := _OLLAMA.fullmatch(name):
        return "openai/{}-{}".format(*published.groups())
    return repository(name)
