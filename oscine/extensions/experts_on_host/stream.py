"""Streams experts from host memory to the GPU, for steps of many tokens.

A layer has two matrices, and the GPU has one place for each. While one matrix is multiplied, the other one is copied.
So the copies hardly ever wait, and they take nearly all of the time. Three CUDA streams work together:

    copies     a piece of a matrix -> one of two buffers      after the buffer was unpacked
    unpacking  buffer -> place                                after the copy of the piece, when the place is free
    step       the product                                    after all pieces were unpacked; then the place is free
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle

import torch
from torch import Tensor

from oscine.extensions.experts_on_host.packed import HostMatrix
from oscine.extensions.experts_on_host.unpack import unpack
from oscine.ops.interface import Routing
from oscine.ops.moe import triton as portable
from oscine.ops.target import Target

PIECE_BYTES = 32 << 20


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def _urgent_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Place:
    """GPU memory for one unpacked matrix."""

    memory: Tensor  # uint8
    free: torch.cuda.Event = field(default_factory=_event)
    ready: torch.cuda.Event = field(default_factory=_event)


@dataclass(frozen=True, slots=True)
class _Buffer:
    """GPU memory for one packed piece of a matrix."""

    memory: Tensor  # uint8
    arrived: torch.cuda.Event = field(default_factory=_event)
    unpacked: torch.cuda.Event = field(default_factory=_event)


class ExpertStream:
    """Computes the experts of layers on the host, one layer after the other. All layers share its memory."""

    def __init__(self, target: Target, matrices: Sequence[tuple[HostMatrix, HostMatrix]]) -> None:
        """`matrices`: gate_up and down of each layer."""

        def memory(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.uint8, device=target.device)

        self._target = target
        sizes = (max(17 * matrix.num_scales for matrix in of_layers) for of_layers in zip(*matrices, strict=True))
        self._places = [_Place(memory(size)) for size in sizes]
        self._piece_bytes = max(PIECE_BYTES, *(each.packed.shape[1] for of_layer in matrices for each in of_layer))
        self._buffers = cycle([_Buffer(memory(self._piece_bytes)) for _ in range(2)])
        self._copies, self._unpacking = _urgent_stream(target.device), _urgent_stream(target.device)
        for stream in (self._copies, self._unpacking):
            stream.wait_stream(torch.cuda.current_stream())  # earlier kernels may still use this memory

    def moe(self, x_TH: Tensor, routing: Routing, gate_up: HostMatrix, down: HostMatrix, swiglu_limit: float) -> Tensor:
        """The same op as triton.moe."""
        brought = [self._bring(*each) for each in zip((gate_up, down), self._places, strict=True)]
        pairs = portable.sort(self._target, routing, len(gate_up.bias))
        with self._used(0):
            a_TKI = portable.gated(self._target, x_TH, pairs, brought[0], swiglu_limit)
        with self._used(1):
            return portable.weighted(self._target, a_TKI, pairs, brought[1])

    @contextmanager
    def _used(self, index: int) -> Iterator[None]:
        """Makes the step wait for the matrix in a place, and frees the place afterwards."""
        place, step = self._places[index], torch.cuda.current_stream()
        step.wait_event(place.ready)
        yield
        place.free.record(step)

    def _bring(self, matrix: HostMatrix, place: _Place) -> portable.Matrix:
        """Queues copies and unpacking of a matrix. Returns the matrix in its place."""
        shape, scales_end = (*matrix.bias.shape, matrix.num_blocks), 17 * matrix.num_scales
        scales = place.memory[16 * matrix.num_scales : scales_end].view(shape)
        blocks = place.memory[: 16 * matrix.num_scales].view(*shape, 16)
        at_once = self._piece_bytes // matrix.packed.shape[1]  # experts
        self._unpacking.wait_event(place.free)
        for first in range(0, shape[0], at_once):
            self._copy(*(each[first : first + at_once] for each in (matrix.packed, blocks, scales)))
        place.ready.record(self._unpacking)
        return portable.Matrix(blocks, scales, matrix.bias)

    def _copy(self, packed: Tensor, blocks: Tensor, scales: Tensor) -> None:
        buffer = next(self._buffers)
        piece = buffer.memory[: packed.nbytes].view(packed.shape)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(buffer.unpacked)
            piece.copy_(packed, non_blocking=True)
            buffer.arrived.record()
        with torch.cuda.stream(self._unpacking):
            self._unpacking.wait_event(buffer.arrived)
            unpack(piece, blocks, scales)
            buffer.unpacked.record()
