"""Options of vLLM and TensorRT-LLM that `oscine serve` takes under their names.

Knows names, and what becomes of each: another name of one of ours, accepted without effect (which is said), or refused
because it would change results or capacity in a way that is not there yet. Must not know what our options mean. Names
are written with hyphens here; command line and YAML take underscores too. A dot is a level of a YAML file.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from oscine.cli.error import USAGE, CommandError

NOTES = "notes"  # in the namespace: what was accepted without effect, and why

# Theirs -> ours.
RENAMED = {
    "max-batch-size": "max-num-seqs",
    "max-num-tokens": "max-num-batched-tokens",
    "max-seq-len": "max-model-len",
    "free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
    "kv-cache-config.free-gpu-memory-fraction": "kv-cache-free-gpu-memory-fraction",
}

# Flags that are the opposite of one of ours: theirs -> the field of the configuration that they set, and to what.
FLAGS = {
    "enable-prefix-caching": ("prefix_caching", True),
    "no-enable-prefix-caching": ("prefix_caching", False),
    "kv-cache-config.enable-block-reuse": ("prefix_caching", True),
    "async-scheduling": ("overlap", True),
    "disable-overlap-scheduler": ("overlap", False),
}

_SWITCHES = {"prefix_caching": "--no-prefix-caching", "overlap": "--no-async-scheduling"}  # how we say no to it

# What a flag that is false in a YAML file stands for.
WHEN_FALSE = {
    "enable-prefix-caching": "no-prefix-caching",
    "kv-cache-config.enable-block-reuse": "no-prefix-caching",
    "async-scheduling": "no-async-scheduling",
}

# A section of a YAML file that is null -> the option that it stands for.
WHEN_NULL = {"cuda-graph-config": "enforce-eager"}

# More than one of these would be a feature that is not there yet.
MUST_BE_ONE = {
    "tensor-parallel-size": "tensor parallelism",
    "tp-size": "tensor parallelism",
    "pipeline-parallel-size": "pipeline parallelism",
    "pp-size": "pipeline parallelism",
    "data-parallel-size": "data parallelism",
    "ep-size": "expert parallelism",
    "moe-expert-parallel-size": "expert parallelism",
    "max-beam-width": "beam search",
}

# The values that mean what is done anyway.
MUST_BE = {
    "backend": ("pytorch",),
    "kv-cache-dtype": ("auto",),
    "kv-cache-config.dtype": ("auto",),
    "quantization": ("mxfp4",),
}

NOT_YET = {
    "speculative-config": "speculative decoding",
    "speculative-model": "speculative decoding",
    "kv-cache-config.max-tokens": "a KV cache counted in tokens",
    "kv-cache-config.host-cache-size": "a KV cache in host memory",
}

_GRAPHS = "graphs cover every batch up to --max-num-seqs, with padding"
_KERNELS = "Oscine has kernels of its own"
_HARMONY = "harmony is always parsed"
_PAGES = "see --page-size"
_ONE_GPU = "there is one GPU"

# Without effect: theirs -> why. Those in VALUED take a value, the others are flags.
IGNORED = {
    "trust-remote-code": "no code of a model is ever run",
    "enable-mixed-sampler": "requests that sample differently always share a step",
    "print-iter-log": "see /metrics",
    "enable-chunked-prefill": "prompts are always computed in chunks",
    "enable-attention-dp": _ONE_GPU,
    "enable-expert-parallel": _ONE_GPU,
    "enable-auto-tool-choice": _HARMONY,
    "cuda-graph-config.enable-padding": _GRAPHS,
    "attention-dp-config.enable-balance": _ONE_GPU,
}
VALUED = {
    "moe-backend": _KERNELS,
    "moe-config.backend": _KERNELS,
    "attention-backend": _KERNELS,
    "cuda-graph-config.max-batch-size": _GRAPHS,
    "cuda-graph-config.batch-sizes": _GRAPHS,
    "attention-dp-config.batching-wait-iters": _ONE_GPU,
    "attention-dp-config.timeout-iters": _ONE_GPU,
    "num-postprocess-workers": "outputs are always processed beside the engine",
    "tool-call-parser": _HARMONY,
    "reasoning-parser": _HARMONY,
    "block-size": _PAGES,
    "kv-cache-config.tokens-per-block": _PAGES,
}


def add_dialects(parser: argparse.ArgumentParser, options: dict[str, dict[str, Any]], *, nested: bool) -> None:
    """Adds all of the above; `options`: ours, by name. `nested`: those with a dot too, for a YAML file."""
    group = parser.add_argument_group("names of other servers")

    def add(name: str, **settings: Any) -> None:
        if nested or "." not in name:
            group.add_argument(f"--{name}", default=argparse.SUPPRESS, **settings)

    for theirs, ours in RENAMED.items():
        dest = ours.replace("-", "_")
        add(theirs, **{"dest": dest, **options[ours], "help": f"--{ours}"})
    for theirs, (field, value) in FLAGS.items():
        what = f"undoes {_SWITCHES[field]} of a file" if value else _SWITCHES[field]
        add(theirs, action="store_const", const=value, dest=field, help=what)
    for theirs, feature in MUST_BE_ONE.items():
        add(theirs, action=_MustBeOne, feature=feature, metavar="N", help=f"only 1: no {feature} yet")
    for theirs, allowed in MUST_BE.items():
        add(theirs, action=_MustBe, allowed=allowed, metavar="NAME", help=f"only {' or '.join(allowed)}")
    for theirs, feature in NOT_YET.items():
        add(theirs, action=_NotYet, feature=feature, metavar="VALUE", help=f"refused: no {feature} yet")
    for theirs, why in IGNORED.items():
        add(theirs, action=_Ignored, nargs=0, why=why, help=f"no effect: {why}")
    for theirs, why in VALUED.items():
        add(theirs, action=_Ignored, why=why, metavar="VALUE", help=f"no effect: {why}")


def names() -> set[str]:
    """All of the above."""
    return {*RENAMED, *FLAGS, *MUST_BE_ONE, *MUST_BE, *NOT_YET, *IGNORED, *VALUED}


def flatten(content: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of a YAML file as written, as names of options, and their values; sections are taken apart."""
    sections = {name.partition(".")[0] for name in names() if "." in name}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in sections:
            yield str(key), name, value
        elif isinstance(value, Mapping):
            for inner, inner_value in value.items():
                yield f"{key}.{inner}", f"{name}.{str(inner).replace('_', '-')}", inner_value
        elif value is not None:
            raise CommandError(f"{key} must be a mapping, not {value!r}", USAGE)
        elif name in WHEN_NULL:
            yield str(key), WHEN_NULL[name], True


