"""Which implementation each op uses: a literal table, resolved once at start.

Backends are imported when chosen, so that a machine needs only the packages of its own.
"""

from collections.abc import Mapping
from importlib import import_module

from oscine.ops.interface import Ops

# op -> backend -> "module:function"
TABLE: dict[str, dict[str, str]] = {
    "rms_norm": {"reference": "oscine.ops.norm.reference:rms_norm"},
    "linear": {"reference": "oscine.ops.linear.reference:linear"},
    "rope_and_write": {"reference": "oscine.ops.rope.reference:rope_and_write"},
    "attention": {"reference": "oscine.ops.attention.reference:attention"},
    "moe": {"reference": "oscine.ops.moe.reference:moe"},
    "sample": {"reference": "oscine.ops.sample.reference:sample"},
}

# device type -> op -> backend; "*" is every op not named
DEFAULTS: dict[str, dict[str, str]] = {
    "cpu": {"*": "reference"},
    "cuda": {"*": "reference"},
}


def choose(device_type: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """op -> backend for "cpu" or "cuda". Raises ValueError for an op, backend or device that the table lacks."""
    if device_type not in DEFAULTS:
        raise ValueError(f"device {device_type!r} is not supported: {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[device_type]
    choice = {op: defaults.get(op, defaults["*"]) for op in TABLE}
    for op, backend in (overrides or {}).items():
        if op not in TABLE:
            raise ValueError(f"there is no op {op!r}: {', '.join(TABLE)}")
        if backend not in TABLE[op]:
            raise ValueError(f"op {op!r} has no backend {backend!r}: {', '.join(TABLE[op])}")
        choice[op] = backend
    return choice


def resolve(device_type: str, overrides: Mapping[str, str] | None = None) -> Ops:
    """Raises ValueError where a chosen backend is unknown or cannot be imported; nothing falls back."""
    functions = {}
    for op, backend in choose(device_type, overrides).items():
        module, _, function = TABLE[op][backend].partition(":")
        try:
            functions[op] = getattr(import_module(module), function)
        except ImportError as error:
            raise ValueError(f"backend {backend!r} of op {op!r} cannot be loaded: {error}") from error
    return Ops(**functions)


def describe(choice: Mapping[str, str]) -> str:
    """One line for the log, for example `linear=reference, moe=triton`."""
    return ", ".join(f"{op}={backend}" for op, backend in choice.items())
