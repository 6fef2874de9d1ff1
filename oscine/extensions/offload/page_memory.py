"""Copies between the KV memory of a device and plain host memory. The calling thread waits for them."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from oscine.system.cores import usable_cores

if TYPE_CHECKING:  # a fake executor has no torch
    import torch

_PIECE_BYTES = 64 << 20  # that one thread touches at a time

Bytes = NDArray[np.uint8]


class PageBytes(NamedTuple):
    """A page of a group, and the host memory that its bytes come from or go to."""

    group: int
    page: int
    data: Bytes


class PageMemory(Protocol):
    """Any thread may call."""

    def pin(self, memory: Bytes) -> None:
        """Prepares host memory that stays where it is: pages are copied only from and to such memory."""
        ...

    def save(self, pages: Sequence[PageBytes]) -> None:
        """From the device to the host."""
        ...

    def load(self, pages: Sequence[PageBytes]) -> None:
        """From the host to the device."""
        ...


def bytes_of(pages: "torch.Tensor") -> "torch.Tensor":
    """[pages, bytes of a page]; pages may lie apart."""
    import torch

    return pages.flatten(1).view(torch.uint8)


class HostMemory:
    """KV memory that is host memory itself."""

    def __init__(self, groups: Sequence[Bytes]) -> None:
        """`groups`: [pages, bytes of a page] each."""
        self._groups = groups

    def pin(self, memory: Bytes) -> None:
        pass

    def save(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            data[:] = self._groups[group][page]

    def load(self, pages: Sequence[PageBytes]) -> None:
        for group, page, data in pages:
            self._groups[group][page] = data


class CudaMemory:
    """KV memory on a CUDA device. The host memory is pinned, so the device copies at the speed of its bus."""

    def __init__(self, kv: Sequence["torch.Tensor"]) -> None:
        import torch

        self._device = kv[0].device
        self._groups = [bytes_of(pages) for pages in kv]
        self._pinned: list[torch.Tensor] = []
        self._streams = threading.local()  # a stream and an event for each thread

    def pin(self, memory: Bytes) -> None:
        """Raises ValueError."""
        import torch

        from oscine.ops.pinned import pin

        flat = memory.reshape(-1)
        with ThreadPoolExecutor(usable_cores()) as threads:  # the system gives memory where it is first written
            threads.map(lambda start: flat[start : start + _PIECE_BYTES].fill(0), range(0, len(flat), _PIECE_BYTES))
        self._pinned.append(torch.from_numpy(flat))
        pin(self._pinned[-1], "--kv-offload-bytes")

    def save(self, pages: Sequence[PageBytes]) -> None:
        self._copy([(self._on_host(page), self._on_device(page)) for page in pages])

    def load(self, pages: Sequence[PageBytes]) -> None:
        self._copy([(self._on_device(page), self._on_host(page)) for page in pages])

    def _on_device(self, page: PageBytes) -> "torch.Tensor":
        return self._groups[page.group][page.page]

    def _on_host(self, page: PageBytes) -> "torch.Tensor":
        import torch

        return torch.from_numpy(page.data)

    def _copy(self, pairs: Sequence[tuple["torch.Tensor", "torch.Tensor"]]) -> None:
        """(to, from). One call for all: each call would wait for the thread that runs the steps to let it go on."""
        import torch

        stream, done = self._own()
        targets, sources = zip(*pairs, strict=True)
        with torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)
            done.record(stream)
        done.synchronize()

    def _own(self) -> tuple["torch.cuda.Stream", "torch.cuda.Event"]:
        import torch

        if not hasattr(self._streams, "own"):
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._streams.own = stream, torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps
        own: tuple[torch.cuda.Stream, torch.cuda.Event] = self._streams.own
        return own
