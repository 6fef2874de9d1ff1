"""Torch in a process that only runs a model: its import, and how many threads compute."""

import sys
from types import ModuleType

from oscine.cores import default_threads
from oscine.environment import Environment

_UNUSED = ("torch._meta_registrations", "torch.export")  # for programs that are traced: 40% of the import's CPU time


def import_torch() -> None:
    """Imports torch without `_UNUSED`, unless it was imported before. They can be imported later, in that order.

    With a GPU nothing is left out: the start is not quicker there.
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
    except RuntimeError:  # from 2.13 on it has no class before this import, which _meta_registrations makes
        import torch._prims.rng_prims


def use_threads(count: int | None) -> None:
    """Sets torch's number of threads in this process, before its first step. None: the default.

    torch itself would use all logical CPUs.
    """
    import torch

    torch.set_num_threads(count or default_threads())
