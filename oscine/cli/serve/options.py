"""The options of `oscine serve`, each declared once: its name, its help, what it takes, and its other names.

A declaration holds argparse's settings and these:

    aliases     names that other servers have for the option; a dot is a level of a YAML file
    opposites   flags that undo it
    default     what the help says where the default value does not explain itself

Defaults and rules on values are in oscine.config, in the field of the same name or of `dest`.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oscine.cli.serve import sizes
from oscine.cli.serve.kv_events_config import KVEventsConfig
from oscine.config import CacheOptions, EngineOptions, ModelOptions, SchedulerOptions, ServerOptions, ToolOptions

PROFILE_FOLDER = Path(__file__).parents[2] / "profiles"
PROFILES = ("low_latency", "max_throughput")
ENGINE_GROUPS = ("model", "KV cache", "scheduler")  # the groups for a command that serves no HTTP


class Collect(argparse.Action):
    """Joins a repeated option, or several values of one, into a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = (values,) if isinstance(values, str) else tuple(values or ())
        new = [part for value in given for part in ((value,) if isinstance(value, str) else value)]
        setattr(namespace, self.dest, (*getattr(namespace, self.dest, ()), *new))


def _origins(text: str) -> tuple[str, ...]:
    """One origin, or vLLM's JSON list of them."""
    if not text.startswith("["):
        return (text,)
    try:
        return tuple(map(str, json.loads(text)))
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is neither an origin nor a JSON list of them: {text!r}") from None


Declaration = dict[str, Any]

