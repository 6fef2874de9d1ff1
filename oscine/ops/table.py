"""Which implementation each op uses: a literal table, resolved once at start.

Backends are imported when chosen, so that a machine needs only the packages of its own. A function that has a first
parameter `target` is bound to the Target.
"""

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from oscine.ops.interface import Ops, Shapes, Use
from oscine.ops.ranks import across
from oscine.ops.target import Target

# op -> backend -> "module:function"
TABLE: dict[str, dict[str, str]] = {
    "rms_norm": {
        "reference": "oscine.ops.norm.reference:rms_norm",
        "triton": "oscine.ops.norm.triton:rms_norm",
    },
    "norm_qkv": {
        "reference": "oscine.ops.qkv.reference:norm_qkv",
        "triton": "oscine.ops.qkv.triton:norm_qkv",
        "hopper": "oscine.ops.qkv.hopper:norm_qkv",
    },
    "attention": {
        "reference": "oscine.ops.attention.reference:attention",
        "triton": "oscine.ops.attention.triton:attention",
        "hopper": "oscine.ops.attention.hopper:attention",
    },
    "out_proj": {
        "reference": "oscine.ops.linear.reference:out_proj",
        "triton": "oscine.ops.linear.triton:out_proj",
        "hopper": "oscine.ops.linear.hopper:out_proj",
    },
    "norm_route": {
        "reference": "oscine.ops.norm.reference:norm_route",
        "triton": "oscine.ops.norm.triton:norm_route",
        "hopper": "oscine.ops.norm.hopper:norm_route",
    },
    "moe": {  # its module has prepare_experts too
        "reference": "oscine.ops.moe.reference:moe",
        "triton": "oscine.ops.moe.triton:moe",
        "hopper": "oscine.ops.moe.hopper:moe",
    },
    "lm_head": {
        "reference": "oscine.ops.linear.reference:lm_head",
        "triton": "oscine.ops.linear.triton:lm_head",
        "hopper": "oscine.ops.linear.hopper:lm_head",
    },
    "sample": {
        "reference": "oscine.ops.sample.reference:sample",
        "triton": "oscine.ops.sample.triton:sample",
    },
    "chooser": {  # made of the lm_head and the sample that are chosen
        "reference": "oscine.ops.choose.reference:bind",
        "screened": "oscine.ops.choose.screened:bind",
    },
    "prepare_step": {  # its module has write_back too
        "reference": "oscine.ops.step.reference:prepare_step",
        "triton": "oscine.ops.step.triton:prepare_step",
    },
}

# platform -> op -> backend; "*" is every op not named
DEFAULTS: dict[str, dict[str, str]] = {
    "cpu": {"*": "reference"},
    "cuda": {"*": "triton", "chooser": "reference"},
    "hopper": {
        "*": "hopper",
        "rms_norm": "triton",
        "sample": "triton",
        "chooser": "screened",
        "prepare_step": "triton",
    },
}
# (op, backend) that serves some steps only -> "module:function", which makes a Use of the Shapes
PARTIAL: dict[tuple[str, str], str] = {
    ("norm_qkv", "hopper"): "oscine.ops.qkv.hopper:use",
    ("attention", "hopper"): "oscine.ops.attention.hopper:use",
    ("out_proj", "hopper"): "oscine.ops.linear.hopper:out_proj_use",
    ("lm_head", "hopper"): "oscine.ops.linear.hopper:lm_head_use",
    ("chooser", "screened"): "oscine.ops.choose.screened:use",
}
BESIDE = {"moe": "prepare_experts", "prepare_step": "write_back"}  # op -> another one of the same module


def platform(target: Target, dtype: torch.dtype = torch.bfloat16) -> str:
    """Which row of DEFAULTS serves a target: cpu, cuda (any GPU), or hopper (compute capability 9.0).

    The kernels are for bfloat16; a GPU computes float32 by the reference. Other devices go by their own names.
    """
    if target.device.type != "cuda":
        return target.device.type
    if dtype == torch.float32:
        return "cpu"
    return "hopper" if target.capability == (9, 0) else "cuda"


def choose(platform: str, overrides: Mapping[str, str] | None = None) -> dict[str, str]:
    """op -> backend. Raises ValueError for an op, backend or platform that the table lacks; nothing falls back."""
    if platform not in DEFAULTS:
        raise ValueError(f"device {platform!r} is not supported: {', '.join(DEFAULTS)}")
    defaults = DEFAULTS[platform]
    choice = {op: defaults.get(op, defaults["*"]) for op in TABLE}
    for op, backend in (overrides or {}).items():
        if op not in TABLE:
            raise ValueError(f"there is no op {op!r}: {', '.join(TABLE)}")
        if backend not in TABLE[op]:
            raise ValueError(f"op {op!r} has no backend {backend!r}: {', '.join(TABLE[op])}")
        choice[op] = backend
    return choice


def resolve(target: Target, choice: Mapping[str, str]) -> Ops:
    """The chosen backends (see choose), bound to the target. Raises ValueError where one cannot be imported."""
    functions: dict[str, Any] = {}
    for op, backend in choice.items():
        path, _, function = TABLE[op][backend].partition(":")
        try:
            module = import_module(path)
        except ImportError as error:
            raise ValueError(f"backend {backend!r} of op {op!r} cannot be loaded: {error}") from error
        functions[op] = _bound(getattr(module, function), target)
        if op in BESIDE:
            functions[BESIDE[op]] = _bound(getattr(module, BESIDE[op]), target)
    if target.communicator.num_ranks > 1:
        functions |= across(functions, target.communicator)
    functions["chooser"] = functions["chooser"](functions["lm_head"], functions["sample"])
    return Ops(**functions)


def _bound(function: Callable[..., Any], target: Target) -> Callable[..., Any]:
    return partial(function, target) if "target" in signature(function).parameters else function


def describe(choice: Mapping[str, str], shapes: Shapes) -> str:
    """For the log: the backend of each op with the steps that it serves, and a line for each that serves none.

    For example `ops: attention=hopper (decodes of 2-64 sequences; else triton), moe=hopper`.
    """
    names, lines = [], []
    for op, backend in choice.items():
        use = _use(op, backend, shapes)
        if use is None:
            names.append(f"{op}={backend}")
        elif use.unmet is None:
            names.append(f"{op}={backend} ({use.steps}; else {use.otherwise})")
        else:
            names.append(f"{op}={use.otherwise}")
            lines.append(f"{op}={backend} is not used: it needs {use.unmet}")
    return "\n".join((f"ops: {', '.join(names)}", *lines))


def _use(op: str, backend: str, shapes: Shapes) -> Use | None:
    """None for a backend that serves every step."""
    if (op, backend) not in PARTIAL:
        return None
    path, _, function = PARTIAL[op, backend].partition(":")
    use: Use = getattr(import_module(path), function)(shapes)
    return use
