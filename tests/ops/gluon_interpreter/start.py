"""Begins a process in which all kernels are interpreted."""

import torch

from tests.ops.gluon_interpreter.language import install
from tests.ops.triton_interpreter import do_less


def prepare() -> None:
    # So unwritten memory is full of NaN, or of the largest integer. The public function imports a compiler.
    torch._C._set_deterministic_algorithms(True, warn_only=False)
    install()
    do_less()
