"""Layers whose experts stay in host memory, since the GPU is too small for them.

In a step of few tokens the CPU computes these experts: the GPU sends the tokens, and reads the sums (transfer.py). The
CPU's part is a host function of the CUDA stream, so a CUDA graph can contain it. A step of many tokens needs all
experts: they are copied to the GPU, which computes them (stream.py).

Host memory has the experts once, in the layout for CPUs. The GPU unpacks them after the copy.
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oscine.extensions.experts_on_host.packed import HostMatrix, published
from oscine.ops.interface import MxExperts, Routing
from oscine.ops.moe import native, reference
from oscine.ops.native.library import library
from oscine.ops.native.weights import PackedExperts
from oscine.ops.pinned import pin
from oscine.ops.target import Target
from oscine.system.cores import usable_cores

if TYPE_CHECKING:  # it needs Triton, which a CPU does not
    from oscine.extensions.experts_on_host.stream import ExpertStream

# Tokens of the largest step that the CPU computes. A layer of 120b takes 18 ms then, with 14 cores. Its copy to the GPU
# takes 31 ms.
MAX_TOKENS = 128
_MAX_SPARE_CORES = 2  # for the engine and the driver; fewer on machines with less than eight cores
_PATIENCE = 20_000  # spins before a thread sleeps: 300 us or more, which is longer than the GPU's part of a layer
_PINNING_THREADS = 4

Moe = Callable[[Tensor, Routing, Any, float], Tensor]


class _Call(ctypes.Structure):
    """The argument of oscine_host_moe (../native/host.c)."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "gate_up", "gate_up_bias", "down", "down_bias")),
        ("out", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("num_tokens", "width", "inner", "width_blocks", "inner_blocks")),
        *((name, ctypes.c_int64) for name in ("num_experts", "per_token")),
        ("limit", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True)
class HostExperts:
    """The experts of one layer."""

    packed: PackedExperts
    matrices: tuple[HostMatrix, HostMatrix]  # the same memory, for copies to the GPU
    calls: dict[int, _Call] = field(default_factory=dict)  # by number of tokens; CUDA graphs hold their addresses


