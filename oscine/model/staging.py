"""Brings tensors from the host to a device: to a GPU through pinned buffers, in pieces.

A memory-mapped file is read into one buffer while the other is copied to the GPU. So reading and copying overlap, and
only the two buffers are held besides the tensor itself.
"""

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20


class Staging:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[tuple[Tensor, torch.cuda.Event]] = []  # made when first needed
        self._next = 0

    def bring(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it is on the device; otherwise a contiguous copy there, perhaps still being written.

        A part of a tensor on a GPU is copied too, so that the rest can go. On a CPU it may be of a file.
        """
        if tensor.device.type != "cpu" and tensor.nbytes < tensor.untyped_storage().nbytes():
            return tensor.clone()
        if self._device.type != "cuda" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        out = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        source, target = (t.view(-1).view(torch.uint8) for t in (tensor.contiguous(), out))
        for start in range(0, source.numel(), PIECE_BYTES):
            self._copy(source[start : start + PIECE_BYTES], target[start : start + PIECE_BYTES])
        return out

    def _copy(self, source: Tensor, target: Tensor) -> None:
        if len(self._buffers) < 2:
            buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
            self._buffers.append((buffer, torch.cuda.Event()))  # type: ignore[no-untyped-call]
        buffer, copied = self._buffers[self._next]
        self._next = 1 - self._next
        copied.synchronize()  # returns at once if nothing was recorded yet
        piece = buffer[: source.numel()]
        piece.copy_(source)
        target.copy_(piece, non_blocking=True)
        copied.record()
