"""A quicker import of torch, for a process that only runs a model."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from oscine.environment import Environment

_UNUSED = ("torch._meta_registrations", "torch.export")  # for programs that are traced: 40% of the import's CPU time


@contextmanager
def quick_torch() -> Iterator[None]:
    """The first import of torch in this context leaves out `_UNUSED`. Later they can be imported, in that order.

    With a GPU nothing is left out: the start is not quicker there.
    """
    as_it_is = "torch" in sys.modules or Environment().num_gpus
    placeholders = {} if as_it_is else {name: ModuleType(name) for name in _UNUSED}
    sys.modules.update(placeholders)
    try:
        yield
    finally:
        for name in placeholders:
            del sys.modules[name]
