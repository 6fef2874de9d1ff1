"""Which implementation each op uses: two literal tables, of backends and of platforms, resolved once at start.

Backends are imported when chosen, so that a machine needs only the packages of its own. A function that has a first
parameter `target` is bound to the Target.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import partial
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

import torch

from oscine.ops.interface import Ops, Shapes, Use
from oscine.ops.platforms import blackwell, blackwell_rtx, cuda, hopper, native, reference, rocm
from oscine.ops.platforms.apart import tried_apart
from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target

ACROSS = "oscine.extensions.parallel.comm.ops"  # the ops of one of several ranks
NORMS = ("rms_norm", "norm_qkv", "norm_route")

# op -> backend -> its module, which has a function of the op's name, and <op>_use if it serves some steps only
TABLE: dict[str, dict[str, str]] = {
    "rms_norm": {"reference": "norm.reference", "native": "norm.native", "triton": "norm.triton"},
    "norm_qkv": {"reference": "qkv.reference", "native": "qkv.native", "triton": "qkv.triton", "hopper": "qkv.hopper"},
    "attention": {
        "reference": "attention.reference",
        "native": "attention.native",
        "triton": "attention.triton",
        "hopper": "attention.hopper",
        "blackwell": "attention.blackwell",
    },
    "out_proj": {
        "reference": "linear.reference",
        "native": "linear.native",
        "triton": "linear.reference",
        "hopper": "linear.hopper",
    },
    "norm_route": {
        "reference": "norm.reference",
        "native": "norm.native",
        "triton": "norm.triton",
        "hopper": "norm.hopper",
    },
    "moe": {
        "reference": "moe.reference",
        "native": "moe.native",
        "triton": "moe.triton",
        "hopper": "moe.hopper",
        "blackwell": "moe.blackwell",
        "blackwell_rtx": "moe.blackwell_rtx",
    },
    "embed": {"reference": "embed.reference", "native": "embed.native", "triton": "embed.triton"},
    "lm_head": {
        "reference": "linear.reference",
        "native": "linear.native",
        "triton": "linear.triton",
        "hopper": "linear.hopper",
    },
    "sample": {"reference": "sample.reference", "triton": "sample.triton"},
    # made of the chosen lm_head and sample
    "chooser": {"reference": "choose.reference", "native": "choose.native", "screened": "choose.hopper"},
    "choose_few": {"reference": "choose.few", "native": "choose.native"},
    "prepare_step": {"reference": "step.reference", "native": "step.native", "triton": "step.triton"},
}
# op -> other functions of the same module. embed_part, best and best_of_few are for one of several ranks (ACROSS).
BESIDE = {
    "embed": ("embed_part", "prepare_embedding"),
    "out_proj": ("prepare_dense", "prepare_projection"),
    "moe": ("prepare_experts",),
    "sample": ("best",),
    "choose_few": ("best_of_few",),
    "prepare_step": ("accept",),
}

# Of those that match a target, the first one serves it.
PLATFORMS = (
    *(native.PLATFORM, reference.PLATFORM, hopper.PLATFORM, blackwell.PLATFORM, blackwell_rtx.PLATFORM),
    *(rocm.PLATFORM, cuda.PLATFORM),
)
_NAMES = ", ".join(platform.name for platform in PLATFORMS)


def platform_of(target: Target, dtype: torch.dtype = torch.bfloat16) -> Platform:
    """dtype: of activations. Raises ValueError for a device that no platform matches."""
    for platform in PLATFORMS:
        if platform.matches(target, dtype):
            return platform
    device = f"GPU {target.architecture}" if target.architecture else f"device {target.device.type!r}"
    raise ValueError(f"{device} is not supported: {_NAMES}")


def after_trial(
    platform: Platform,
    target: Target,
    report: Callable[[str], None],
    tried: Callable[[Platform, Target], str | None] = tried_apart,
) -> tuple[Platform, Target]:
    """The same; or where the trial of the platform finds an error the portable kernels, with exact activations.

    Then `report` is called with a line for the log. `tried`: what is wrong, in words.
    """
    if (wrong := tried(platform, target)) is None:
        return platform, target
    report(
        f"warning: the kernels of platform {platform.name} are not used: {wrong}; experts multiply exact activations"
    )
    return cuda.PLATFORM, replace(target, activation_dtype="auto")


def named(name: str) -> Platform:
    """Raises ValueError."""
    for platform in PLATFORMS:
        if platform.name == name:
            return platform
    raise ValueError(f"there is no platform {name!r}: {_NAMES}")


def choose(platform: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """op -> backend. Raises ValueError for an op, backend or platform that the tables lack; nothing falls back."""
    defaults = named(platform).backends
    choice = {op: defaults.get(op, defaults["*"]) for op in TABLE} | dict(overrides or {})
    for op, backend in choice.items():
        if op not in TABLE:
            raise ValueError(f"there is no op {op!r}: {', '.join(TABLE)}")
        if backend not in TABLE[op]:
            raise ValueError(f"op {op!r} has no backend {backend!r}: {', '.join(TABLE[op])}")
    return choice


def resolve(target: Target, choice: Mapping[str, str], *, leave_choice: bool = True) -> Ops:
    """The chosen backends (see choose), bound to the target. Raises ValueError where one cannot be imported.

    leave_choice: the moe op may choose the experts of a single token. False where other code reads their ids first.
    """
    functions: dict[str, Any] = {}
    for op, backend in choice.items():
        try:
            module = _module(op, backend)
        except ImportError as error:
            raise ValueError(f"backend {backend!r} of op {op!r} cannot be loaded: {error}") from error
        for name in (op, *BESIDE.get(op, ())):
            functions[name] = _bound(getattr(module, name), target)
    can_leave = choice["norm_route"] == choice["moe"] and getattr(_module("moe", choice["moe"]), "CAN_CHOOSE", False)
    if leave_choice and can_leave and target.exchange is None:
        functions["norm_route"] = partial(functions["norm_route"], leave_choice=True)
    rotates = getattr(_module("attention", choice["attention"]), "CAN_ROTATE", False)
    if rotates and getattr(_module("norm_qkv", choice["norm_qkv"]), "CAN_LEAVE_ROTATION", False):
        functions["norm_qkv"] = partial(functions["norm_qkv"], leave_rotation=True)
    logits_and_choice = functions["lm_head"], functions["sample"]
    if target.communicator.num_ranks > 1:
        ranks = import_module(ACROSS)
        logits_and_choice = functions["lm_head"], ranks.sample_across(functions["best"], target.communicator)
        functions |= ranks.across(functions, target.communicator, _adding(target, choice))
    if target.exchange is not None:
        functions["moe"] = target.exchange.share(functions["moe"])
    functions["chooser"] = functions["chooser"](*logits_and_choice)
    return Ops(**{field.name: functions[field.name] for field in fields(Ops)})


def _adding(target: Target, choice: Mapping[str, str]) -> list[str]:
    """The ops that add up over ranks themselves."""
    can = hasattr(target.communicator, "norm_arguments")
    return [op for op in ("embed", *NORMS) if can and getattr(_module(op, choice[op]), "ADDS_UP", False)]


def _module(op: str, backend: str) -> ModuleType:
    return import_module(f"oscine.ops.{TABLE[op][backend]}")


def _bound(function: Callable[..., Any], target: Target) -> Callable[..., Any]:
    return partial(function, target) if "target" in signature(function).parameters else function


def describe(choice: Mapping[str, str], shapes: Shapes) -> str:
    """For the log: the backend of each op with the steps that it serves, and a line for each that serves none.

    For example `ops: lm_head=hopper (up to 64 rows; else triton), moe=hopper`.
    """
    names, lines = [], []
    for op, backend in choice.items():
        use_of: Callable[[Shapes], Use | None] | None = getattr(_module(op, backend), f"{op}_use", None)
        use = use_of and use_of(shapes)
        if use is None:
            names.append(f"{op}={backend}")
        elif use.unmet is None:
            names.append(f"{op}={backend} ({use.steps}; else {use.otherwise})")
        else:
            names.append(f"{op}={use.otherwise}")
            lines.append(f"{op}={backend} is not used: it needs {use.unmet}")
    return "\n".join((f"ops: {', '.join(names)}", *lines))
