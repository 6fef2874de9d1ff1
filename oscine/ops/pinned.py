"""Pins host memory, so that a GPU can read and write it by itself, at the speed of its bus."""

import weakref

import torch
from torch import Tensor


def pin(memory: Tensor, option: str) -> None:
    """Pins the memory of a tensor for as long as it lives. Raises ValueError, naming the option that asked for it."""
    runtime, address = torch.cuda.cudart(), memory.data_ptr()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
    if error:
        raise ValueError(f"{option}: {memory.nbytes} bytes of host memory cannot be pinned: CUDA error {error}")
    # Else CUDA would take later tensors at these addresses for pinned.
    weakref.finalize(memory, runtime.cudaHostUnregister, address).atexit = False
