"""Moves arrays between host and device without making either wait.

Pinned memory comes from torch's caching host allocator. It reuses a block only when every copy from or into it is done,
so no buffer is overwritten too early. On a CPU there is nothing to move.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNED = 4  # elements of 4 or 8 bytes: at least 16 bytes


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on a GPU, or the memory of the array itself on a CPU; contiguous, row by row."""
    assert array.flags.c_contiguous, "a tensor would have its strides, and kernels do not expect them"
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def upload_columns(table: NDArray[np.generic], device: torch.device) -> list[Tensor]:
    """Uploads the rows of a table. Each is contiguous and aligned: kernels would be compiled again for other rows."""
    height, count = table.shape
    padded = np.zeros((height, -(-count // _ALIGNED) * _ALIGNED), table.dtype)  # row by row, unlike a selection
    padded[:, :count] = table
    return [column[:count] for column in upload(padded, device)]


def staging(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 of the host, to be written and then given to `send`."""
    return torch.empty(shape, dtype=torch.int32, pin_memory=device.type == "cuda")


def send(staged: Tensor, device: torch.device) -> Tensor:
    """A copy on a GPU, or the same memory on a CPU."""
    return staged if device.type == "cpu" else staged.to(device, non_blocking=True)


def upload_into(out: Tensor, array: NDArray[np.generic]) -> None:
    """Writes the array to the front of `out`."""
    tensor = torch.from_numpy(array)
    out[: len(array)].copy_(tensor if out.device.type == "cpu" else tensor.pin_memory(), non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """A copy on the host, in pinned memory. Read it only after a later Mark has passed."""
    return tensor if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


class Mark:
    """A point in the device's queue of work, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    @property
    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Waits until the device has done all work queued before the mark."""
        if self._event is not None:
            self._event.synchronize()
