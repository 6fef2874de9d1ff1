"""GPU memory whose addresses are known from the start, and whose bytes come when it is known how many there are.

CUDA graphs keep the addresses of the KV cache. So the address space is reserved for all of the GPU before they are
captured, and physical memory is mapped to it afterwards, when weights, graphs and the largest step have what they need.
This module calls the virtual memory functions of the CUDA driver API.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

_PINNED, _ON_DEVICE, _READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_, CU_MEM_LOCATION_TYPE_, CU_MEM_ACCESS_FLAGS_PROT_


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class ReservedMemory:
    """`num_bytes` of addresses on a GPU, of which parts have memory. It is zero where it is mapped.

    The memory lives as long as this object or a tensor of it.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        """Raises MemoryError if there are no such addresses."""
        torch.cuda.current_stream(device)  # makes the context
        self._device, self._index = device, device.index or 0
        self._properties = _Properties(type=_PINNED, location=_Location(_ON_DEVICE, self._index))
        self.granularity = self._granularity()
        self.num_bytes = -(-num_bytes // self.granularity) * self.granularity
        address = ctypes.c_uint64()
        _call("cuMemAddressReserve", ctypes.byref(address), _size(self.num_bytes), _size(0), _U64(0), _U64(0))
        self._address = address.value
        self._mapped: list[tuple[int, int]] = []  # start and end, in bytes
        self._released: list[tuple[int, int]] = []  # of what was mapped before `release`

    @property
    def num_mapped(self) -> int:
        """Bytes."""
        return sum(end - start for start, end in self._mapped)

    @property
    def bytes(self) -> Tensor:
        """uint8 [num_bytes]. Only what is mapped may be read and written. Byte 0 must be mapped."""
        found: Tensor = torch.as_tensor(_Array(self), device=self._device)
        return found

    def map(self, start: int, end: int) -> None:
        """Maps memory to bytes `start` to `end`, rounded out to whole units. Mapped bytes stay as they are.

        Raises MemoryError if the GPU has not enough left.
        """
        unit = self.granularity
        for low, high in self._gaps(start // unit * unit, -(-end // unit) * unit):
            self._map(low, high)
            self.bytes[low:high].zero_()

    def release(self) -> None:
        """Gives all memory back to the GPU. The addresses stay, and must not be used until `restore`."""
        torch.cuda.synchronize(self._device)
        while self._mapped:
            start, end = self._mapped.pop()
            _driver().cuMemUnmap(_U64(self._address + start), _size(end - start))
            self._released.append((start, end))

    def restore(self, *, zero: bool = True) -> None:
        """Maps memory where it was before `release`. Its content is gone. `zero`: it is zero again.

        Raises MemoryError if the GPU has not enough left; then nothing is mapped, and it may be tried again.
        """
        wanted, self._released = self._released, []
        try:
            for start, end in sorted(wanted):
                self._map(start, end)
        except BaseException:
            self.release()
            self._released = wanted
            raise
        if zero:
            for start, end in self._mapped:
                self.bytes[start:end].zero_()

    def _gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        found, at = [], start
        for low, high in sorted(self._mapped):
            if at < min(low, end):
                found.append((at, min(low, end)))
            at = max(at, high)
        return [*found, (at, end)] if at < end else found

    def _map(self, start: int, end: int) -> None:
        handle, size, address = ctypes.c_uint64(), _size(end - start), _U64(self._address + start)
        with torch.cuda.device(self._device):
            _call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), _U64(0))
            try:
                _call("cuMemMap", address, size, _size(0), handle, _U64(0))
            finally:
                _call("cuMemRelease", handle)  # it stays as long as it is mapped
            access = _Access(self._properties.location, _READ_WRITE)
            try:
                _call("cuMemSetAccess", address, size, ctypes.byref(access), _size(1))
            except BaseException:
                _driver().cuMemUnmap(address, size)
                raise
        self._mapped.append((start, end))

    def _granularity(self) -> int:
        found = ctypes.c_size_t()
        _call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(self._properties), ctypes.c_int(0))
        return found.value

    def __del__(self) -> None:
        for start, end in getattr(self, "_mapped", []):
            _driver().cuMemUnmap(_U64(self._address + start), _size(end - start))
        if hasattr(self, "_address"):
            _driver().cuMemAddressFree(_U64(self._address), _size(self.num_bytes))


class _Array:
    """What torch reads to make a tensor, which keeps this alive."""

    def __init__(self, memory: ReservedMemory) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (memory.num_bytes,),
            "typestr": "|u1",
            "data": (memory._address, False),
            "version": 3,
        }


_U64, _size = ctypes.c_uint64, ctypes.c_size_t
_NO_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status == _NO_MEMORY:
        raise MemoryError("the GPU has not enough memory left")
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(ctypes.c_int(status), ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'').decode() or status}")
