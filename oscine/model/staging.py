"""Brings tensors from the host to a device: to a GPU through pinned buffers, in pieces.

A memory-mapped file is read into one buffer while the other is copied to the GPU. So reading and copying overlap, and
only the two buffers are held besides the tensor itself. A part of a file's tensor goes straight into a buffer: memory
that is new to the process would take five times as long to write.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []  # made when first needed
        self._next = 0

    def bring(self, tensor: Tensor) -> Tensor:
        """A contiguous tensor on the device, perhaps still being written; the tensor itself if it is that already.

        A part of a tensor on a GPU is copied too, so that the rest can go. On a CPU it may be of a file.
        """
        if tensor.device.type != "cpu" and self._device.type != "cpu":
            whole = tensor.nbytes == tensor.untyped_storage().nbytes()
            return tensor.contiguous() if whole else tensor.clone(memory_format=torch.contiguous_format)
        if self._device.type != "cuda":
            return tensor.contiguous().to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for source, target in pieces(tensor, out):
            self._copy(source, target)
        return out

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if len(self._buffers) < 2:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.append((buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, copied = self._buffers[self._next]
        self._next = 1 - self._next
        copied.synchronize()  # returns at once if nothing was recorded yet
        piece = buffer[: source.nbytes].view(source.dtype).view(source.shape)
        piece.copy_(source)
        target.copy_(piece, non_blocking=True)
        copied.record()


def pieces(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of corresponding pieces, of at most PIECE_BYTES each. The target and its pieces are contiguous."""
    row_bytes = source.nbytes // max(1, len(source))
    if source.is_contiguous() or row_bytes > PIECE_BYTES:
        source, target, row_bytes = source.contiguous().view(-1), target.view(-1), source.itemsize
    rows = PIECE_BYTES // max(1, row_bytes)
    return zip(torch.split(source, rows), torch.split(target, rows), strict=True)
