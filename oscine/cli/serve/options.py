"""The names that `oscine serve` knows, and its command line. Options are declared in oscine.settings.config.

Names of other servers for these options are declared there too; options that only other servers have are in an
extension.
"""

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

from oscine.cli.parser import HelpAll
from oscine.settings.config import OPTIONS
from oscine.settings.name import Name, Values, merge
from oscine.settings.option import Option, OptionError
from oscine.system.extensions import is_there, lacking, load

PROFILE_FOLDER = Path(__file__).parents[2] / "profiles"
PROFILES = ("low_latency", "max_throughput")
PROFILE = Option(
    None,
    "options for a few quick answers or for many answers; options that are given win over it",
    name="profile",
    choices=PROFILES,
)
SHARING = ("enable-expert-parallel", "enable-attention-dp")  # the experts, among engines
GROUPS = ("model", "KV cache", "scheduler", "server", "tools", "development")
ENGINE_GROUPS = ("model", "KV cache", "scheduler")  # the groups for a command that serves no HTTP
ALIASES = {alias: option.name for option in OPTIONS.values() for alias in option.aliases}
OPPOSITES = {flag: option.name for option in OPTIONS.values() for flag in option.opposites}
_CONFIG_HELP = "YAML file whose keys are names of options; the command line wins over it"
_HELP_ALL_HELP = "show this help with the names that other servers have for options, and exit"
_OTHERS = "oscine.extensions.apis.conventions.other_servers"  # options that only other servers have
# option -> function of its value; the extension that reads it may be missing
_READERS = {
    "kv-events-config": "oscine.extensions.kv_events.config:read_kv_events_config",
    "speculative-config": "oscine.extensions.speculation.speculative_config:read_speculative_config",
}


def _reader(option: Option) -> Callable[[Any], Values]:
    place = _READERS.get(option.name)
    if place is None:
        return lambda value: {option.name: option.read(value)}

    def read(value: Any) -> Values:
        if not is_there(place):
            raise OptionError(option.name, lacking(place))
        found: Values = load(place)(value)
        return found

    return read


def _name_of(option: Option) -> Name:
    if option.is_flag:
        return _flag(option, option.help_text, not option.default)
    return Name(option.help_text, _reader(option), option.nargs, option.value_text)


def _flag(option: Option, help: str, meaning: bool) -> Name:
    return Name(help, lambda value: {option.name: option.read(value) == meaning}, 0)


_THEIRS: dict[str, Name] = {}
_SHORT: dict[str, tuple[str, ...]] = {}
if is_there(_OTHERS):
    _THEIRS, _SHORT = (load(f"{_OTHERS}:{name}") for name in ("NAMES", "SHORT"))
OWN = {name: _name_of(option) for name, option in OPTIONS.items()} | {"profile": _name_of(PROFILE)}
NAMES: dict[str, Name] = {
    **OWN,
    **{alias: dataclasses.replace(OWN[name], help=f"same as --{name}") for alias, name in ALIASES.items()},
    **{flag: _flag(OPTIONS[name], f"undoes --{name}", OPTIONS[name].default) for flag, name in OPPOSITES.items()},
    **_THEIRS,
}


class _Give(argparse.Action):
    """Sets what a value means. An option that is not given is absent from the namespace."""

    def __init__(self, *, name: Name, **settings: Any) -> None:
        super().__init__(**settings)
        self._name = name

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        try:
            merge(vars(namespace), self._name.read(True if self.nargs == 0 else values))
        except OptionError as error:
            raise argparse.ArgumentError(self, f"it {error.rule}") from None


def _add(to: argparse._ActionsContainer, *names: str, name: Name, help: str | None = None) -> argparse.Action:
    settings: dict[str, Any] = {"nargs": name.nargs, "metavar": name.metavar, "default": argparse.SUPPRESS}
    return to.add_argument(*names, action=_Give, name=name, help=help or name.help, **settings)


def add_options(parser: argparse.ArgumentParser, *, groups: Collection[str] = GROUPS) -> None:
    """Adds the options of these groups, and other servers' names for them."""
    _add(parser, "model", name=dataclasses.replace(OWN["model"], nargs="?"))
    file: dict[str, Any] = {"dest": "config", "metavar": "FILE", "type": Path, "default": argparse.SUPPRESS}
    parser.add_argument("--config", **file, help=_CONFIG_HELP)
    _add(parser, "--profile", name=OWN["profile"])
    for title in groups:
        own = (option for option in OPTIONS.values() if option.group == title and option.name != "model")
        add_some(parser.add_argument_group(title), own)
    others = parser.add_argument_group("names of other servers")
    texts = {
        _add(others, f"--{name}", *_SHORT.get(name, ()), name=theirs, help=argparse.SUPPRESS): theirs.help
        for name, theirs in _theirs(groups).items()
        if "." not in name
    }
    texts[others.add_argument("--extra-llm-api-options", **file, help=argparse.SUPPRESS)] = "same as --config"
    parser.add_argument("--help-all", action=HelpAll, texts=texts, default=argparse.SUPPRESS, help=_HELP_ALL_HELP)


def add_some(to: argparse._ActionsContainer, options: Iterable[Option]) -> None:
    """Adds a few options to another command."""
    for option in options:
        _add(to, f"--{option.name}", name=_name_of(option))


def _theirs(groups: Collection[str]) -> dict[str, Name]:
    """The names of other servers, which --help leaves out."""
    known = {name: NAMES[name] for name, ours in (ALIASES | OPPOSITES).items() if OPTIONS[ours].group in groups}
    return {"model": dataclasses.replace(OWN["model"], help="same as MODEL"), **known, **_THEIRS}