GROUPS: dict[str, dict[str, Declaration]] = {
    "model": {
        "revision": {"metavar": "REV", "help": "branch, tag or commit of a Hugging Face name", "default": "main"},
        "tokenizer": {
            "metavar": "FOLDER",
            "help": "folder, or Hugging Face name, of the tokenizer.json to use",
            "default": "that of MODEL",
            "aliases": ("tokenizer-path",),
        },
        "download-dir": {
            "metavar": "DIR",
            "help": "folder that keeps what is fetched from the Hugging Face hub",
            "default": "$HF_HOME/hub",
        },
        "random-weights": {
            "metavar": "20b|120b|FILE",
            "help": "use random weights in the shapes of a published model, or of a config.json",
        },
        "device": {
            "metavar": "DEVICE",
            "help": "device that the model runs on: cpu, cuda, cuda:1, ...",
            "default": "a GPU if there is one, else the CPU",
        },
        "dtype": {
            "choices": ["auto", "float32", "bfloat16"],
            "help": "type of the activations and of the KV cache; auto is bfloat16 on a GPU, float32 on a CPU",
        },
        "max-model-len": {
            "type": sizes.num_tokens,
            "metavar": "TOKENS",
            "help": "most tokens of a prompt and its answer together",
            "default": "the model's own limit, as far as the KV cache holds one such sequence",
            "aliases": ("max-seq-len", "context-length"),
        },
    },
    "KV cache": {
        "kv-cache-bytes": {
            "type": sizes.num_bytes,
            "metavar": "BYTES",
            "help": "size of the KV cache",
            "default": "on a GPU the memory left by weights and workspace, on a CPU 1GiB",
            "aliases": ("kv-cache-memory-bytes",),
        },
        "gpu-memory-utilization": {
            "type": float,
            "metavar": "SHARE",
            "help": "share of a GPU's memory that weights, workspace and KV cache may take together",
            "aliases": ("mem-fraction-static",),
        },
        "kv-cache-free-gpu-memory-fraction": {
            "type": float,
            "metavar": "SHARE",
            "help": "share of the GPU memory left by weights and workspace for the KV cache; excludes the two above",
            "aliases": ("free-gpu-memory-fraction", "kv-cache-config.free-gpu-memory-fraction"),
        },
        "page-size": {"type": int, "metavar": "TOKENS", "help": "tokens in a page of the KV cache"},
        "no-prefix-caching": {
            "action": "store_false",
            "dest": "prefix_caching",
            "help": "compute each prompt from its first token, without cached prefixes",
            "aliases": ("no-enable-prefix-caching", "disable-radix-cache"),
            "opposites": ("enable-prefix-caching", "kv-cache-config.enable-block-reuse"),
        },
    },
    "scheduler": {
        "max-num-seqs": {
            "type": int,
            "metavar": "N",
            "help": "most sequences that run at once",
            "aliases": ("max-batch-size", "max-running-requests"),
        },
        "max-num-batched-tokens": {
            "type": sizes.num_tokens,
            "metavar": "TOKENS",
            "help": "most tokens that are computed in one step",
            "aliases": ("max-num-tokens", "chunked-prefill-size"),
        },
        "max-waiting": {
            "type": int,
            "metavar": "N",
            "help": "most requests that wait; further ones get 503",
            "aliases": ("max-queued-requests",),
        },
        "max-queued-tokens": {
            "type": sizes.num_tokens,
            "metavar": "TOKENS",
            "help": "most prompt tokens of all requests that run or wait; further requests get 503",
        },
        "stream-interval": {"type": int, "metavar": "TOKENS", "help": "generated tokens per streamed event"},
        "no-async-scheduling": {
            "action": "store_false",
            "dest": "overlap",
            "help": "schedule a step only after the step before it is done",
            "aliases": ("disable-overlap-scheduler", "disable-overlap-schedule"),
            "opposites": ("async-scheduling",),
        },
        "enforce-eager": {
            "action": "store_false",
            "dest": "cuda_graphs",
            "help": "use no CUDA graphs",
            "aliases": ("disable-cuda-graph",),
            "opposites": ("no-enforce-eager",),
        },
    },
    "server": {
        "host": {"metavar": "ADDRESS", "help": "address to listen on"},
        "port": {"type": int, "metavar": "PORT", "help": "port to listen on; 0 is any free port"},
        "served-model-name": {
            "nargs": "+",
            "action": Collect,
            "dest": "served_model_names",
            "metavar": "NAME",
            "help": "names by which requests may call the model; * is any name",
            "default": "the name of MODEL",
        },
        "api-key": {
            "action": Collect,
            "dest": "api_keys",
            "metavar": "KEY",
            "help": "key that requests must send, in addition to OSCINE_API_KEY; the option may be repeated",
            "default": "no key is asked for",
        },
        "api-keys-file": {
            "metavar": "FILE",
            "help": "YAML file of keys with names, limits and priorities; SIGHUP reads it again",
        },
        "cache-salt-by-key": {
            "action": "store_true",
            "help": "keep the cached prefixes of each API key apart",
        },
        "ssl-certfile": {
            "metavar": "FILE",
            "help": "PEM file with the certificate chain; with it the server speaks HTTPS",
            "default": "plain HTTP",
        },
        "ssl-keyfile": {
            "metavar": "FILE",
            "help": "PEM file with the private key",
            "default": "it is in the file of the certificate",
        },
        "cors-origins": {
            "nargs": "+",
            "type": _origins,
            "action": Collect,
            "metavar": "ORIGIN",
            "help": "origins of pages whose scripts may call the server, such as https://example.org; * allows any",
            "default": "none",
            "aliases": ("allowed-origins",),
        },
        "allowed-hosts": {
            "nargs": "+",
            "action": Collect,
            "metavar": "NAME",
            "help": "further host names of a server without API keys, in addition to this machine's own; * allows any",
            "default": "none",
        },
        "root-path": {
            "metavar": "PATH",
            "help": "path below which a proxy shows the server, such as /llm; the proxy may leave it in requests",
            "default": "none",
        },
        "max-body-bytes": {
            "type": sizes.num_bytes,
            "metavar": "BYTES",
            "help": "largest body of a request; a larger one gets 413",
        },
        "max-connections": {
            "type": int,
            "metavar": "N",
            "help": "most connections that are open at once; at the limit a new one replaces the oldest idle one",
        },
        "engine-timeout": {
            "type": float,
            "dest": "engine_timeout_s",
            "metavar": "SECONDS",
            "help": "seconds without a step before a hung engine is started again; 0 disables this",
            "aliases": ("watchdog-timeout",),
        },
        "kv-events-config": {
            "action": KVEventsConfig,
            "dest": "peers",
            "metavar": "JSON",
            "help": "whether and where events of the KV cache are published for routers, in vLLM's form",
            "default": "they are not",
        },
        "reasoning-field": {
            "choices": ["reasoning", "reasoning_content", "both"],
            "help": "field of an answer that carries the reasoning",
        },
        "final-headroom": {
            "type": sizes.num_tokens,
            "metavar": "TOKENS",
            "help": "tokens of a request's limit that are reserved for the answer, however long the model reasons",
        },
        "seed": {
            "type": int,
            "metavar": "N",
            "help": "seed from which requests without a seed draw theirs",
            "default": "a random one",
            "aliases": ("random-seed",),
        },
        "date": {"metavar": "YYYY-MM-DD", "help": "current date that the model is told", "default": "the day's own"},
        "responses-db": {
            "metavar": "FILE",
            "help": "SQLite file that keeps responses; :memory: keeps them in memory",
            "default": "$XDG_STATE_HOME/oscine/responses.db; in memory for the embedded model",
        },
        "responses-max-bytes": {
            "type": sizes.num_bytes,
            "metavar": "BYTES",
            "help": "largest total size of stored responses; the least recently used ones are removed first",
        },
        "responses-max-age": {"type": float, "metavar": "SECONDS", "help": "seconds for which responses are kept"},
        "drain-s": {
            "type": float,
            "metavar": "SECONDS",
            "help": "seconds that running requests get to finish when the server is asked to stop",
        },
        "no-keep-alive-comments": {
            "action": "store_false",
            "dest": "keep_alive_comments",
            "help": "write no comments into idle streams, for clients that take a comment for an event",
        },
        "no-playground": {"action": "store_false", "dest": "playground", "help": "serve no page at /"},
        "log-level": {
            "choices": ["debug", "info", "warning", "error"],
            "help": "least severity that is logged",
            "aliases": ("uvicorn-log-level",),
        },
        "log-format": {
            "choices": ["text", "json"],
            "help": "form of the log on stderr, which has one line per request",
        },
    },
    "tools": {
        "tools": {
            "type": lambda names: tuple(names.split(",")),
            "action": Collect,
            "metavar": "NAME,...",
            "help": "built-in tools that requests may use: python, browser",
            "default": "none",
        },
        "max-tool-calls": {"type": int, "metavar": "N", "help": "most calls of built-in tools in one response"},
        "tool-timeout-s": {
            "type": float,
            "metavar": "SECONDS",
            "help": "seconds that an MCP server or the browser gets to answer",
        },
        "python-isolation": {
            "choices": ["namespaces", "none"],
            "help": "sandbox that isolates Python code from the machine; with none, only its resources are limited",
        },
        "python-timeout-s": {"type": float, "metavar": "SECONDS", "help": "seconds that Python code may run"},
        "python-memory-bytes": {
            "type": sizes.num_bytes,
            "metavar": "BYTES",
            "help": "memory for each of the up to 8 processes of a run of Python code",
        },
        "python-runs": {
            "type": int,
            "metavar": "N",
            "help": "most runs of Python code at once; further ones wait",
        },
        "browser-folder": {
            "metavar": "DIR",
            "help": "folder of the text, Markdown and HTML files that the browser searches and opens",
        },
        "browser-backend": {
            "metavar": "MODULE:NAME",
            "help": "Python object that the browser searches instead of a folder",
        },
        "mcp-servers": {
            "metavar": "FILE",
            "help": "YAML or JSON file of MCP servers: label -> command, args, env, or url, headers",
        },
        "allow-mcp-urls": {"action": "store_true", "help": "let requests name MCP servers by URL"},
    },
    "development": {
        "executor": {
            "choices": ["torch", "fake"],
            "help": "backend that computes tokens; fake writes a scripted text, to measure the server itself",
        },
        "fake-step-s": {"type": float, "metavar": "SECONDS", "help": "seconds that a step of the fake executor takes"},
    },
}

