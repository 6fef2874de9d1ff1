"""The options of `oscine serve` in vLLM's dialect, and how they and a YAML file become a Config.

Knows names and types; rules on values live in oscine.config, and other servers' names in dialects.py. A YAML file goes
through the same parser as the command line, so both know the same names and give the same errors. The command line wins
over the file of --config, the file over the profile.
"""

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from oscine.cli import dialects
from oscine.cli.error import USAGE, CommandError
from oscine.cli.kv_events_config import KVEventsConfig
from oscine.config import (
    CacheOptions,
    Config,
    EngineOptions,
    ModelOptions,
    SchedulerOptions,
    ServerOptions,
    ToolOptions,
)


class Parser(argparse.ArgumentParser):
    """Raises instead of printing its usage and exiting, so that an error is one line that can say whence it came."""

    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message} (see {self.prog} --help)", USAGE)

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Takes --max_num_seqs for --max-num-seqs. What is unknown is the error of the command that it was given to."""
        given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(list(_with_hyphens(given)), namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _with_hyphens(arguments: Sequence[str]) -> Iterator[str]:
    options = True
    for argument in arguments:
        options = options and argument != "--"
        if options and argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        yield argument


def add_options(
    parser: argparse.ArgumentParser, *, nested: bool = False, groups: Collection[str] | None = None
) -> None:
    """Every option is absent from the namespace unless it is given: defaults live in oscine.config.

    `nested`: also names with a dot, as other servers' YAML files have them. `groups`: only these, of _GROUPS.
    """
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help=_MODEL_HELP)
    files = ("--config", "--extra-llm-api-options")
    parser.add_argument(*files, dest="config", metavar="FILE", type=Path, default=argparse.SUPPRESS, help=_CONFIG_HELP)
    parser.add_argument("--profile", choices=PROFILES, default=argparse.SUPPRESS, help=_PROFILE_HELP)
    for title, options in _GROUPS.items():
        if groups is not None and title not in groups:
            continue
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            group.add_argument(f"--{name}", default=argparse.SUPPRESS, **settings)
    ours = {name: settings for options in _GROUPS.values() for name, settings in options.items()}
    dialects.add_dialects(parser, ours, nested=nested)


def read_config(given: Mapping[str, Any], note: Callable[[str], None] = lambda text: None) -> Config:
    """`given` is the command line, by option name with underscores; `note` hears of what has no effect.

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
    """Of options by field; the first layer wins. Raises ValueError that names the option."""
    options: dict[str, Any] = {}
    for layer in reversed(layers):
        for text in layer.pop(dialects.NOTES, ()):
            note(text)
        options = {name: value for name, value in options.items() if not _excluded(name, layer)} | layer
    return _config(options)


def _excluded(name: str, layer: Mapping[str, Any]) -> bool:
    return any(other in layer for other in _EXCLUDE.get(name, ()))


def _check_exclusions(layer: Mapping[str, Any]) -> None:
    """Two such options of one source contradict each other; of two sources, the one that wins stands alone."""
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
    known = {"model", "profile", *(name for options in _GROUPS.values() for name in options)}
    foreign = dialects.names()
    arguments: list[str] = []
    for key, name, value in dialects.flatten(content):
        if name in foreign:
            arguments += dialects.arguments(key, name, value)
            continue
        if name not in known:
            raise CommandError(f"unknown key {key!r}", USAGE)
        if name == "kv-events-config" and isinstance(value, dict):
            value = json.dumps(value)
        flag = name in _FLAGS
        several = isinstance(value, list) and name in _LISTS
        if flag != isinstance(value, bool) or not (several or isinstance(value, str | int | float | datetime.date)):
            raise CommandError(f"{key} cannot be {value!r}", USAGE)
        if flag:
            arguments += [f"--{name}"] if value else []
        elif name == "model":
            arguments.append(str(value))
        else:
            values = value if isinstance(value, list) else [value]
            arguments += [f"--{name}={item}" for item in values]
    return arguments


