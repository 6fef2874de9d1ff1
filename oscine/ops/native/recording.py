"""Steps as lists of C calls: recorded while they run, then repeated by one call.

    recording = Recording()
    with recording:
        y = ...  # ops of this folder's library, on tensors that stay where they are
    recording.run()  # computes y anew, from what these tensors hold now

Between two calls of the library, a recorded step only makes empty tensors and views. Anything else that torch computes
would be missing from a later run, so it raises NotRecordable.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oscine.ops.native.library import MOST_ARGUMENTS, OF_STEPS, check, library, recorded_by

_NEW = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_CALL = np.dtype([("run", np.uint64), ("arguments", np.uint64, MOST_ARGUMENTS)])


class NotRecordable(Exception):  # noqa: N818
    """Something that is not a call of the library takes part in a step."""


class Recording:
    """Context manager, in one thread and once."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._memory = _Memory()
        self._stack = ExitStack()
        self._table = np.empty(0, _CALL)

    @property
    def nbytes(self) -> int:
        """Of the tensors that the step makes."""
        return sum(tensor.nbytes for tensor in self._memory.made)

    def __enter__(self) -> "Recording":
        self._stack.enter_context(recorded_by(_Recorder(library(), self._calls)))
        self._stack.enter_context(self._memory)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._table = np.array([_row(name, arguments) for name, arguments in self._calls], _CALL)

    def run(self) -> None:
        """Raises MemoryError."""
        check(library().oscine_run(self._table.ctypes.data, len(self._table)))


class _Recorder:
    """Functions of the library that note how they are called."""

    def __init__(self, library: Any, calls: list[tuple[str, tuple[Any, ...]]]) -> None:
        self._library, self._calls = library, calls

    def __getattr__(self, name: str) -> Callable[..., int]:
        function: Callable[..., int] = getattr(self._library, name)

        def call(*arguments: Any) -> int:
            self._calls.append((name, arguments))
            return function(*arguments)

        return call


class _Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the tensors that a step makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.made: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in _NEW:
            self.made.append(result)
        elif any(given.alias_info is None or given.alias_info.is_write for given in function._schema.returns):
            raise NotRecordable(f"{function} computes something in a step")
        return result


def _row(name: str, arguments: tuple[Any, ...]) -> tuple[int, list[int]]:
    values = [_bits(value, kind) for value, kind in zip(arguments, OF_STEPS[name], strict=True)]
    run = ctypes.cast(getattr(library(), f"run_{name}"), ctypes.c_void_p).value
    assert run is not None
    return run, values + [0] * (MOST_ARGUMENTS - len(values))


def _bits(value: Any, kind: str) -> int:
    """Of a member of a C union of eight bytes."""
    if kind == "f":
        return int(np.array([value, 0], np.float32).view(np.uint64)[0])
    return (value or 0) & 0xFFFFFFFFFFFFFFFF
