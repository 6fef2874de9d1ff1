"""Torch in a process that only runs a model: its import, and its number of threads."""

import sys
from types import ModuleType

from oscine.system.cores import default_threads
from oscine.system.environment import Environment

_UNUSED = ("torch._meta_registrations", "torch.export")  # for programs that are traced: 40% of the import's CPU time


def import_torch() -> None:
    """Imports torch without the modules of `_UNUSED`. They can be imported later, in that order.

    Does nothing if torch is imported already. Does nothing with a GPU either: the start would not be faster.
    """
    if "torch" in sys.modules or Environment().num_gpus:
        return
    sys.modules.update({name: ModuleType(name) for name in _UNUSED})
    try:
        import torch
    finally:
        for name in _UNUSED:
            del sys.modules[name]
    for name in _UNUSED:  # torch has the placeholders as attributes, which `from torch import export` would find
        vars(torch).pop(name.removeprefix("torch."), None)
    try:
        torch.Generator()
    except RuntimeError:  # since 2.13 it needs this module, which _meta_registrations would import
        import torch._prims.rng_prims


def use_threads(count: int | None) -> None:
    """Sets torch's number of threads in this process, before its first step. None: the default.

    torch itself would use all logical CPUs.
    """
    import torch

    torch.set_num_threads(count or default_threads())
