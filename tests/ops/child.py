"""Calls functions in processes of their own, which are forked from one that has imported torch and no Triton.

    call("tests.ops.triton_interpreter", my_function)  # a plain function of a module

A process each time, since `triton.jit` chooses between compiler and interpreter when a kernel's module is imported.
"""

import importlib
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch


def compare_plain_tensors() -> None:
    """Lets torch.testing.assert_close not import torch.distributed.tensor and SymPy for them, for 1.3 s per process."""
    comparison: Any = torch.testing._comparison
    comparison._HAS_DTENSOR = False


def call(interpreter: str, function: Callable[[], None]) -> None:
    """`interpreter`: a module whose prepare() is called first."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "pytest"])
    with tempfile.NamedTemporaryFile() as said:
        arguments = interpreter, function.__module__, function.__name__, said.name
        child = context.Process(target=_called, args=arguments, daemon=True)
        child.start()
        child.join()
        assert child.exitcode == 0, said.read().decode(errors="replace")


def _called(interpreter: str, module: str, name: str, said: str) -> None:
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    compare_plain_tensors()
    importlib.import_module(interpreter).prepare()
    getattr(importlib.import_module(module), name)()