def arguments(key: str, name: str, value: Any) -> list[str]:
    """One of these names with its value in a YAML file, as a command line; null is as if it were not there."""
    if value is None:
        return []
    if name in IGNORED or name in FLAGS:
        if not isinstance(value, bool):
            raise CommandError(f"{key} cannot be {value!r}", USAGE)
        stands_for = name if value else WHEN_FALSE.get(name)
        return [] if stands_for is None else [f"--{stands_for}"]
    return [f"--{name}={value}"]


class _Checked(argparse.Action, ABC):
    """An option that leaves nothing in the namespace, once it has passed."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        self.check(values, namespace)

    @abstractmethod
    def check(self, value: str | Sequence[Any] | None, namespace: argparse.Namespace) -> None:
        """Raises argparse.ArgumentError for a value that does not pass."""


class _MustBeOne(_Checked):
    def __init__(self, feature: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._feature = feature

    def check(self, value: str | Sequence[Any] | None, namespace: argparse.Namespace) -> None:
        if value != "1":
            raise argparse.ArgumentError(self, f"{self._feature} is not available yet: it must be 1, not {value}")


class _MustBe(_Checked):
    def __init__(self, allowed: tuple[str, ...], **settings: Any) -> None:
        super().__init__(**settings)
        self._allowed = allowed

    def check(self, value: str | Sequence[Any] | None, namespace: argparse.Namespace) -> None:
        if value not in self._allowed:
            raise argparse.ArgumentError(self, f"it must be {' or '.join(self._allowed)}, not {value}")


class _NotYet(_Checked):
    def __init__(self, feature: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._feature = feature

    def check(self, value: str | Sequence[Any] | None, namespace: argparse.Namespace) -> None:
        raise argparse.ArgumentError(self, f"{self._feature} is not available yet")


class _Ignored(_Checked):
    """Leaves a note instead."""

    def __init__(self, why: str, **settings: Any) -> None:
        super().__init__(**settings)
        self._why = why

    def check(self, value: str | Sequence[Any] | None, namespace: argparse.Namespace) -> None:
        name = self.option_strings[0].removeprefix("--").replace("-", "_")
        note = f"{name} has no effect: {self._why}"
        setattr(namespace, NOTES, (*getattr(namespace, NOTES, ()), note))
