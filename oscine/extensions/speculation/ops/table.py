"""Which backend the ops of a draft head have, by the platform of the target's ops (ops/table.py)."""

from dataclasses import fields
from functools import partial
from importlib import import_module
from inspect import signature
from typing import Any

from oscine.extensions.speculation.ops.interface import DraftOps
from oscine.ops.target import Target

# platform -> module of this folder; any other platform has the reference
BACKENDS = {"native": "native", "cuda": "triton", "hopper": "triton"}


def resolve_draft(target: Target, platform: str) -> DraftOps:
    module = import_module(f"oscine.extensions.speculation.ops.{BACKENDS.get(platform, 'reference')}")
    functions: dict[str, Any] = {}
    for field in fields(DraftOps):
        function = getattr(module, field.name)
        bound = "target" in signature(function).parameters
        functions[field.name] = partial(function, target) if bound else function
    return DraftOps(**functions)
