"""Which backend the ops of a draft head have, by the platform of the target's ops (ops/platforms)."""

from dataclasses import fields
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from oscine.extensions.speculation.ops.interface import DraftOps
from oscine.ops.platforms.interface import Platform
from oscine.ops.target import Target


def backend_of(platform: Platform) -> str:
    """A module of this folder."""
    if platform.has_c_kernels:
        return "native"
    return "triton" if platform.uses_triton else "reference"


def resolve_draft(target: Target, platform: Platform) -> DraftOps:
    module = import_module(f"oscine.extensions.speculation.ops.{backend_of(platform)}")
    functions: dict[str, Any] = {}
    for field in fields(DraftOps):
        function = getattr(module, field.name)
        bound = "target" in signature(function).parameters
        functions[field.name] = partial(function, target) if bound else function
    return DraftOps(**functions)