_OURS = {name: declaration for options in GROUPS.values() for name, declaration in options.items()}
NAMES = frozenset(_OURS)
FLAGS = frozenset(
    name for name, declaration in _OURS.items() if declaration.get("action") in ("store_true", "store_false")
)
LISTS = frozenset(name for name, declaration in _OURS.items() if declaration.get("action") is Collect)
ALIASES = {alias: name for name, declaration in _OURS.items() for alias in declaration.get("aliases", ())}
OPPOSITES = {flag: name for name, declaration in _OURS.items() for flag in declaration.get("opposites", ())}

_SECTIONS = (ModelOptions, CacheOptions, SchedulerOptions, EngineOptions, ServerOptions, ToolOptions)
_DEFAULTS: dict[str, Any] = {
    field.name: field.default for section in _SECTIONS for field in dataclasses.fields(section)
}


def settings(name: str) -> dict[str, Any]:
    """argparse's settings for an option. An option that is not given is absent from the namespace."""
    declaration = _OURS[name]
    own = {key: value for key, value in declaration.items() if key not in ("aliases", "opposites")}
    dest = declaration.get("dest", name.replace("-", "_"))
    return own | {"dest": dest, "default": argparse.SUPPRESS, "help": f"{declaration['help']}{_default(name, dest)}"}


def _default(name: str, field: str) -> str:
    declaration, value = _OURS[name], _DEFAULTS[field]
    said = declaration.get("default")
    if name in FLAGS or (said is None and value is None):
        return ""
    if said is None:
        said = sizes.written(value) if declaration.get("type") is sizes.num_bytes else _plain(value)
    return f" (default: {said})"


def _plain(value: object) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
