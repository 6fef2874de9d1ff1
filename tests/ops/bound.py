"""Ops bound to the device of their inputs, as table.resolve binds them to a model's."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from oscine.ops.interface import Ops
from oscine.ops.platforms.table import choose, resolve
from oscine.ops.target import Target

CPU_TARGET = Target(torch.device("cpu"), sm_count=3)  # so few that an interpreted program takes several tiles


def reference_ops() -> Ops:
    return resolve(CPU_TARGET, choose("cpu"))


def target_of(device: torch.device) -> Target:
    return CPU_TARGET if device.type == "cpu" else Target.of(device)


def bound(op: Callable[..., Any]) -> Callable[..., Any]:
    """Of a function that takes a target first: the one that takes the rest."""

    @wraps(op)
    def call(*args: Any, **options: Any) -> Any:
        device = next(argument.device for argument in args if isinstance(argument, Tensor))
        return op(target_of(device), *args, **options)

    return call