class _Collect(argparse.Action):
    """Joins a repeated option, or several values of one, into a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        new = (values,) if isinstance(values, str) else tuple(values or ())
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *new))


_MODEL_HELP = "a folder with a checkpoint, a Hugging Face name, or nothing for the embedded model"
_CONFIG_HELP = "YAML file whose keys are the names of these options; the command line wins"
_PROFILE_HELP = "options for a few quick answers or for many; a file of --config wins"
PROFILE_FOLDER = Path(__file__).parents[1] / "profiles"
PROFILES = ("low_latency", "max_throughput")
ENGINE_GROUPS = ("model", "KV cache", "scheduler")  # what a command needs that serves no HTTP
_Options = dict[str, dict[str, Any]]

_GROUPS: dict[str, _Options] = {
    "model": {
        "revision": {"metavar": "REV", "help": "branch, tag or commit of a Hugging Face name"},
        "random-weights": {"metavar": "20b|120b|FILE", "help": "random weights at the true shapes of a config.json"},
        "device": {"metavar": "DEVICE", "help": "where the model runs, cpu or cuda (auto: cuda if there is a GPU)"},
        "dtype": {
            "choices": ["auto", "float32", "bfloat16"],
            "help": "of activations and the KV cache (auto: bfloat16 on a GPU, float32 on a CPU)",
        },
        "max-model-len": {"type": int, "metavar": "TOKENS", "help": "prompt and answer together (the model's own)"},
    },
    "KV cache": {
        "kv-cache-bytes": {
            "type": int,
            "metavar": "BYTES",
            "help": "memory for the KV cache (on a GPU what is left, on a CPU 1 GiB)",
        },
        "gpu-memory-utilization": {
            "type": float,
            "metavar": "SHARE",
            "help": "of a GPU's memory that weights, workspace and KV cache may take (0.92)",
        },
        "kv-cache-free-gpu-memory-fraction": {
            "type": float,
            "metavar": "SHARE",
            "help": "of a GPU's memory that weights and workspace leave, for the KV cache; instead of the two above",
        },
        "page-size": {"type": int, "metavar": "TOKENS", "help": "of a page of the KV cache (64)"},
        "no-prefix-caching": {
            "action": "store_false",
            "dest": "prefix_caching",
            "help": "compute every prompt from its first token",
        },
    },
    "scheduler": {
        "max-num-seqs": {"type": int, "metavar": "N", "help": "sequences that run at once (64)"},
        "max-num-batched-tokens": {"type": int, "metavar": "TOKENS", "help": "computed in one step (1024)"},
        "max-waiting": {"type": int, "metavar": "N", "help": "requests that may wait; more get 503 (2048)"},
        "max-queued-tokens": {
            "type": int,
            "metavar": "TOKENS",
            "help": "in the prompts of all requests that run or wait; more get 503 (8388608)",
        },
        "stream-interval": {"type": int, "metavar": "TOKENS", "help": "generated a streamed event (1)"},
        "no-async-scheduling": {
            "action": "store_false",
            "dest": "overlap",
            "help": "schedule a step only when the one before it is done",
        },
        "enforce-eager": {"action": "store_false", "dest": "cuda_graphs", "help": "never use CUDA graphs"},
    },
    "server": {
        "host": {"metavar": "ADDRESS", "help": "to listen on (127.0.0.1)"},
        "port": {"type": int, "metavar": "PORT", "help": "to listen on; 0 for a free one (8000)"},
        "served-model-name": {
            "nargs": "+",
            "action": _Collect,
            "dest": "served_model_names",
            "metavar": "NAME",
            "help": "what requests may call the model; several are allowed",
        },
        "api-key": {
            "action": _Collect,
            "dest": "api_keys",
            "metavar": "KEY",
            "help": "that requests must show; may be repeated (also: OSCINE_API_KEY)",
        },
        "api-keys-file": {
            "metavar": "FILE",
            "help": "YAML: keys with names, limits and priorities; SIGHUP reads it again",
        },
        "ssl-certfile": {"metavar": "FILE", "help": "PEM certificate chain: serve HTTPS"},
        "ssl-keyfile": {"metavar": "FILE", "help": "PEM private key (in the file of the certificate)"},
        "cors-origins": {
            "nargs": "+",
            "action": _Collect,
            "metavar": "ORIGIN",
            "help": "from which pages in browsers may call, such as https://example.org; * for any",
        },
        "max-body-bytes": {"type": int, "metavar": "BYTES", "help": "of a request; a larger one gets 413 (4 MiB)"},
        "max-connections": {"type": int, "metavar": "N", "help": "open at once; more get 503 (4096)"},
        "engine-timeout": {
            "type": float,
            "dest": "engine_timeout_s",
            "metavar": "SECONDS",
            "help": "without a step, after which a hung engine is started again; 0: never (900)",
        },
        "kv-events-config": {
            "action": KVEventsConfig,
            "metavar": "JSON",
            "help": "vLLM's: whether, and where, events of the KV cache are published for routers (they are not)",
        },
        "reasoning-field": {
            "choices": ["reasoning", "reasoning_content", "both"],
            "help": "where answers carry the reasoning (reasoning)",
        },
        "final-headroom": {
            "type": int,
            "metavar": "TOKENS",
            "help": "of a budget that are kept for the answer: reasoning ends there (0)",
        },
        "date": {"metavar": "YYYY-MM-DD", "help": "that the model is told (each day's own)"},
        "responses-db": {
            "metavar": "FILE",
            "help": "that keeps responses, or :memory: (for a published model $XDG_STATE_HOME/oscine/responses.db)",
        },
        "responses-max-bytes": {
            "type": int,
            "metavar": "BYTES",
            "help": "of responses that are kept; those used longest ago go first (1 GiB)",
        },
        "responses-max-age": {"type": float, "metavar": "SECONDS", "help": "that responses are kept (30 days)"},
        "drain-s": {"type": float, "metavar": "SECONDS", "help": "that SIGTERM gives running requests (30)"},
        "no-playground": {"action": "store_false", "dest": "playground", "help": "serve no page at /"},
        "log-level": {"choices": ["debug", "info", "warning", "error"], "help": "(info)"},
        "log-format": {"choices": ["text", "json"], "help": "of the log on stderr, one line a request (text)"},
    },
    "tools": {
        "tools": {
            "type": lambda names: tuple(names.split(",")),
            "action": _Collect,
            "metavar": "NAME,...",
            "help": "built-in tools that requests may use: python, browser (none)",
        },
        "max-tool-calls": {"type": int, "metavar": "N", "help": "of built-in tools in one response (32)"},
        "tool-timeout-s": {"type": float, "metavar": "SECONDS", "help": "for MCP servers and the browser (60)"},
        "python-isolation": {
            "choices": ["namespaces", "none"],
            "help": "what keeps code from the machine; none: only limits on it (namespaces)",
        },
        "python-timeout-s": {"type": float, "metavar": "SECONDS", "help": "that code may run (30)"},
        "python-memory-bytes": {"type": int, "metavar": "BYTES", "help": "for each of up to 8 processes (512 MiB)"},
        "python-runs": {"type": int, "metavar": "N", "help": "of code at once; further ones wait (4)"},
        "browser-folder": {"metavar": "DIR", "help": "with the text, Markdown and HTML files that the browser knows"},
        "browser-backend": {"metavar": "MODULE:NAME", "help": "what the browser searches instead of a folder"},
        "mcp-servers": {"metavar": "FILE", "help": "YAML or JSON: label -> command, args, env, or url, headers"},
        "allow-mcp-urls": {"action": "store_true", "help": "let requests name MCP servers by URL"},
    },
    "development": {
        "executor": {"choices": ["torch", "fake"], "help": "fake: scripted tokens, to measure the server itself"},
        "fake-step-s": {"type": float, "metavar": "SECONDS", "help": "that a step of the fake executor takes (0)"},
    },
}
_FLAGS = {"no-prefix-caching", "no-async-scheduling", "enforce-eager", "no-playground", "allow-mcp-urls"}
_LISTS = {"served-model-name", "api-key", "cors-origins", "tools"}
_FRACTION = "kv_cache_free_gpu_memory_fraction"
_EXCLUDE = {  # fields that size the same thing in two ways
    _FRACTION: ("kv_cache_bytes", "gpu_memory_utilization"),
    "kv_cache_bytes": (_FRACTION,),
    "gpu_memory_utilization": (_FRACTION,),
}
