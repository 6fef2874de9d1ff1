"""Copies between the KV memory of a device and plain host memory. The calling thread waits for them."""

import queue
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a fake executor has no torch
    import torch

_STAGING_BYTES = 32 << 20  # of each of the threads that copy

Bytes = NDArray[np.uint8]


class PageBytes(NamedTuple):
    """A page of a group, and the host memory that its bytes come from or go to."""

    group: int
    page: int
    data: Bytes


class PageMemory(Protocol):
    """Any thread may call."""

    def save(self, pages: Sequence[PageBytes]) -> None:
        """From the device to the host."""
        ...

    def load(self, pages: Sequence[PageBytes]) -> None:
        """From the host to the device."""
        ...


class HostMemory:
    """KV memory that is host memory itself."""

    def __init__(self, groups: Sequence[Bytes]) -> None:
        """`groups`: [pages, bytes of a page] each."""
        self._groups = groups

    def save(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            data[:] = self._groups[group][page]

    def load(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            self._groups[group][page] = data


class _Lane:
    """Pinned memory and a stream, for one thread at a time."""

    def __init__(self, device: "torch.device", num_bytes: int) -> None:
        import torch

        self.pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self.bytes: Bytes = self.pinned.numpy()
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps while it waits


class CudaMemory:
    """KV memory on a CUDA device, copied through pinned memory that is allocated once.

    A pinned allocation in the middle of a step could wait for the device, and the device may wait for another engine.
    """

    def __init__(self, kv: Sequence["torch.Tensor"], num_threads: int) -> None:
        import torch

        self._groups = [pages.view(len(pages), -1).view(torch.uint8) for pages in kv]
        size = max(_STAGING_BYTES, *(pages.shape[1] for pages in self._groups))
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for _ in range(num_threads):
            self._lanes.put(_Lane(kv[0].device, size))

    def save(self, pages: Sequence[PageBytes]) -> None:
        import torch

        lane = self._lanes.get()
        try:
            for some in _portions(pages, len(lane.bytes)):
                with torch.cuda.stream(lane.stream):
                    for (group, page, data), start in some:
                        lane.pinned[start : start + len(data)].copy_(self._groups[group][page], non_blocking=True)
                    lane.done.record(lane.stream)
                lane.done.synchronize()
                for (_, _, data), start in some:
                    data[:] = lane.bytes[start : start + len(data)]
        finally:
            self._lanes.put(lane)

    def load(self, pages: Sequence[PageBytes]) -> None:
        import torch

        lane = self._lanes.get()
        try:
            for some in _portions(pages, len(lane.bytes)):
                with torch.cuda.stream(lane.stream):
                    for (group, page, data), start in some:
                        lane.bytes[start : start + len(data)] = data
                        source = lane.pinned[start : start + len(data)]
                        self._groups[group][page].copy_(source, non_blocking=True)
                    lane.done.record(lane.stream)
                lane.done.synchronize()
        finally:
            self._lanes.put(lane)


def _portions(pages: Sequence[PageBytes], most_bytes: int) -> Iterator[list[tuple[PageBytes, int]]]:
    """As many pages at a time as fit, each with the place where its bytes begin."""
    some: list[tuple[PageBytes, int]] = []
    start = 0
    for page in pages:
        if start + len(page.data) > most_bytes:
            yield some
            some, start = [], 0
        some.append((page, start))
        start += len(page.data)
    yield some
