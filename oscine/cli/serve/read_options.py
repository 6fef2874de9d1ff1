"""How the options of `oscine serve`, given on a command line or in YAML, become a Config.

The command line wins over the file of --config, the file over the profile.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from oscine.cli.error import USAGE, CommandError, ended_by
from oscine.cli.serve.options import NAMES, PROFILE_FOLDER, SHARING
from oscine.executor.start.parts import check_parts
from oscine.settings.config import NANO, OPTIONS, Config
from oscine.settings.name import NOTES, Values, merge
from oscine.settings.option import FileKeyError, OptionError, did_you_mean
from oscine.system.extensions import is_there, lacking, load
from oscine.system.yaml_text import parse_yaml

_LAYOUT = "oscine.extensions.timing.layout:lay_out"  # of several GPUs
_NIM = "oscine.extensions.apis.conventions.nim_variables"
_SECTIONS = frozenset(name.partition(".")[0] for name in NAMES if "." in name)  # keys of a file that have keys
_WHEN_NULL = {"cuda-graph-config": "enforce-eager"}  # a section that is null -> the flag that it stands for
# With one of these the user has chosen, or a model is so small, or a feature so made, that one GPU is right.
_CHOSEN = (
    *("device", "tensor-parallel-size", "data-parallel-size", *SHARING),
    *("random-weights", "load-format", "kv-events-config", "experts-on-host"),
)

# Pairs of options that set the same thing, in either order.
_EXCLUSIONS = {pair for one in OPTIONS.values() for two in one.excludes for pair in ((one.name, two), (two, one.name))}


def _say(note: str) -> None:
    print(f"oscine: {note}", file=sys.stderr)


def read_config(
    given: Mapping[str, Any],
    note: Callable[[str], None] = _say,
    num_gpus: int | None = None,
    nim: Mapping[str, str] = MappingProxyType({}),
) -> Config:
    """`given`: the command line, by option. `note` is called for what has no effect, and for what follows from
    `num_gpus`, which a command gives that can use several. `nim`: variables of NIM, which have no effect without the
    extension that reads them. Raises CommandError."""
    layers = [dict(given)]  # the first wins
    path = layers[0].pop("config", None)
    with ended_by(ValueError, status=USAGE):
        check_exclusions(layers[0])
        if has_nim := bool(nim) and is_there(_NIM):
            layers += load(f"{_NIM}:layers_of")(nim)
        if path is not None:
            layers.append(_read_yaml(path, f"--config {path}"))
        if has_nim:
            layers.append(load(f"{_NIM}:read_profile_variable")(nim, _first(layers, "model")))
        if (profile := _first(layers, "profile")) is not None:
            layers.append(read_profile(profile))
        return make_config(layers, note, num_gpus)


def _first(layers: Sequence[Values], name: str) -> Any:
    return next((layer[name] for layer in layers if name in layer), None)


def read_profile(name: str) -> Values:
    return _read_yaml(PROFILE_FOLDER / f"{name}.yaml", f"--profile {name}")


def make_config(
    layers: Sequence[Values], note: Callable[[str], None] = lambda text: None, num_gpus: int | None = None
) -> Config:
    """The Config from layers, of which the first wins. Raises OptionError."""
    values: Values = {}
    for layer in reversed(layers):
        for text in layer.get(NOTES, ()):
            note(text)
        replaced = {theirs for ours, theirs in _EXCLUSIONS if ours in layer}
        values = {name: value for name, value in values.items() if name not in replaced} | layer
    count = _used_gpus(values, num_gpus)
    if count > 1 and not is_there(_LAYOUT):
        if "gpus" in values:
            raise OptionError("gpus", f"above 1 {lacking(_LAYOUT)}")
        note(f"1 of {count} GPUs is used: a layout of several {lacking(_LAYOUT)}")
    elif count > 1:
        layout = load(_LAYOUT)(values, count)
        for text in layout.pop(NOTES):
            note(text)
        values |= layout
    values = _dummy(values) if "load-format" in values else values
    config = Config.of(_attention_dp(values) if values.get("enable-attention-dp") else values)
    check_parts(config.engine)
    if config.server.enable_expert_parallel and config.server.data_parallel_size == 1:
        note("--enable-expert-parallel has no effect with one engine: each of its ranks has a part of every expert")
    return config


def _used_gpus(values: Values, num_gpus: int | None) -> int:
    """Those of --gpus, or all where no option says what to use, or 1. `num_gpus`: None if there can be only one."""
    given = values.get("gpus")
    if given is None:
        is_published = values.get("model", NANO) != NANO and values.get("executor") != "fake"
        return (num_gpus or 1) if is_published and not any(values.get(name) for name in _CHOSEN) else 1
    if num_gpus is None:
        raise OptionError("gpus", "is for oscine serve")
    count = num_gpus if given == "all" else int(given)
    if not 0 < count <= num_gpus:
        raise OptionError("gpus", f"must be at most the number of GPUs ({num_gpus}), not {given}")
    return count


def _attention_dp(values: Values) -> Values:
    """Ranks of other servers that have their own sequences, and share the experts: engines here."""
    ranks: int = values.get("tensor-parallel-size") or 1
    engines: int = values.get("data-parallel-size") or ranks
    if ranks not in (1, engines):
        raise OptionError("data-parallel-size", f"must be the number of ranks ({ranks}), not {engines}")
    return values | {"tensor-parallel-size": 1, "data-parallel-size": engines, "enable-expert-parallel": engines > 1}


def _dummy(values: Values) -> Values:
    """--load-format dummy: random weights in the shapes of MODEL, which keeps its name."""
    from oscine.checkpoint.hub import NANO_FOLDER

    model = values.get("model", NANO)
    published = {f"{owner}gpt-oss-{size}": size for size in ("20b", "120b") for owner in ("", "openai/")}
    shapes = str(NANO_FOLDER) if model == NANO else published.get(model, model)
    names = values.get("served-model-name") or (model,)
    kept = {name: value for name, value in values.items() if name != "revision"}  # nothing is fetched
    return kept | {"model": NANO, "random-weights": shapes, "served-model-name": names}


def check_exclusions(layer: Values) -> None:
    """Raises OptionError for two such options in one source. Of two sources, only the option that wins counts."""
    for first, second in sorted(_EXCLUSIONS):
        if first in layer and second in layer:
            raise OptionError(first, f"and --{second} exclude each other", second)


def _read_yaml(path: Path, source: str) -> Values:
    try:
        content = parse_yaml(path.read_text())
    except OSError as error:
        raise CommandError(f"{source}: {error.strerror}", USAGE) from None
    except ValueError as error:
        raise CommandError(f"{source} is not YAML: {error}", USAGE) from None
    if not isinstance(content, dict):
        raise CommandError(f"{source} must be a mapping of option names to values", USAGE)
    try:
        return read_mapping(content)
    except ValueError as error:
        raise CommandError(f"{source}: {error}", USAGE) from None


def read_mapping(content: Mapping[Any, Any]) -> Values:
    """Keys are names of options, with hyphens or underscores. Raises ValueError that names the key."""
    values: Values = {}
    names: set[str] = set()
    for key, name, value in _flatten(content):
        if name in names:
            raise ValueError(f"{key} is there twice, with hyphens and with underscores")
        names.add(name)
        merge(values, _read_key(key, name, value))
    check_exclusions(values)
    return values


def _flatten(content: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """Keys as written, as names, and their values; sections are taken apart."""
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in _SECTIONS:
            yield str(key), name, value
        elif isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", f"{name}.{str(inner).replace('_', '-')}", inner_value
        elif value is not None:
            raise FileKeyError(str(key), f"must be a mapping, not {value!r}")
        elif name in _WHEN_NULL:
            yield str(key), _WHEN_NULL[name], True


def _read_key(key: str, given: str, value: Any) -> Values:
    name = NAMES.get(given)
    if name is None:
        raise ValueError(f"unknown key {key!r}{did_you_mean(given, NAMES)}")
    if value is None and given not in OPTIONS:  # other servers' files write null for an option that is not set
        return {}
    if name.nargs == 0 and not isinstance(value, bool):
        raise FileKeyError(key, f"must be true or false, not {value!r}")
    try:
        return name.read(value)
    except OptionError as error:
        raise FileKeyError(key, error.rule) from None
