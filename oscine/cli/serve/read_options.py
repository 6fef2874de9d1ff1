"""How the options of `oscine serve`, given on a command line or in a YAML file, become a Config.

The command line wins over the file of --config, the file over the profile. A YAML file goes through the same parser as
the command line, so both have the same names and errors. Options are declared in options.py, other servers' names in
dialects.py, rules on values in oscine.config.
"""

import argparse
import dataclasses
import datetime
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from oscine.cli.error import USAGE, CommandError
from oscine.cli.parser import NOTES, HelpAll, Parser, did_you_mean
from oscine.cli.serve import dialects
from oscine.cli.serve.options import ALIASES, FLAGS, GROUPS, LISTS, NAMES, OPPOSITES, PROFILE_FOLDER, PROFILES, settings
from oscine.config import (
    NANO,
    CacheOptions,
    Config,
    EngineOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    ToolOptions,
)

_MODEL_HELP = "folder with a checkpoint, gpt-oss-20b, gpt-oss-120b, or owner/name (default: a small embedded model)"
_MODEL = ("--model", "--model-path")
_CONFIG_HELP = "YAML file whose keys are names of options; the command line wins over it"
_PROFILE_HELP = "options for a few quick answers or for many answers; a file of --config wins over it"
_HELP_ALL_HELP = "show this help with the names that other servers have for options, and exit"
_FRACTION = "kv_cache_free_gpu_memory_fraction"
_EXCLUDE = {  # fields that set the same size in two ways
    _FRACTION: ("kv_cache_bytes", "gpu_memory_utilization"),
    "kv_cache_bytes": (_FRACTION,),
    "gpu_memory_utilization": (_FRACTION,),
}


