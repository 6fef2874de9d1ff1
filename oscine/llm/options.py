"""The options of an LLM: those of `oscine serve`, as keyword arguments."""

from collections.abc import Mapping
from dataclasses import replace
from os import PathLike, fspath
from typing import Any

from oscine.cli.serve.options import NAMES
from oscine.cli.serve.read_options import make_config, read_mapping
from oscine.settings.config import NANO, OPTIONS, Config
from oscine.settings.option import FileKeyError, OptionError, did_you_mean

# Options of the group "server" that concern the model, and not how HTTP reaches it.
_OF_THE_MODEL = (
    *("data-parallel-size", "enable-expert-parallel", "gpus", "expected-load", "engine-timeout"),
    *("final-headroom", "reasoning-field", "date", "seed"),
)


def read(model: str | PathLike[str], options: Mapping[str, Any], num_gpus: int) -> Config:
    """Raises ValueError that names the option. An option that is None has its default."""
    given = {name: _plain(value) for name, value in options.items() if value is not None}
    for name in given:
        _check(name)
    try:
        config = make_config([read_mapping({"model": fspath(model), **given})], num_gpus=num_gpus)
    except FileKeyError:
        raise
    except OptionError as error:
        raise FileKeyError(error.option.replace("-", "_"), error.rule) from None
    return config if config.engine.model.model != NANO else _quiet(config)


def _plain(value: Any) -> Any:
    """The value as YAML would have it."""
    if isinstance(value, PathLike):
        return fspath(value)
    return list(value) if isinstance(value, tuple) else value


def _check(name: str) -> None:
    hyphens = name.replace("_", "-")
    if hyphens not in NAMES or hyphens == "config":
        hint = did_you_mean(hyphens, OPTIONS).replace("-", "_")
        raise ValueError(f"LLM has no option {name!r}{hint}")
    declared = OPTIONS.get(hyphens)
    if declared is not None and declared.group == "server" and hyphens not in _OF_THE_MODEL:
        raise ValueError(f"{name} is an option of `oscine serve`: an LLM serves no HTTP")


def _quiet(config: Config) -> Config:
    """The embedded model is there in a moment: it has nothing to report."""
    return replace(config, engine=replace(config.engine, quiet=True))