class _HostFunction:
    """Experts of a few tokens, computed by the CPU as a host function of the current CUDA stream.

    All layers share the buffers, which are pinned and have room for MAX_TOKENS.
    """

    def __init__(self, target: Target, hidden: int, per_token: int) -> None:
        def buffer(width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(MAX_TOKENS, width, dtype=dtype, pin_memory=on_gpu(target))

        self._on_gpu = on_gpu(target)
        self._x_TH, self._out_TH = (buffer(hidden, torch.float32) for _ in range(2))
        self._ids_TK, self._weights_TK = buffer(per_token, torch.int64), buffer(per_token, torch.float32)

    def moe(self, x_TH: Tensor, routing: Routing, experts: HostExperts, swiglu_limit: float) -> Tensor:
        """[T, H] -> float32 [T, 1, H]. `swiglu_limit` must be the same in all steps."""
        count = len(x_TH)
        if count not in experts.calls:
            experts.calls[count] = self._call(experts.packed, count, swiglu_limit)
        if self._on_gpu:
            from oscine.extensions.experts_on_host.transfer import receive, send

            send(x_TH, routing, self._x_TH, self._ids_TK, self._weights_TK)
            self._queue(experts.calls[count])
            return receive(self._out_TH[:count], x_TH.device)[:, None]
        sent = (self._x_TH, x_TH), (self._ids_TK, routing.expert_ids_TK), (self._weights_TK, routing.weights_TK)
        for buffer, tensor in sent:
            buffer[:count] = tensor
        library().oscine_host_moe(ctypes.addressof(experts.calls[count]))
        return self._out_TH[:count, None].clone()

    def _call(self, packed: PackedExperts, count: int, limit: float) -> _Call:
        buffers = self._x_TH, self._ids_TK, self._weights_TK
        weights = packed.gate_up, packed.gate_up_bias, packed.down, packed.down_bias
        num_experts, num_columns = packed.gate_up_bias.shape
        return _Call(
            *(tensor.data_ptr() for tensor in (*buffers, *weights, self._out_TH)),
            count,
            self._x_TH.shape[1],
            num_columns // 2,
            packed.gate_up_blocks,
            packed.down_blocks,
            num_experts,
            self._ids_TK.shape[1],
            limit,
        )

    def _queue(self, call: _Call) -> None:
        stream, function = torch.cuda.current_stream().cuda_stream, library().oscine_host_moe
        launch = _driver().cuLaunchHostFunc
        error = launch(ctypes.c_void_p(stream), ctypes.cast(function, ctypes.c_void_p), ctypes.byref(call))
        if error:
            raise RuntimeError(f"the CUDA driver refuses a host function: cuLaunchHostFunc gave error {error}")


class HostLayers:
    """An oscine.model.weights.HostPlace."""

    max_tokens = MAX_TOKENS

    def __init__(
        self, target: Target, layers: Collection[int], hidden: int, per_token: int, num_threads: int | None = None
    ) -> None:
        """`layers`: indices. `per_token`: experts per token. `num_threads`: CPU threads; None: nearly all cores."""
        self.layers = layers
        self._target = target
        self._loaded: list[HostExperts] = []
        self._few = _HostFunction(target, hidden, per_token)
        self._many: ExpertStream | None = None
        self._pinning, self._pinned = ThreadPoolExecutor(_PINNING_THREADS), list[Future[None]]()
        if on_gpu(target):
            cores = usable_cores()
            library().oscine_set_num_threads(num_threads or cores - min(_MAX_SPARE_CORES, cores // 4))
            library().oscine_set_patience(_PATIENCE)
            # Queued host functions still read and write the memory of this object.
            weakref.finalize(self, _wait_for, target.device).atexit = False

    def prepare_experts(self, experts: MxExperts) -> HostExperts:
        """Packs the published experts of one layer, on the host. Biases have the dtype of the activations."""
        packed, device = native.prepare_experts(experts), self._target.device
        matrices = (
            HostMatrix(packed.gate_up, experts.gate_up_bias.to(device), packed.gate_up_blocks),
            HostMatrix(packed.down, experts.down_bias.to(device), packed.down_blocks),
        )
        if on_gpu(self._target):
            self._pinned += [self._pinning.submit(pin, matrix.packed, "--experts-on-host") for matrix in matrices]
        self._loaded.append(HostExperts(packed, matrices))
        return self._loaded[-1]

    def loaded(self) -> None:
        """To be called after the last layer. Allocates the GPU memory that the layers share."""
        for pinned in self._pinned:
            pinned.result()
        self._pinning.shutdown()
        if on_gpu(self._target):
            from oscine.extensions.experts_on_host.stream import ExpertStream

            self._many = ExpertStream(self._target, [experts.matrices for experts in self._loaded])

    def beside(self, moe: Moe) -> Moe:
        """The `moe` op for all layers: this one for layers on the host, else the given one."""

        def of_either(x_TH: Tensor, routing: Routing, experts: Any, swiglu_limit: float) -> Tensor:
            place = self.moe if isinstance(experts, HostExperts) else moe
            return place(x_TH, routing, experts, swiglu_limit)

        return of_either

    def moe(self, x_TH: Tensor, routing: Routing, experts: HostExperts, swiglu_limit: float) -> Tensor:
        if len(x_TH) <= MAX_TOKENS:
            return self._few.moe(x_TH, routing, experts, swiglu_limit)
        gate_up, down = experts.matrices
        if self._many is not None:
            return self._many.moe(x_TH, routing, gate_up, down, swiglu_limit)
        brought = MxExperts(*published(gate_up), gate_up.bias, *published(down), down.bias)
        return reference.moe(x_TH, routing, brought, swiglu_limit)


def _wait_for(device: torch.device) -> None:
    if not torch.cuda.is_current_stream_capturing():  # a wait would break the capture
        torch.cuda.synchronize(device)


def on_gpu(target: Target) -> bool:
    return target.device.type == "cuda"


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