def add_options(
    parser: argparse.ArgumentParser, *, nested: bool = False, groups: Collection[str] = tuple(GROUPS)
) -> None:
    """Adds the options. One that is not given is absent from the namespace: defaults are in oscine.config.

    `nested`: also names with a dot, as in other servers' YAML files. `groups`: only these of GROUPS.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL_HELP)
    file: dict[str, Any] = {"dest": "config", "metavar": "FILE", "type": Path, "default": argparse.SUPPRESS}
    parser.add_argument("--config", **file, help=_CONFIG_HELP)
    parser.add_argument("--profile", choices=PROFILES, default=argparse.SUPPRESS, help=_PROFILE_HELP)
    for title in groups:
        group = parser.add_argument_group(title)
        for name in GROUPS[title]:
            group.add_argument(f"--{name}", **settings(name))
    names = [name for title in groups for name in GROUPS[title]]
    others = parser.add_argument_group("names of other servers")
    texts = dialects.add_dialects(others, names, nested=nested)
    if not nested:
        hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
        texts[others.add_argument("--extra-llm-api-options", **file | hidden)] = "same as --config"
        texts[others.add_argument(*_MODEL, dest="model", metavar="MODEL", **hidden)] = "same as MODEL"
        parser.add_argument("--help-all", action=HelpAll, texts=texts, default=argparse.SUPPRESS, help=_HELP_ALL_HELP)


def read_config(given: Mapping[str, Any], note: Callable[[str], None] = lambda text: None) -> Config:
    """`given`: the command line, by option name with underscores. `note` is called for options without effect.

    Raises CommandError that names the option.
    """
    layers = [dict(given)]  # the first wins
    _check_exclusions(layers[0])
    path = layers[0].pop("config", None)
    if path is not None:
        layers.append(_read_yaml(path, f"--config {path}"))
    profile = next((layer["profile"] for layer in layers if "profile" in layer), None)
    if profile is not None:
        layers.append(read_profile(profile))
    try:
        return make_config(layers, note)
    except ValueError as error:
        raise CommandError(str(error), USAGE) from None


def read_profile(name: str) -> dict[str, Any]:
    """The options of a profile, by field of the configuration."""
    return _read_yaml(PROFILE_FOLDER / f"{name}.yaml", f"--profile {name}")


def make_config(layers: Sequence[dict[str, Any]], note: Callable[[str], None] = lambda text: None) -> Config:
    """The Config from layers of options by field; the first layer wins. Raises ValueError that names the option."""
    options: dict[str, Any] = {}
    for layer in reversed(layers):
        for text in layer.pop(NOTES, ()):
            note(text)
        options = {name: value for name, value in options.items() if not _excluded(name, layer)} | layer
    if "load_format" in options:
        options |= _dummy(options)
    return _config(options)


def _dummy(options: dict[str, Any]) -> dict[str, Any]:
    """--load-format dummy: random weights in the shapes of MODEL, which keeps its name."""
    from oscine.model.hub import NANO_FOLDER

    model = options.get("model", NANO)
    published = {f"{owner}gpt-oss-{size}": size for size in ("20b", "120b") for owner in ("", "openai/")}
    shapes = str(NANO_FOLDER) if model == NANO else published.get(model, model)
    names = options.get("served_model_names") or (model,)
    return {"model": NANO, "random_weights": shapes, "served_model_names": names}


def _excluded(name: str, layer: Mapping[str, Any]) -> bool:
    return any(other in layer for other in _EXCLUDE.get(name, ()))


def _check_exclusions(layer: Mapping[str, Any]) -> None:
    """Raises CommandError for two such options in one source. Of two sources, only the option that wins counts."""
    for name in layer:
        for other in _EXCLUDE.get(name, ()):
            if other in layer:
                names = " and ".join(f"--{text.replace('_', '-')}" for text in sorted((name, other)))
                raise CommandError(f"{names} exclude each other", USAGE)


def _config(options: Mapping[str, Any]) -> Config:
    def part(kind: type, **nested: Any) -> Any:
        names = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in options.items() if name in names} | nested)

    model, cache, scheduler = part(ModelOptions), part(CacheOptions), part(SchedulerOptions)
    engine = part(EngineOptions, model=model, cache=cache, scheduler=scheduler)
    return Config(engine=engine, server=part(ServerOptions), tools=part(ToolOptions))


def _read_yaml(path: Path, source: str) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror}", USAGE) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CommandError(f"{source} is not YAML: {error}", USAGE) from None
    if not isinstance(content, dict):
        raise CommandError(f"{source} must be a mapping of option names to values", USAGE)
    try:
        return read_mapping(content)
    except CommandError as error:
        raise CommandError(f"{source}: {error}", USAGE) from None


def read_mapping(content: dict[Any, Any]) -> dict[str, Any]:
    """The options of a YAML mapping, by field of the configuration. Raises CommandError that names the key."""
    parser = Parser(prog="oscine serve", add_help=False, allow_abbrev=False)
    add_options(parser, nested=True)
    options = vars(parser.parse_args(_arguments(content)))
    _check_exclusions(options)
    return options


def _arguments(content: dict[Any, Any]) -> list[str]:
    """A YAML mapping as a command line; keys are option names, with hyphens or underscores."""
    arguments: list[str] = []
    for key, name, value in dialects.flatten(content):
        if name in dialects.NAMES or name in OPPOSITES:
            arguments += dialects.arguments(key, name, value)
        elif name in ("model", "model-path", "profile") or name in NAMES or name in ALIASES:
            arguments += _option(key, name, value)
        else:
            raise CommandError(
                f"unknown key {key!r}{did_you_mean(name, NAMES | ALIASES.keys() | dialects.NAMES)}", USAGE
            )
    return arguments


def _option(key: str, given: str, value: Any) -> list[str]:
    """One of our options with its value in a YAML file, as a command line."""
    name = ALIASES.get(given, given)
    if value is None and given != name:  # other servers' files write null for an option that is not set
        return []
    if name == "kv-events-config" and isinstance(value, dict):
        value = json.dumps(value)
    flag = name in FLAGS
    several = isinstance(value, list) and name in LISTS
    if flag != isinstance(value, bool) or not (several or isinstance(value, str | int | float | datetime.date)):
        raise CommandError(f"{key} cannot be {value!r}", USAGE)
    if flag:
        return [f"--{given}"] if value else []
    if name in ("model", "model-path"):
        return [str(value)]
    return [f"--{given}={item}" for item in (value if several else [value])]
