"""Options of other servers that `oscine serve` knows and has no option for: what becomes of each.

One is accepted without effect, which is said, or refused because it would change results or capacity in a way that is
not there. Other names of options of ours are declared with those. Names are written with hyphens here; command line and
YAML take underscores too. A dot is a level of a YAML file.
"""

import argparse
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from oscine.cli.error import USAGE, CommandError
from oscine.cli.options import ALIASES, OPPOSITES, settings
from oscine.cli.parser import add_note

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


NAMES = frozenset((*MUST_BE_ONE, *MUST_BE, *NOT_YET, *IGNORED, *VALUED))


def add_dialects(
    group: argparse._ArgumentGroup, options: Collection[str], *, nested: bool
) -> dict[argparse.Action, str]:
    """Adds all of the above, and what `options`, some of ours, are called elsewhere. Returns the help of each.

    `nested`: those with a dot too, for a YAML file. None is shown by --help.
    """
    texts: dict[argparse.Action, str] = {}

    def add(name: str, text: str, **settings: Any) -> None:
        if nested or "." not in name:
            hidden = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
            texts[group.add_argument(f"--{name}", **settings | hidden)] = text

    for theirs, ours in ALIASES.items():
        if ours in options:
            add(theirs, f"same as --{ours}", **settings(ours))
    for theirs, ours in OPPOSITES.items():
        if ours in options:
            declared = settings(ours)
            add(theirs, f"undoes --{ours}", action="store_const", const=True, dest=declared["dest"])
    for theirs, feature in MUST_BE_ONE.items():
        add(theirs, f"must be 1: {feature} is not available yet", action=_MustBeOne, feature=feature, metavar="N")
    for theirs, allowed in MUST_BE.items():
        add(theirs, f"must be {' or '.join(allowed)}", action=_MustBe, allowed=allowed, metavar="NAME")
    for theirs, feature in NOT_YET.items():
        add(theirs, f"refused: {feature} is not available yet", action=_NotYet, feature=feature, metavar="VALUE")
    for theirs, why in IGNORED.items():
        add(theirs, f"has no effect: {why}", action=_Ignored, nargs=0, why=why)
    for theirs, why in VALUED.items():
        add(theirs, f"has no effect: {why}", action=_Ignored, why=why, metavar="VALUE")
    return texts


def flatten(content: Mapping[Any, Any]) -> Iterator[tuple[str, str, Any]]:
    """The keys of a YAML file as written, as names of options, and their values; sections are taken apart."""
    known = (*NAMES, *ALIASES, *OPPOSITES)
    sections = {name.partition(".")[0] for name in known if "." in name}
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
    if name in IGNORED or name in OPPOSITES:
        if not isinstance(value, bool):
            raise CommandError(f"{key} cannot be {value!r}", USAGE)
        stands_for = name if value else OPPOSITES.get(name)
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
        add_note(namespace, f"{name} has no effect: {self._why}")
