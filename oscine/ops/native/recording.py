"""Steps as lists of C calls: recorded while they run, then replayed by one call.

    recording = Recording()
    with recording:
        y = ...  # ops of this folder's library, on tensors with fixed addresses
    recording.run()  # computes y again, from the present values of these tensors

Between two calls of the library, a recorded step only makes empty tensors and views. A replay would miss any other
computation of torch, so that raises NotRecordable.
"""

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oscine.ops.native.library import MAX_ARGUMENTS, OF_STEPS, check, library, recorded_by

_NEW = (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default)
_CALL = np.dtype([("run", np.uint64), ("arguments", np.uint64, MAX_ARGUMENTS)])


class NotRecordable(Exception):  # noqa: N818
    """Something that is not a call of the library takes part in a step."""


class Recording:
    """Context manager, to be entered once and in one thread."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, tuple[Any, ...]]] = []
        self._memory = _Memory()
        self._stack = ExitStack()
        self._table = np.empty(0, _CALL)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that the step makes."""
        return sum(tensor.nbytes for tensor in self._memory.made)

    def __enter__(self) -> "Recording":
        self._stack.enter_context(recorded_by(_Recorder(library(), self._calls)))
        self._stack.enter_context(self._memory)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        self._table = np.array([_row(name, arguments) for name, arguments in self._calls], _CALL)

    def run(self) -> None:
        """Replays the calls. Raises MemoryError."""
        check(library().oscine_run(self._table.ctypes.data, len(self._table)))


class _Recorder:
    """The functions of the library; each records its calls."""

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; else torch imports all of its compiler for this class, which takes seconds."""
        return False

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
    return run, values + [0] * (MAX_ARGUMENTS - len(values))


def _bits(value: Any, kind: str) -> int:
    """The eight bytes of a C union with this member, as an integer."""
    if kind == "f":
        return int(np.array([value, 0], np.float32).view(np.uint64)[0])
    return (value or 0) & 0xFFFFFFFFFFFFFFFF
